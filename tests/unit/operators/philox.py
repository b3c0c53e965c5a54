"""Philox4x32-10 in numpy, from the paper, with unsigned 64-bit products."""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
_LOW = np.uint64(0xFFFFFFFF)


def philox(counter: Words, key: Words) -> Words:
    """(n, 4) counters of 32-bit words, (2,) key -> (n, 4) words; Salmon et al. 2011, 3.3."""
    c0, c1, c2, c3 = counter.T
    k0, k1 = key
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ k0, p1 & _LOW, (p0 >> np.uint64(32)) ^ c3 ^ k1, p0 & _LOW,
        )  # fmt: skip
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _LOW, (k1 + np.uint64(0xBB67AE85)) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1)


def stream(seed: int, offset: int, count: int) -> Words:
    """The first words at (seed, offset): word i % 4 of the block at counter offset + i // 4."""
    blocks = [(offset + i) % 2**64 for i in range((count + 3) // 4)]
    counter = np.array([[b & 0xFFFFFFFF, b >> 32, 0, 0] for b in blocks], dtype=np.uint64)
    seed %= 2**64
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint64)
    return philox(counter.reshape(-1, 4), key).reshape(-1)[:count]


def dropout(values: npt.NDArray[np.float32], words: Words, p: float) -> npt.NDArray[np.float32]:
    """float32 dropout: kept iff word >= floor(p 2^32); times 1 / (1 - p) rounded to float32."""
    keep = words >= np.uint64(int(p * 2**32))
    scale = np.float32(0.0 if p == 1.0 else 1.0 / (1.0 - p))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(keep.reshape(values.shape), values * scale, np.float32(0.0))
