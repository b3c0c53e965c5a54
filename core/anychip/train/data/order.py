"""Which window of the tokens comes when, and on which rank? A function of numbers alone.

An epoch cuts the tokens into windows side by side, from a start that is drawn anew, and shuffles
them by the seed and the epoch. Epochs follow each other without a gap: window ``number`` of all
that are ever handed out is place ``number % num_windows`` of epoch ``number // num_windows``. That
order knows no ranks. A global batch is the next ``world_size * batch_size`` numbers, and rank r
takes the r-th ``batch_size`` of them, so that

- the batches of all ranks, one after the other, are the batch of one rank that is as large;
- at any world size every window of an epoch comes once: a batch that the end of an epoch does not
  fill is filled from the next one, and nothing is dropped or repeated;
- a position, which is the number of windows handed out, means the same at another world size.

More windows than a buffer holds are shuffled in two steps, of which neither needs them all: runs of
neighbours are shuffled, and then the windows of each buffer that these fill, one after the other.
Of tokens that are still being made, the first epoch takes buffers of neighbours as they are there.
In a mixture a pattern of the seed says whose turn each number is, and each row has its own epochs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BUFFER = 1 << 22
"""Windows that are shuffled at once; of so many the order is a permutation of all."""

Places = list[tuple[NDArray[np.int64], NDArray[np.int64]]]
"""Of each row: which of consecutive numbers are its, and where these begin."""

_RUN = 1 << 10
_PATTERN = 1 << 14
"""Numbers after which a mixture's pattern begins anew; a weight is a multiple of one by it."""


