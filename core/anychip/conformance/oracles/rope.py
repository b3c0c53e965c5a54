"""Oracle of rope. Layout (batch, seq, heads, head_dim).

Su et al. 2021, equation 34; the gradient is the rotation by the negative angle. The dims after
those that cos and sin have angles for are copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from anychip.conformance.arithmetic import Rounded, concatenate
from anychip.conformance.calls import Arguments, Call, Draw
from anychip.conformance.labels import Labels
from anychip.conformance.oracles.attention import FORMS, SIZES, Sizes
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


def _rope_arguments(
    draw: Draw,
    sizes: Sizes,
    interleaved: bool,
    scale: float | str = 1.0,
    rotary: int | None = None,
    first: int = 0,
) -> Arguments:
    """rotary: dims that are rotated; first: number of the first position."""
    batch, length, heads, kv_heads, dim = sizes
    q, k = (draw.normal(batch, length, n, dim, scale=scale) for n in (heads, kv_heads))
    half = (dim if rotary is None else rotary) // 2
    rate = 10000.0 ** (-torch.arange(half) / max(half, 1))
    angle = torch.arange(first, first + length)[:, None] * rate
    return (q, k, angle.cos(), angle.sin()), {"interleaved": interleaved}


def _rope_calls() -> Iterator[Call]:
    labels = Labels({"from:1000": {"first": 1000}, "interleaved": {}, "half": {}}, FORMS)
    for name in ("half", "interleaved"):
        make = partial(_rope_arguments, interleaved=name == "interleaved")
        yield from labels(make, f"{SIZES} 2x31x3+1x6 1x300x2+2x64", ends=(f".{name}",))
        rotary = (f".{name}.rotary:0", f".{name}.rotary:2", f".{name}.rotary:8")
        yield from labels(make, "2x5x3+1x12", ends=rotary)
        yield from labels(make, f"1x9x2+2x8.{name}.from:1000 2x9x2+2x8.{name}.huge")


ROPE = differentiable(_answer, _rope_calls, "1x17x4+2x16.half", "1x257x1+1x128.interleaved")
