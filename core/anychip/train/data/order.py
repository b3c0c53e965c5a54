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
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Order:
    """Starts of windows in the tokens.

    Args:
        num_tokens: at least ``context + 1``.
        context: tokens of a window, without the one after it.
    """

    def __init__(self, num_tokens: int, *, context: int, seed: int) -> None:
        self.num_tokens, self.context, self.seed = num_tokens, context, seed
        self.num_windows = max(1, (num_tokens - context) // context)
        self._epoch = -1
        self._starts: NDArray[np.int64] = np.empty(0, np.int64)

    def starts(self, numbers: range) -> NDArray[np.int64]:
        """Where the windows of consecutive numbers begin; (len(numbers),)."""
        found: list[NDArray[np.int64]] = []
        number = numbers.start
        while number < numbers.stop:
            epoch, place = divmod(number, self.num_windows)
            found.append(self._of_epoch(epoch)[place : place + numbers.stop - number])
            number += len(found[-1])
        return np.concatenate(found)

    def _of_epoch(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            self._epoch, self._starts = epoch, self._shuffle(epoch)
        return self._starts

    def _shuffle(self, epoch: int) -> NDArray[np.int64]:
        # numpy mixes both numbers into the state; torch's host generator sees 32 bits of a seed.
        generator = np.random.default_rng((self.seed, epoch))
        slack = min(self.context, self.num_tokens - self.num_windows * self.context)
        shift = generator.integers(slack)
        return generator.permutation(self.num_windows) * self.context + shift


def share(position: int, *, batch_size: int, rank: int, world_size: int) -> range:
    """Numbers of the windows that a rank takes of the global batch at a position."""
    assert 0 <= rank < world_size
    first = position + rank * batch_size
    return range(first, first + batch_size)