class Order:
    """Starts of windows in the tokens. One thread uses it.

    Args:
        num_tokens: that there are, of all at least ``context + 1``.
        is_whole: these are all.
        context: tokens of a window, without the one after it.
        shuffle_buffer: the first epoch has buffers of so many windows that follow each other; 0: it
            is like the others.
        buffer: windows of a buffer of the others.
        run: windows of a run, which ``buffer`` is a multiple of.
    """

    def __init__(
        self, num_tokens: int, is_whole: bool = True, *, context: int, seed: int,
        shuffle_buffer: int = 0, buffer: int = BUFFER, run: int = _RUN,
    ) -> None:  # fmt: skip
        assert buffer % run == 0
        self.context, self.seed, self.shuffle_buffer = context, seed, shuffle_buffer
        self.buffer, self.run = buffer, run
        self._epoch, self._number = -1, -1
        self._shift, self._runs, self._starts = 0, *2 * [np.empty(0, np.int64)]
        self.grow(num_tokens, is_whole)

    def grow(self, num_tokens: int, is_whole: bool) -> None:
        """There are more tokens now, or as many, and then maybe all."""
        self.num_tokens, self.is_whole = num_tokens, is_whole
        self.num_windows = count_windows(self.num_tokens, self.context)

    def are_there(self, numbers: range) -> bool:
        """Whether there are tokens enough to say where windows begin."""
        if self.is_whole or not numbers:
            return True
        if not self.shuffle_buffer:
            return False
        # Of the last buffer only all tokens say how long it is.
        needed = (numbers[-1] // self.shuffle_buffer + 1) * self.shuffle_buffer
        return needed * self.context + self.context <= self.num_tokens

    def starts(self, numbers: range) -> NDArray[np.int64]:
        """Where the windows of consecutive numbers begin, which are there; (len(numbers),)."""
        found: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        number = numbers.start
        while number < numbers.stop:
            epoch, place = divmod(number, self.num_windows) if self.is_whole else (0, number)
            size = self.shuffle_buffer if self._is_first(epoch) else self.buffer
            buffer, place = divmod(place, size)
            found.append(self._of_buffer(epoch, buffer)[place : place + numbers.stop - number])
            number += len(found[-1])
        return np.concatenate(found)

    def _is_first(self, epoch: int) -> bool:
        """It is shuffled as its tokens come."""
        return epoch == 0 and self.shuffle_buffer > 0

    def _of_buffer(self, epoch: int, number: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            # numpy mixes both numbers into the state; torch's generator sees 32 bits of a seed.
            generator = np.random.default_rng((self.seed, epoch))
            slack = min(self.context, self.num_tokens - self.num_windows * self.context)
            self._shift, self._number = int(generator.integers(slack)), -1
            if not self._is_first(epoch):
                if self.num_windows <= self.buffer:
                    self._starts = self._begin(generator.permutation(self.num_windows))
                    self._number = number
                else:
                    self._runs = self._shuffled_runs(generator)
            self._epoch = epoch
        if number != self._number:
            self._starts, self._number = self._begin(self._shuffled(epoch, number)), number
        return self._starts

    def _begin(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        return windows * self.context + self._shift

    def _shuffled_runs(self, generator: np.random.Generator) -> NDArray[np.int64]:
        """All runs; a last one that is shorter comes last, so that a buffer is whole till then."""
        whole, rest = divmod(self.num_windows, self.run)
        return np.append(generator.permutation(whole), [whole] if rest else [])

    def _shuffled(self, epoch: int, number: int) -> NDArray[np.int64]:
        """The windows of a buffer."""
        if self._is_first(epoch):
            windows = np.arange(self.shuffle_buffer) + number * self.shuffle_buffer
        else:
            runs_of_buffer = self.buffer // self.run
            runs = self._runs[number * runs_of_buffer : (number + 1) * runs_of_buffer]
            windows = (runs.astype(np.int64)[:, None] * self.run + np.arange(self.run)).reshape(-1)
        windows = windows[windows < self.num_windows]
        return np.random.default_rng((self.seed, epoch, number)).permutation(windows)


def count_windows(num_tokens: int, context: int) -> int:
    """Windows of an epoch; of at least ``context + 1`` tokens."""
    return max(1, (num_tokens - context) // context)


class Turns:
    """Whose window each number is, in a mixture, and where it begins. One thread uses it.

    Each row's part of any stretch of numbers is that of its weight, within a few windows.

    Raises:
        ValueError: a weight is too small to have a place in the pattern.
    """

    def __init__(self, orders: Sequence[Order], weights: Sequence[float], *, seed: int) -> None:
        self.orders = tuple(orders)
        if len(orders) == 1:
            return
        exact = np.array(weights) * _PATTERN
        counts = np.floor(exact).astype(int)
        for row in np.argsort(counts - exact, kind="stable")[: _PATTERN - counts.sum()]:
            counts[row] += 1
        if not counts.all():
            least = float(np.min(weights))
            raise ValueError(f"a weight is at least 1/{_PATTERN} of all, got {least:.2g}")
        # Each of a row's turns has a stretch of its own, as long as the others, and a place in it.
        generator = np.random.default_rng((seed, _PATTERN))
        when = np.concatenate([(np.arange(n) + generator.random(n)) / n for n in counts])
        whose = np.repeat(np.arange(len(counts)), counts)
        self._counts, self._pattern = counts, whose[np.argsort(when, kind="stable")]
        before = np.cumsum(self._pattern == np.arange(len(counts))[:, None], axis=1)
        self._before: NDArray[Any] = np.pad(before, ((0, 0), (1, 0))).astype(np.int64)

    def are_there(self, numbers: range) -> bool:
        """Whether all tokens are there that say where these begin."""
        if len(self.orders) == 1:
            return self.orders[0].are_there(numbers)
        return all(o.are_there(self._own(row, numbers)) for row, o in enumerate(self.orders))

    def places(self, numbers: range) -> Places:
        """Of each row: which of consecutive numbers are its, from 0, and where these begin."""
        if len(self.orders) == 1:
            return [(np.arange(len(numbers)), self.orders[0].starts(numbers))]
        whose = self._pattern[np.arange(numbers.start, numbers.stop) % _PATTERN]
        return [
            (np.flatnonzero(whose == row), order.starts(self._own(row, numbers)))
            for row, order in enumerate(self.orders)
        ]

    def _own(self, row: int, numbers: range) -> range:
        """A row's own numbers among those of all; they are consecutive, too."""
        ends = [divmod(number, _PATTERN) for number in (numbers.start, numbers.stop)]
        count, before = int(self._counts[row]), self._before[row]
        first, last = (turn * count + int(before[place]) for turn, place in ends)
        return range(first, last)


def share(position: int, *, batch_size: int, rank: int, world_size: int) -> range:
    """Numbers of the windows that a rank takes of the global batch at a position."""
    assert 0 <= rank < world_size
    first = position + rank * batch_size
    return range(first, first + batch_size)
