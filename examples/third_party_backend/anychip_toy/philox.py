"""Philox4x32-10 in numpy: the random words that are the same on every chip.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def words(seed: int, offset: int, index: NDArray[np.int64]) -> NDArray[np.uint64]:
    """32-bit words of the stream: word ``i % 4`` of block ``offset + i // 4`` for each i of index.

    Args:
        seed, offset: 64-bit; a negative number stands for the upper half of the unsigned range.
    """
    counter = (index >> 2).astype(np.uint64) + np.uint64(offset % 2**64)
    c0, c1 = counter & _LOW, counter >> _SHIFT
    c2, c3 = np.zeros_like(counter), np.zeros_like(counter)
    k0, k1 = np.uint64(seed % 2**32), np.uint64(seed % 2**64 >> 32)
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (product1 >> _SHIFT) ^ c1 ^ k0, (product0 >> _SHIFT) ^ c3 ^ k1
        c1, c3 = product1 & _LOW, product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.choose(index & 3, (c0, c1, c2, c3))
