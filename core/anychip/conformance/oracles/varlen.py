"""Oracle of attention_varlen: attention of each packed sequence alone. Layout (tokens, heads, dim).

Queries and keys have ends of their own. Rows from the last entry on are padding: exactly 0, with
the lse -inf.
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
from anychip.conformance.calls import Arguments, Call, Draw, in_layouts, special
from anychip.conformance.oracles.attention import Mask, attend, attend_backward, to_float32
from anychip.conformance.oracles.oracle import Oracle

Ends = NDArray[np.int64]


def _hidden(shape: tuple[int, int], of_queries: Ends, of_keys: Ends, causal: bool) -> Mask:
    """All is hidden but a rectangle for each sequence; causal, what is below its last diagonal."""
    hidden = np.ones(shape, dtype=np.bool_)
    for (first, last), (start, end) in zip(
        itertools.pairwise(of_queries), itertools.pairwise(of_keys), strict=True
    ):
        queries, keys = int(last - first), int(end - start)
        seen = np.tri(queries, keys, keys - queries if causal else keys, dtype=np.bool_)
        hidden[first:last, start:end] = ~seen
    return hidden


def _unpadded(x: Rounded, cu_seqlens: Ends) -> Rounded:
    """(1, T, heads, dim), and what lies in the padding does not matter."""
    inside = (np.arange(x.shape[0]) < cu_seqlens[-1])[:, None, None]
    return x.shaped(lambda array: np.where(inside, array, 0.0))[None]


def _given(
    q: Rounded, k: Rounded, v: Rounded, of_queries: Ends, of_keys: Ends, *, causal: bool
) -> tuple[Rounded, Rounded, Rounded, Mask]:
    hidden = _hidden((q.shape[0], k.shape[0]), of_queries, of_keys, causal)
    return _unpadded(q, of_queries), _unpadded(k, of_keys), _unpadded(v, of_keys), hidden


def _forward(
    q: Rounded, *rest: Any, causal: bool, scale: float | None, **_: Any
) -> tuple[Rounded, Rounded]:
    y, lse = attend(*_given(q, *rest, causal=causal), scale)
    return y[0], lse[0]


def _backward(grads: tuple[Rounded], q: Rounded, *rest: Any, **attrs: Any) -> tuple[Rounded, ...]:
    grad = _unpadded(grads[0], rest[2])
    given = (*_given(q, *rest, causal=attrs.pop("causal")), attrs.pop("scale"))
    found = attend_backward(grad, *given, **attrs)
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
_KEYS: dict[str, tuple[Packing, int]] = {
    "3+5+4": ((5, 2, 4), 1),
    "0+4+0+0+3+0": ((2, 0, 0, 1, 6, 3), 0),
    "63+65": ((17, 130), 0),
    "5+2.padded:3": ((0, 0), 0),
    "0.padded:2": ((4,), 3),
}
"""Of some packings of queries another one of keys: fewer, more, none; padding of one alone."""


def _packed(
    draw: Draw,
    packing: tuple[Packing, int],
    causal: bool,
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    keys: tuple[Packing, int] | None = None,
) -> Arguments:
    """keys: their packing, where it is not that of the queries."""
    ends, tokens = [], []
    for lengths, padding in (packing, keys or packing):
        ends.append(torch.tensor([0, *lengths]).cumsum(0))
        tokens.append(int(ends[-1][-1]) + padding)
    q, k = (draw.normal(n, count, dim) for n, count in zip(tokens, heads, strict=True))
    args = (q, k, draw.normal(*k.shape), ends[0], ends[1])
    return args, {"causal": causal, "scale": None}


def _int32(draw: Draw, packing: tuple[Packing, int], causal: bool) -> Arguments:
    (*qkv, of_queries, of_keys), attrs = _packed(draw, packing, causal)
    return (*qkv, of_queries.int(), of_keys.int()), attrs


def _apart(draw: Draw) -> Arguments:
    # Sequence b holds the number b + 1 and nothing else: to see another one is a wrong integer.
    (q, k, v, *ends), attrs = _packed(draw, ((6, 9, 2, 7), 0), False, keys=((8, 1, 5, 9), 1))
    for number, (start, end) in enumerate(itertools.pairwise(ends[1])):
        v[start:end] = number + 1
    return (q, k, v, *ends), attrs


def _calls() -> Iterator[Call]:
    for name, packing in _PACKINGS.items():
        for causal in (True, False):
            make = partial(_packed, packing=packing, causal=causal)
            yield Call(f"{name}.{'causal' if causal else 'full'}", make)
            if name in _KEYS:
                keys = partial(make, keys=_KEYS[name])
                yield Call(f"{name}.{'causal' if causal else 'full'}.keys", keys)
    for kv_heads in (1, 2, 6):
        heads = partial(_packed, packing=((7, 12), 0), causal=True, heads=(6, kv_heads), dim=12)
        yield Call(f"7+12.heads:6+{kv_heads}", heads)
    yield from in_layouts("6+0+7.padded:1", partial(_packed, packing=((6, 0, 7), 1), causal=True))
    keys = partial(_packed, packing=((6, 0, 7), 1), causal=True, keys=((4, 3, 9), 0))
    yield Call("6+0+7of4+3+9.strided", keys, layout="strided")
    # Even and odd numbers of entries, which read as int64 would be half as many.
    for name in ("3+5+4", "0+4+0+0+3+0", "5+2.padded:3"):
        yield Call(f"{name}.int32", partial(_int32, packing=_PACKINGS[name], causal=True))
    wide = partial(_packed, packing=((33, 4), 1), causal=False, keys=((65, 7), 2))
    yield Call("33+4of65+7.to-float32", partial(to_float32, make=wide))
    yield Call("apart", _apart, statistical=False)
    # A query of one sequence, and the padding; every other sequence stays clean.
    small = partial(_packed, packing=((4, 5, 3), 2), causal=True, keys=((4, 7, 2), 1))
    spoilt = [(n, slice(12 + (n > 0), None), math.nan) for n in range(3)]
    yield special("nan", small, (0, (6, 0, 0), math.nan), *spoilt)
    long = partial(_packed, packing=((300, 17, 512), 0), causal=True, dim=64)
    yield Call("300+17+512", long, full=True)


ATTENTION_VARLEN = Oracle(
    forward=_forward,
    backward=_backward,
    calls=_calls,
    lower_precision=("15+17+33.causal", "63+65.full", "63+65.causal.keys"),
)
