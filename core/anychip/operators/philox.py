"""Philox4x32-10 in plain torch: the random stream that is the same on every chip.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3 and the Random123
library. Works on any device with int64 arithmetic. What the words are used for stands with the
operators that use them.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF
_ROUNDS = 10


def blocks(counter: Tensor, seed: Tensor) -> Tensor:
    """Philox blocks for 64-bit counters.

    Args:
        counter: (...,) int64, the low 64 bits of the 128-bit counters; the high ones are 0.
            Negative numbers stand for the upper half of the unsigned range.
        seed: 0-dim int64, the 64-bit key.

    Returns:
        (..., 4) int64, each a word from 0 to 2^32 - 1.
    """
    if counter.is_meta:  # of a shape alone, rounds of a hundred operations would be asked too
        return counter.new_empty((*counter.shape, 4))
    words = [counter & _MASK32, (counter >> 32) & _MASK32]
    words += [torch.zeros_like(counter), torch.zeros_like(counter)]
    key = [seed & _MASK32, (seed >> 32) & _MASK32]
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], words[0])
        high1, low1 = _multiply(_MULTIPLIERS[1], words[2])
        words = [high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0]
        key = [(k + step) & _MASK32 for k, step in zip(key, _KEY_STEPS, strict=True)]
    return torch.stack(words, dim=-1)


def words(rng: Tensor, numel: int) -> Tensor:
    """The first words of the stream at (seed, offset): word ``i % 4`` of block ``i // 4``.

    Args:
        rng: int64[2], (seed, offset).

    Returns:
        (numel,) int64 from 0 to 2^32 - 1.
    """
    index = torch.arange((numel + 3) // 4, dtype=torch.int64, device=rng.device)
    return blocks(rng[1] + index, rng[0]).reshape(-1)[:numel]


def words_at(rng: Tensor, index: Tensor) -> Tensor:
    """The words of that stream with the numbers of ``index``, an int64 tensor of any shape.

    A negative number is that of a word before the first one, since counters wrap at 2^64.
    """
    found = blocks(rng[1] + (index >> 2), rng[0])
    return found.gather(-1, (index & 3).unsqueeze(-1)).squeeze(-1)


def _multiply(factor: int, value: Tensor) -> tuple[Tensor, Tensor]:
    # A 32 x 32 bit product does not fit int64, so the factor is split into 16-bit halves.
    low = (factor & 0xFFFF) * value
    high = (factor >> 16) * value + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
