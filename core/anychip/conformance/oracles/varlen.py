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
from anychip.conformance.calls import Arguments, Call, Draw, special
from anychip.conformance.labels import Labels, lengths
from anychip.conformance.oracles.attention import Mask, attend, to_float32
from anychip.conformance.oracles.oracle import Answer, Gradients, differentiable

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


def _answer(
    q: Rounded,
    k: Rounded,
    v: Rounded,
    of_queries: Ends,
    of_keys: Ends,
    *,
    causal: bool,
    scale: float | None,
    **out_dtype: Any,
) -> Answer:
    hidden = _hidden((q.shape[0], k.shape[0]), of_queries, of_keys, causal)
    three = (_unpadded(q, of_queries), _unpadded(k, of_keys), _unpadded(v, of_keys))
    (y, lse), of_whole = attend(*three, hidden, scale, **out_dtype)

    def backward(grad: Rounded) -> Gradients:
        found = of_whole(_unpadded(grad, of_queries))
        return tuple(gradient[0] for gradient in found if gradient is not None)

    return (y[0], lse[0]), backward


Lengths = tuple[int, ...]
# Lengths of the sequences, then how much padding: one; empty ones first, last, in between, and
# several; beside tiles of 16 and 64; padding alone.
_PACKINGS = """1 none 4 3+5+4 0+4+0+0+3+0 1+1+1+1 15+17+33 63+65 5+2.padded:3 padded:4 0.padded:2"""
_KEYS: dict[str, tuple[Lengths, int]] = {
    "3+5+4": ((5, 2, 4), 1),
    "0+4+0+0+3+0": ((2, 0, 0, 1, 6, 3), 0),
    "63+65": ((17, 130), 0),
    "5+2.padded:3": ((0, 0), 0),
    "0.padded:2": ((4,), 3),
}
"""Of some packings of queries another one of keys: fewer, more, none; padding of one alone."""
_LABELS = Labels(
    {
        "causal": {"causal": True}, "full": {"causal": False}, "keys": {}, "to-float32": {},
        "int32": {"dtype": torch.int32},
        **{f"heads:6+{n}": {"heads": (6, n), "dim": 12} for n in (1, 2, 6)},
    },
    {r"(none|\d+(?:[+]\d+)*)(?:of.*)?": lengths},
)  # fmt: skip


def _packed(
    draw: Draw,
    lengths: Lengths = (),
    padded: int = 0,
    *,
    causal: bool = True,
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    keys: tuple[Lengths, int] | None = None,
    dtype: torch.dtype = torch.int64,
) -> Arguments:
    """keys: their lengths and padding, where they are not those of the queries."""
    ends, tokens = [], []
    for own, padding in ((lengths, padded), keys or (lengths, padded)):
        ends.append(torch.tensor([0, *own]).cumsum(0))
        tokens.append(int(ends[-1][-1]) + padding)
    q, k = (draw.normal(n, count, dim) for n, count in zip(tokens, heads, strict=True))
    args = (q, k, draw.normal(*k.shape), ends[0].to(dtype), ends[1].to(dtype))
    return args, {"causal": causal, "scale": None}


def _apart(draw: Draw) -> Arguments:
    # Sequence b holds the number b + 1 and nothing else: to see another one is a wrong integer.
    (q, k, v, *ends), attrs = _packed(draw, (6, 9, 2, 7), causal=False, keys=((8, 1, 5, 9), 1))
    for number, (start, end) in enumerate(itertools.pairwise(ends[1])):
        v[start:end] = number + 1
    return (q, k, v, *ends), attrs


def _calls() -> Iterator[Call]:
    for name in _PACKINGS.split():
        for end in (".causal", ".full"):
            yield from _LABELS(_packed, f"{name}{end}")
            if name in _KEYS:
                yield from _LABELS(partial(_packed, keys=_KEYS[name]), f"{name}{end}.keys")
    yield from _LABELS(_packed, "7+12.heads:6+1 7+12.heads:6+2 7+12.heads:6+6")
    # Even and odd numbers of entries, which read as int64 would be half as many.
    yield from _LABELS(_packed, "3+5+4.int32 0+4+0+0+3+0.int32 5+2.padded:3.int32")
    wide = partial(_packed, padded=1, causal=False, keys=((65, 7), 2))
    yield from _LABELS(partial(to_float32, make=wide), "33+4of65+7.to-float32")
    yield Call("apart", _apart, statistical=False)
    # A query of one sequence, and the padding; every other sequence stays clean.
    small = partial(_packed, lengths=(4, 5, 3), padded=2, keys=((4, 7, 2), 1))
    spoilt = [(n, slice(12 + (n > 0), None), math.nan) for n in range(3)]
    yield special("nan", small, (0, (6, 0, 0), math.nan), *spoilt)
    yield from _LABELS(partial(_packed, dim=64), "300+17+512", full=True)


ATTENTION_VARLEN = differentiable(
    _answer, _calls, "15+17+33.causal", "63+65.full", "63+65.causal.keys", "33+4of65+7.to-float32"
)
