"""Oracle of rope. Layout (batch, seq, heads, head_dim).

Su et al. 2021, equation 34; the gradient is the rotation by the negative angle. The dims after
those that cos and sin have angles for are copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from anychip.conformance.arithmetic import Rounded, concatenate
from anychip.conformance.calls import Arguments, Call, Draw, in_layouts
from anychip.conformance.oracles.attention import SIZES, Sizes, sizes_label
from anychip.conformance.oracles.oracle import Oracle


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


def _rope_forward(
    q: Rounded, k: Rounded, cos: Rounded, sin: Rounded, *, interleaved: bool
) -> tuple[Rounded, Rounded]:
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rope_backward(
    grads: tuple[Rounded, Rounded], *args: Rounded, interleaved: bool
) -> tuple[Rounded, Rounded]:
    (dq, dk), (_q, _k, cos, sin) = grads, args
    return _rotate(dq, cos, -sin, interleaved), _rotate(dk, cos, -sin, interleaved)


def _rope_arguments(
    draw: Draw,
    sizes: Sizes,
    interleaved: bool,
    scale: float | str = 1.0,
    rotary_dim: int | None = None,
    first: int = 0,
) -> Arguments:
    batch, length, heads, kv_heads, dim = sizes
    q, k = (draw.normal(batch, length, n, dim, scale=scale) for n in (heads, kv_heads))
    half = (dim if rotary_dim is None else rotary_dim) // 2
    rate = 10000.0 ** (-torch.arange(half) / max(half, 1))
    angle = torch.arange(first, first + length)[:, None] * rate
    return (q, k, angle.cos(), angle.sin()), {"interleaved": interleaved}


def _rope_calls() -> Iterator[Call]:
    sizes_list: tuple[Sizes, ...] = (*SIZES, (2, 31, 3, 1, 6), (1, 300, 2, 2, 64))
    for interleaved in (False, True):
        name = "interleaved" if interleaved else "half"
        make = partial(_rope_arguments, interleaved=interleaved)
        for sizes in sizes_list:
            yield Call(f"{sizes_label(sizes)}.{name}", partial(make, sizes=sizes))
        yield from in_layouts(f"2x7x3+1x10.{name}", partial(make, sizes=(2, 7, 3, 1, 10)))
        for rotary_dim in (0, 2, 8):
            part = partial(make, sizes=(2, 5, 3, 1, 12), rotary_dim=rotary_dim)
            yield Call(f"2x5x3+1x12.{name}.rotary:{rotary_dim}", part)
        yield Call(f"1x9x2+2x8.{name}.from:1000", partial(make, sizes=(1, 9, 2, 2, 8), first=1000))
        yield Call(f"2x9x2+2x8.{name}.huge", partial(make, sizes=(2, 9, 2, 2, 8), scale="huge"))


ROPE = Oracle(
    forward=_rope_forward,
    backward=_rope_backward,
    calls=_rope_calls,
    lower_precision=("1x17x4+2x16.half", "1x257x1+1x128.interleaved"),
)
