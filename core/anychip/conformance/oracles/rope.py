"""Oracle of rope. Layout (batch, seq, heads, head_dim).

Su et al. 2021, equation 34; the gradient is the rotation by the negative angle. The dims after
those that cos and sin have angles for are copied.
"""

from functools import partial

from anychip.conformance.arithmetic import Rounded, concatenate
from anychip.conformance.oracles.oracle import Answer, differentiable


def _rotate(x: Rounded, cos: Rounded, sin: Rounded, interleaved: bool) -> Rounded:
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    x, rest = x[..., : 2 * half], x[..., 2 * half :]
    first = x[..., 0::2] if interleaved else x[..., :half]
    second = x[..., 1::2] if interleaved else x[..., half:]
    parts = (first * cos - second * sin, second * cos + first * sin)
    if not interleaved:
        return concatenate([*parts, rest], -1)
    stacked = concatenate([part[..., None] for part in parts], -1)
    return concatenate([stacked.reshape(*x.shape), rest], -1)


def _answer(q: Rounded, k: Rounded, cos: Rounded, sin: Rounded, *, interleaved: bool) -> Answer:
    def rotated(sin: Rounded, *both: Rounded) -> tuple[Rounded, ...]:
        return tuple(_rotate(x, cos, sin, interleaved) for x in both)

    return rotated(sin, q, k), partial(rotated, -sin)


ROPE = differentiable(_answer)
