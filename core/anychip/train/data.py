"""Text as bytes, in shuffled windows: which tokens does step N see?

A token is a byte, so the vocabulary is 256 and nothing is downloaded. The order is a function of
the seed and the number of windows handed out, which is all that a checkpoint keeps of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

VOCAB_SIZE = 256

Batch = tuple[Tensor, Tensor]
"""tokens and targets, each (batch_size, context) int64; targets are the tokens that follow."""


def python_documentation() -> Tensor:
    """The texts of Python's ``help()``, about half a megabyte, as tokens (N,) uint8.

    They belong to the standard library, so that the first run needs no download; they differ
    between versions of Python.
    """
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return encode(text.encode("utf-8"))


def read_texts(paths: Sequence[str | Path]) -> Tensor:
    """The bytes of text files, one after the other, as tokens (N,) uint8.

    Raises:
        FileNotFoundError, IsADirectoryError, PermissionError: naming the file.
        ValueError: a file is empty, or is no text (it has a zero byte).
    """
    return torch.cat([encode(_read(Path(path))) for path in paths])


def encode(text: bytes) -> Tensor:
    """Bytes to tokens, (N,) uint8."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def decode(tokens: Tensor) -> str:
    """Tokens (N,) to text; bytes that are no UTF-8 become the replacement character."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")


def _read(path: Path) -> bytes:
    text = path.read_bytes()
    if not text:
        raise ValueError(f"data file {path} is empty; a text file expected")
    if b"\0" in text:
        raise ValueError(
            f"data file {path} is binary: a zero byte at {text.index(0)}; a text file expected"
        )
    return text


class Loader:
    """Endless batches of windows; each window of an epoch comes once, in an order of the seed.

    An epoch cuts the text into windows side by side, from a start that is drawn anew, so that over
    the epochs every byte stands at every position. Iterating goes on where the last one stopped.

    Args:
        tokens: (N,) uint8, N at least ``context + 1``.
        device: where batches go.
        num_batches: end after so many in all, counted from the start of the data; None: never.

    Raises:
        ValueError: the text is shorter than one window and the byte after it.
    """

    def __init__(
        self,
        tokens: Tensor,
        *,
        context: int,
        batch_size: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        num_batches: int | None = None,
    ) -> None:
        if len(tokens) < context + 1:
            raise ValueError(
                f"the data is too short: at least {context + 1} bytes expected (a context of "
                f"{context} and the byte after it), got {len(tokens)}"
            )
        self.tokens, self.context, self.batch_size = tokens, context, batch_size
        self.seed, self.device, self.num_batches = seed, torch.device(device), num_batches
        self.num_windows = max(1, (len(tokens) - context) // context)
        self.position = 0
        self._epoch = -1
        self._starts: list[int] = []

    def __iter__(self) -> Iterator[Batch]:
        while self.num_batches is None or self.position < self.num_batches * self.batch_size:
            yield self.next_batch()

    def next_batch(self) -> Batch:
        """The next windows, on the device."""
        starts = [self._start(self.position + row) for row in range(self.batch_size)]
        self.position += self.batch_size
        windows = [self.tokens[start : start + self.context + 1] for start in starts]
        batch = torch.stack(windows).to(torch.int64).to(self.device)
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

    def _start(self, number: int) -> int:
        """Where the window of a number begins."""
        epoch, place = divmod(number, self.num_windows)
        if epoch != self._epoch:
            self._epoch, self._starts = epoch, self._shuffle(epoch)
        return self._starts[place]

    def _shuffle(self, epoch: int) -> list[int]:
        # numpy mixes both numbers into the state; torch's host generator sees 32 bits of a seed.
        generator = np.random.default_rng((self.seed, epoch))
        slack = min(self.context, len(self.tokens) - self.num_windows * self.context)
        shift = generator.integers(slack)
        order = generator.permutation(self.num_windows)
        starts: list[int] = (order * self.context + shift).tolist()
        return starts

    def state_dict(self) -> dict[str, Any]:
        """The position, in windows, and what it is a position in."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to a saved position.

        Raises:
            ValueError: it is a position in another text, or in another order of it.
        """
        for name, mine in self._identity().items():
            if state_dict.get(name) != mine:
                raise ValueError(
                    f"the data has another {name}: {state_dict.get(name)!r} was saved, this is "
                    f"{mine!r}; go on with the data that the run began with"
                )
        self.position = int(state_dict["position"])

    def _identity(self) -> dict[str, Any]:
        return {"text": self._digest, "context": self.context, "seed": self.seed}

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()[:16]
