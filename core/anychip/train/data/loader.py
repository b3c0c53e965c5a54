"""Batches for one rank: windows of the tokens in their order, on the device, from any position.

Tokens that are not there yet are waited for.

The state is the number of windows that were handed out. What a thread made ahead and nobody took is
no part of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anychip.contract import HOST
from anychip.train import schema
from anychip.train.data.order import Order, Places, Turns, count_windows, share
from anychip.train.data.packing import mask_targets, split_marked
from anychip.train.data.prefetch import PAUSE_S, Prefetcher
from anychip.train.data.rows import Mixture, TokenRow, as_mixture
from anychip.train.data.text import ByteTokenizer, Tokenizer

Batch = tuple[Tensor, Tensor]
"""tokens and targets, each (batch_size, context) int64; targets are the tokens that follow."""

_POSITION = {
    "position": schema.COUNT, "tokenizer?": str, "text": str, "context": schema.COUNT,
    "seed": schema.COUNT, "shuffle_buffer?": schema.COUNT,
}  # fmt: skip
# What a position of an earlier version does not say: there was no choice.
_EARLIER = {"tokenizer": ByteTokenizer.name, "shuffle_buffer": 0}


class _HostBatch(NamedTuple):
    """Windows before they go to the device, the position that they are for, and targets in all.

    Attributes:
        num_targets: with a loss, in the windows of all ranks.
    """

    position: int
    windows: Tensor
    num_targets: int


class _Windows:
    """Makes batches on the host; holds no Loader, so that a thread may hold it."""

    def __init__(self, loader: Loader) -> None:
        self.rows, self.context = loader.tokens.rows, loader.context
        self.batch_size = loader.batch_size
        self.rank, self.world_size = loader.rank, loader.world_size
        self.pin, seed = loader.pin, loader.seed
        self.end, self.counts = loader.tokenizer.end_of_document, loader.counts
        size = loader.shuffle_buffer
        orders = [
            # Another order for each, since equal rows would come in the same one.
            Order(*row.extent(), context=self.context, seed=seed + number, shuffle_buffer=size)
            for number, row in enumerate(self.rows)
        ]
        self.turns = Turns(orders, loader.tokens.weights, seed=seed)

    def at(self, position: int) -> Callable[[], _HostBatch] | None:
        """What reads this rank's part of the global batch at a position; threads may, at once.

        None: not all of the global batch is there yet.
        """
        every = range(position, position + self.batch_size * self.world_size)
        if not self._are_there(every):
            return None
        mine = share(
            position, batch_size=self.batch_size, rank=self.rank, world_size=self.world_size
        )
        counted = self.turns.places(every) if self.counts else []
        return partial(self._read, position, self.turns.places(mine), counted)

    def _are_there(self, numbers: range) -> bool:
        """Asks rows that grow how far they are, when they were not as far."""
        if not self.turns.are_there(numbers):
            for row, order in zip(self.rows, self.turns.orders, strict=True):
                order.grow(*row.extent())
        return self.turns.are_there(numbers)

    def _read(self, position: int, places: Places, counted: Places) -> _HostBatch:
        """(batch_size, context + 1) int64."""
        windows = np.empty((self.batch_size, self.context + 1), np.int64)
        for row, (own, starts) in zip(self.rows, places, strict=True):
            windows[own] = row.read(starts, self.context + 1)
        count = self.batch_size * self.world_size * self.context
        for row, (_, starts) in zip(self.rows, counted, strict=False):
            count -= row.count_untold(starts, self.context, self.end)
        batch = torch.from_numpy(windows)
        return _HostBatch(position, batch if self.pin is None else _copied(batch, self.pin), count)

    def onwards(self, position: int) -> Iterator[Callable[[], _HostBatch] | None]:
        """What reads the batches from a position on, without end, and None between."""
        while True:
            yield (found := self.at(position))
            position += self.batch_size * self.world_size if found else 0


def _copied(batch: Tensor, pin: Callable[[int], Tensor]) -> Tensor:
    return pin(batch.nbytes).view(torch.int64).view(batch.shape).copy_(batch)


class Loader:
    """Endless batches of windows; each window of an epoch comes once, in an order of the seed.

    An epoch cuts the text into windows side by side, from a start that is drawn anew, so that over
    the epochs every token stands at every position. Iterating goes on where the last one stopped.
    Over the ranks every window of an epoch comes once too: :mod:`anychip.train.data.order`.

    Args:
        tokens: (N,) of an integer dtype on the host, N at least ``context + 1``; or marked, as
            :func:`~anychip.train.data.tokenize_messages` gives them; or a row that is read as it
            is needed, :class:`~anychip.train.data.Prepared` joined; or several with weights. In a
            mixture each row has its own epochs.
        batch_size: windows in a batch of this rank.
        device: where batches go.
        num_batches: end after so many in all, counted from the start of the data; None: never.
        rank, world_size: take this rank's part of each global batch.
        tokenizer: what the tokens were made with; None: bytes.
        cross_document_targets: False: the target of an end-of-document token, which is the first
            token of the next document, is :data:`~anychip.train.data.IGNORED_TARGET`. Batches
            then have different numbers of targets; see :meth:`num_targets`.
        shuffle_buffer: the first epoch is shuffled in buffers of so many windows, one behind the
            other, as they are there; 0: all at once, for which all tokens are waited for.
        prefetch: batches that as many threads make ahead; 0: none, and no thread.
        pin: gives page-locked host memory, like ``backend.memory.pinned``: nbytes to a (nbytes,)
            uint8 tensor, on the thread that makes batches. The copy to the device is then queued on
            the current stream and not waited for, so that memory that was released must not be
            given out again before such a copy is done; torch's allocator keeps to that.

    Raises:
        ValueError: the text is shorter than one window and the token after it; a number is out of
            its range; the tokens are no row of integers on the host.
    """

    def __init__(
        self, tokens: Tensor | TokenRow | Mixture, *, context: int, batch_size: int, seed: int = 0,
        device: torch.device | str = HOST, num_batches: int | None = None, rank: int = 0,
        world_size: int = 1, tokenizer: Tokenizer | None = None,
        cross_document_targets: bool = True, shuffle_buffer: int = 0, prefetch: int = 0,
        pin: Callable[[int], Tensor] | None = None,
    ) -> None:  # fmt: skip
        _at_least(1, context=context, batch_size=batch_size, world_size=world_size)
        _at_least(0, seed=seed, rank=rank, prefetch=prefetch, shuffle_buffer=shuffle_buffer)
        if rank >= world_size:
            raise ValueError(f"rank must be below world_size {world_size}, got {rank}")
        self.tokens, self.context, self.batch_size = as_mixture(tokens), context, batch_size
        for row in self.tokens.rows:
            _require_length(row, context)
        self.seed, self.device, self.num_batches = seed, torch.device(device), num_batches
        self.rank, self.world_size = rank, world_size
        self.tokenizer: Tokenizer = tokenizer or ByteTokenizer()
        self.cross_document_targets = cross_document_targets
        self.shuffle_buffer, self.prefetch, self.pin = shuffle_buffer, prefetch, pin
        self.position, self.is_marked = 0, self.tokens.is_marked
        self.counts = self.is_marked or not cross_document_targets
        self._windows, self._taken = _Windows(self), deque[_HostBatch]()
        self._ahead: Prefetcher[_HostBatch] | None = None

    @property
    def num_windows(self) -> int:
        """Windows of an epoch, over all ranks; of a mixture those of an epoch of each row.

        While tokens are still made, of those that there are.
        """
        return sum(count_windows(len(row), self.context) for row in self.tokens.rows)

    @property
    def epoch(self) -> int:
        """Of the next window, from 0."""
        return self.position // self.num_windows

    def __iter__(self) -> Iterator[Batch]:
        batch = self.batch_size * self.world_size
        try:
            while self.num_batches is None or self.position < self.num_batches * batch:
                yield self.next_batch()
        finally:
            self.close()

    def next_batch(self) -> Batch:
        """The next windows, on the device.

        Raises:
            Exception: what making them raised, also in the thread. The position stays.
        """
        batch = self._on_host(1)[0].windows.to(self.device, non_blocking=self.pin is not None)
        tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        if self.is_marked:
            tokens, targets = split_marked(batch)
        elif not self.cross_document_targets:
            targets = mask_targets(tokens, targets, self.tokenizer.end_of_document)
        self._taken.popleft()
        self.position += self.batch_size * self.world_size
        return tokens, targets

    def num_targets(self, num_batches: int = 1) -> int:
        """Targets with a loss in the next global batches, those of all ranks; nothing is sent.

        By it the sums of losses of several batches are divided, so that what is minimized is the
        mean over all targets, whatever batch they are in.
        """
        if not self.counts:
            return num_batches * self.batch_size * self.world_size * self.context
        return sum(host.num_targets for host in self._on_host(num_batches))

    def _on_host(self, num_batches: int) -> list[_HostBatch]:
        """The next ones, which stay the next ones."""
        if self._taken and self._taken[0].position != self.position:  # somebody moved the position
            self.close()
        try:
            while len(self._taken) < num_batches:
                of_each = self.batch_size * self.world_size
                self._taken.append(self._made(self.position + len(self._taken) * of_each))
        except BaseException:
            self.close()
            raise
        return list(islice(self._taken, num_batches))

    def _made(self, position: int) -> _HostBatch:
        if not self.prefetch:
            while (read := self._windows.at(position)) is None:
                time.sleep(PAUSE_S)
            return read()
        host = self._ahead.take() if self._ahead is not None else None
        if host is None or host.position != position:
            self._end_ahead()
            self._ahead = Prefetcher(self._windows.onwards(position), depth=self.prefetch)
            host = self._ahead.take()
        return host

    def close(self) -> None:
        """Drops what was made ahead and ends the thread, if there is one; the position stays.

        Leaving a loop over the loader does it too. The next batch starts a new thread.
        """
        self._taken.clear()
        self._end_ahead()

    def _end_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def state_dict(self) -> dict[str, Any]:
        """The position, in windows over all ranks, and what it is a position in.

        It is the same on every rank, and may be loaded at another world size or batch size.
        """
        return {"position": self.position, **self._identity()}

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Whether :meth:`load_state_dict` takes it.

        Raises:
            ValueError: it is no position, or one in another text, or in another order of it.
        """
        schema.check(state_dict, _POSITION, "position in the data")
        for name, mine in self._identity().items():
            saved = state_dict.get(name, _EARLIER.get(name))
            if saved != mine:
                raise ValueError(
                    f"the data has another {name}: {saved!r} was saved, this is "
                    f"{mine!r}; go on with the data that the run began with"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to a saved position.

        Raises:
            ValueError: as :meth:`check_state_dict`.
        """
        self.check_state_dict(state_dict)
        self.close()
        self.position = state_dict["position"]

    def _identity(self) -> dict[str, Any]:
        return {
            "tokenizer": self.tokenizer.name, "text": self.tokens.digest, "context": self.context,
            "seed": self.seed, "shuffle_buffer": self.shuffle_buffer,
        }  # fmt: skip


def _require_length(row: TokenRow, context: int) -> None:
    while not (found := row.extent()).is_whole and found.tokens <= context:
        time.sleep(PAUSE_S)
    if len(row) < context + 1:
        unit = "byte" if row.pieces[0].tokens.read(0, 0).dtype == np.uint8 else "token"
        raise ValueError(
            f"the data is too short: at least {context + 1} {unit}s expected (a context of "
            f"{context} and the {unit} after it), got {len(row)}"
        )


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
