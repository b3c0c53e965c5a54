"""Oracle of attention_varlen: attention of each packed sequence alone. Layout (tokens, heads, dim).

Rows from the last entry of cu_seqlens on are padding: exactly 0, with the lse -inf.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded
from anychip.conformance.calls import Arguments, Call, Draw, in_layouts
from anychip.conformance.oracles.attention import Mask, attend, attend_backward
from anychip.conformance.oracles.oracle import Oracle

Ends = NDArray[np.int64]


def _hidden(num_rows: int, cu_seqlens: Ends, causal: bool) -> Mask:
    """All is hidden but a triangle or square for each sequence."""
    hidden = np.ones((num_rows, num_rows), dtype=np.bool_)
    for start, end in itertools.pairwise(cu_seqlens):
        length = int(end - start)
        hidden[start:end, start:end] = ~np.tri(length, dtype=np.bool_) if causal else False
    return hidden


def _unpadded(x: Rounded, cu_seqlens: Ends) -> Rounded:
    """(1, T, heads, dim), and what lies in the padding does not matter."""
    inside = (np.arange(x.shape[0]) < cu_seqlens[-1])[:, None, None]
    return x.shaped(lambda array: np.where(inside, array, 0.0))[None]


def _forward(
    q: Rounded, k: Rounded, v: Rounded, cu_seqlens: Ends, *, causal: bool, scale: float | None
) -> tuple[Rounded, Rounded]:
    hidden = _hidden(q.shape[0], cu_seqlens, causal)
    q, k, v = (_unpadded(x, cu_seqlens) for x in (q, k, v))
    y, lse = attend(q, k, v, hidden, scale)
    return y[0], lse[0]


def _backward(
    grads: tuple[Rounded], q: Rounded, k: Rounded, v: Rounded, cu_seqlens: Ends, **attrs: Any
) -> tuple[Rounded, ...]:
    hidden = _hidden(q.shape[0], cu_seqlens, attrs["causal"])
    grad, q, k, v = (_unpadded(x, cu_seqlens) for x in (*grads, q, k, v))
    found = attend_backward(grad, q, k, v, hidden, attrs["scale"])
    return tuple(gradient[0] for gradient in found)


Packing = tuple[int, ...]
# Lengths of the sequences, then how much padding: one; empty ones first, last, in between, and
# several; beside tiles of 16 and 64; padding alone.
_PACKINGS: dict[str, tuple[Packing, int]] = {
    "1": ((1,), 0),
    "none": ((), 0),
    "4": ((4,), 0),
    "3+5+4": ((3, 5, 4), 0),
    "0+4+0+0+3+0": ((0, 4, 0, 0, 3, 0), 0),
    "1+1+1+1": ((1, 1, 1, 1), 0),
    "15+17+33": ((15, 17, 33), 0),
    "63+65": ((63, 65), 0),
    "5+2.padded:3": ((5, 2), 3),
    "padded:4": ((), 4),
    "0.padded:2": ((0,), 2),
}


def _packed(
    draw: Draw,
    packing: tuple[Packing, int],
    causal: bool,
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
) -> Arguments:
    lengths, padding = packing
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    tokens = int(cu_seqlens[-1]) + padding
    q, k = (draw.normal(tokens, count, dim) for count in heads)
    args = (q, k, draw.normal(tokens, heads[1], dim), cu_seqlens)
    return args, {"causal": causal, "scale": None}


def _int32(draw: Draw, packing: tuple[Packing, int], causal: bool) -> Arguments:
    (*qkv, cu_seqlens), attrs = _packed(draw, packing, causal)
    return (*qkv, cu_seqlens.int()), attrs


def _apart(draw: Draw) -> Arguments:
    # Sequence b holds the number b + 1 and nothing else: to see another one is a wrong integer.
    (q, k, v, cu_seqlens), attrs = _packed(draw, ((6, 9, 2, 7), 0), causal=False)
    for number, (start, end) in enumerate(itertools.pairwise(cu_seqlens)):
        v[start:end] = number + 1
    return (q, k, v, cu_seqlens), attrs


def _nan(draw: Draw) -> Arguments:
    # A query of one sequence, and the padding; every other sequence stays clean.
    (q, k, v, cu_seqlens), attrs = _packed(draw, ((4, 5, 3), 2), causal=True)
    q[6, 0, 0] = math.nan
    for tensor in (q, k, v):
        tensor[12:] = math.nan
    return (q, k, v, cu_seqlens), attrs


def _calls() -> Iterator[Call]:
    for name, packing in _PACKINGS.items():
        for causal in (True, False):
            make = partial(_packed, packing=packing, causal=causal)
            yield Call(f"{name}.{'causal' if causal else 'full'}", make)
    for kv_heads in (1, 2, 6):
        heads = partial(_packed, packing=((7, 12), 0), causal=True, heads=(6, kv_heads), dim=12)
        yield Call(f"7+12.heads:6+{kv_heads}", heads)
    yield from in_layouts("6+0+7.padded:1", partial(_packed, packing=((6, 0, 7), 1), causal=True))
    # Even and odd numbers of entries, which read as int64 would be half as many.
    for name in ("3+5+4", "0+4+0+0+3+0", "5+2.padded:3"):
        yield Call(f"{name}.int32", partial(_int32, packing=_PACKINGS[name], causal=True))
    yield Call("apart", _apart, statistical=False)
    yield Call("nan", _nan, statistical=False, gradient=False)
    long = partial(_packed, packing=((300, 17, 512), 0), causal=True, dim=64)
    yield Call("300+17+512", long, full=True)


ATTENTION_VARLEN = Oracle(
    forward=_forward,
    backward=_backward,
    calls=_calls,
    lower_precision=("15+17+33.causal", "63+65.full"),
)
