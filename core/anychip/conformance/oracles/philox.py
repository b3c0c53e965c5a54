"""Philox4x32-10 in Python integers and numpy: the stream that every chip must give, bit for bit.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3. Written from the
paper with unsigned 64-bit products, unlike the reference, which has signed ones only.
"""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)

Four = tuple[int, int, int, int]
Two = tuple[int, int]

# Counter, key, result: the three vectors of the Random123 library's kat_vectors, philox4x32 10.
KNOWN_ANSWERS: tuple[tuple[Four, Two, Four], ...] = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def block(counters: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10.

    Args:
        counters: (4, n), each a word below 2^32.
        key: two words.

    Returns:
        (4, n) words.
    """
    c0, c1, c2, c3 = counters
    for number in range(10):
        k0, k1 = (np.uint64((k + number * w) & 0xFFFFFFFF) for k, w in zip(key, _WEYL, strict=True))
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> _SHIFT) ^ c1 ^ k0,
            second & _MASK,
            (first >> _SHIFT) ^ c3 ^ k1,
            first & _MASK,
        )
    return np.stack([c0, c1, c2, c3])


def words(seed: int, offset: int, count: int) -> Words:
    """``count`` words of the stream: word i % 4 of the block at counter ``offset + i // 4``.

    Args:
        seed, offset: int64 as the operator takes them; negative ones stand for the upper half of
            the unsigned range, and the counter wraps at 2^64.
    """
    in_order: Words = _blocks(seed, offset, np.arange((count + 3) // 4)).T.reshape(-1)[:count]
    return in_order


def words_at(seed: int, offset: int, index: NDArray[np.int64]) -> Words:
    """The words of the stream with these numbers, negative ones from the blocks before offset."""
    number, word = np.divmod(index.reshape(-1), 4)
    found: Words = np.take_along_axis(_blocks(seed, offset, number), word[None], 0)
    return found.reshape(index.shape)


def _blocks(seed: int, offset: int, number: NDArray[np.int64]) -> Words:
    """The four words of these blocks, counted from offset: (4, n)."""
    seed %= 2**64
    with np.errstate(over="ignore"):
        counter = np.uint64(offset % 2**64) + number.astype(np.uint64)
    high = np.zeros_like(counter)
    return block(
        np.stack([counter & _MASK, counter >> _SHIFT, high, high]), (seed & 0xFFFFFFFF, seed >> 32)
    )


def kept(seed: int, offset: int, which: int | NDArray[np.int64], p: float) -> NDArray[np.bool_]:
    """Which elements dropout keeps: word >= floor(p 2^32), in integers.

    Args:
        which: how many elements, or the numbers of their words.
    """
    numerator, denominator = float(p).as_integer_ratio()
    threshold = numerator * 2**32 // denominator
    at = words(seed, offset, which) if isinstance(which, int) else words_at(seed, offset, which)
    return np.asarray(at >= np.uint64(threshold))
