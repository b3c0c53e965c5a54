"""Oracles of permute and unpermute: a stable order of the choices by expert, and sums along it.

permute copies, so that rows, map and offsets are exact; the gradient of a token adds up those of
its copies, K terms. unpermute adds K products per element; the gradient of a weight adds H of them,
and that of a row is one product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded
from anychip.conformance.calls import Arguments, Call, Draw, changed, special
from anychip.conformance.labels import PLAIN, ROOTS, Labels
from anychip.conformance.oracles.oracle import Answer, Gradients, differentiable

Integers = NDArray[np.int64]


def _order(
    indices: Integers, key: Integers | None, num_tokens: Integers | None, *, num_experts: int
) -> tuple[Integers, Integers]:
    """The choices, counted row by row, as they are sorted; and the expert of each."""
    flat = indices.reshape(-1).astype(np.int64)
    token = np.arange(flat.size) // indices.shape[1]
    inside = (flat >= 0) & (flat < num_experts)
    if num_tokens is not None:
        inside &= token < int(num_tokens)
    experts = np.where(inside, flat, num_experts)
    keys = np.zeros_like(flat) if key is None else key[token].astype(np.int64)
    order = np.lexsort((np.arange(flat.size), keys, experts))
    return order, experts


def _permute(x: Rounded, indices: Integers, *given: Integers | None, num_experts: int) -> Answer:
    order, experts = _order(indices, *given, num_experts=num_experts)
    offsets = np.bincount(experts, minlength=num_experts)[:num_experts].cumsum()
    row_map = np.argsort(order).reshape(indices.shape)  # where each choice stands in the order
    results = (x[order // indices.shape[1]], Rounded.exact(row_map), Rounded.exact(offsets))
    return results, lambda dy, *_: (dy[row_map].sum(1),)


def _unpermute(x: Rounded, row_map: Integers, weights: Rounded | None) -> Answer:
    taken = x[row_map]

    def backward(grad: Rounded) -> Gradients:
        each = grad[:, None]
        spread = each.shaped(lambda array: np.repeat(array, row_map.shape[1], 1))
        scaled = spread if weights is None else spread * weights[..., None]
        rows = np.argsort(row_map.reshape(-1))
        dx = scaled.reshape(-1, x.shape[1])[rows] if x.shape[0] else scaled.reshape(*x.shape)
        return dx, None if weights is None else (each * taken).sum(-1)

    return ((taken if weights is None else taken * weights[..., None]).sum(1),), backward


# Tokens, hidden, choices, experts: one of everything; no tokens; one expert; as many choices as
# experts; more experts than choices; beside warps and blocks of 32, 256 and 1024 choices.
_SIZES = """1x1.1of1 0x8.2of4 7x5.1of3 6x16.3of1 9x8.4of4 5x33.2of70 33x3.1of2 129x4.2of9
    350x2.3of300 40x24.8of64"""
_FULL = "2500x6.2of8 1025x8.4of1000 300x512.8of256"
_LABELS = Labels(
    {
        "outside": {"outside": 2}, "int64": {"dtype": torch.int64}, "int32": {"dtype": torch.int32},
        "unweighted": {"weighted": False}, "fp32-weights": {"wide": True}, **ROOTS,
    },
    {
        r"(\d+)x(\d+)": ("tokens", "hidden"), r"(\d+)of(\d+)": ("choices", "experts"),
        r"of:(\d+)": ("choices",), r"tokens:(\d+)": ("num_tokens",),
    },
)  # fmt: skip


def _permuted(
    draw: Draw,
    tokens: int,
    hidden: int,
    choices: int,
    experts: int,
    *,
    scale: float | str = 1.0,
    dtype: torch.dtype = torch.int64,
    outside: int = 0,
) -> Arguments:
    """``outside`` widens the range of the indices on both sides."""
    indices = draw.integers(experts + 2 * outside, tokens, choices) - outside
    return (draw.normal(tokens, hidden, scale=scale), indices.to(dtype)), {"num_experts": experts}


def _uneven(draw: Draw) -> Arguments:
    """Empty experts first, last and beside each other; one that has most."""
    indices = torch.tensor([[2, 5], [5, 2], [5, 5], [2, 5], [5, 6], [5, 2]])
    return (draw.normal(6, 7), indices), {"num_experts": 9}


def _with_key(
    draw: Draw,
    *,
    keys: int = 0,
    num_tokens: int | None = None,
    dtype: torch.dtype = torch.int64,
    **sizes: Any,
) -> Arguments:
    """With keys of so many kinds, far apart, and of so many tokens."""
    args, attrs = _permuted(draw, outside=1, **sizes)
    far, count = (2**40 if dtype == torch.int64 else 2**20), sizes["tokens"]
    key = ((draw.integers(keys, count) - keys // 2) * far).to(dtype) if keys else None
    given = None if num_tokens is None else torch.tensor(num_tokens, dtype=dtype)
    return (*args, key, given), attrs


def _none_chosen(draw: Draw) -> Arguments:
    return (draw.normal(4, 5), torch.full((4, 2), -1)), {"num_experts": 3}


def _far_indices(draw: Draw) -> Arguments:
    """Numbers that are an expert again in 8, 16 or 32 bits."""
    indices = torch.tensor([[0, 256], [2**16 + 1, 2], [1, 2**32], [-(2**31), 2**62], [3, 4]])
    return (draw.normal(5, 6), indices), {"num_experts": 4}


def _permute_calls() -> Iterator[Call]:
    yield from _LABELS(_permuted, _SIZES)
    yield from _LABELS(_permuted, _FULL, full=True)
    outside = (".outside.int64", ".outside.int32")
    yield from _LABELS(_permuted, "9x8.4of4 129x4.2of9", ends=outside)
    yield from _LABELS(_with_key, "129x4.2of9", ends=(".keys:1", ".keys:5", ".keys:1000"))
    ends = tuple(f".tokens:{count}" for count in (0, 7, 30, 31, 2000))
    yield from _LABELS(_with_key, "30x6.3of5", ends=ends)
    yield from _LABELS(_with_key, "40x9.4of64.keys:7.tokens:33.int32")
    small = partial(_permuted, tokens=20, hidden=12, choices=2, experts=4)
    yield from PLAIN(small, "huge subnormal")
    yield Call("uneven", _uneven)
    yield Call("none-chosen", _none_chosen)
    yield Call("far-indices", _far_indices)
    small = partial(_permuted, tokens=6, hidden=8, choices=2, experts=3)
    yield Call("zeros", changed(small, (0, 1, -0.0), (0, (4, 2), -0.0)), statistical=False)
    small = partial(_permuted, tokens=8, hidden=10, choices=2, experts=3)
    numbers = {(1, 3): math.nan, (4, 0): math.inf, (6, 9): -math.inf, 2: -0.0}
    yield special("special", small, *((0, place, number) for place, number in numbers.items()))


def _unpermuted(
    draw: Draw,
    tokens: int,
    hidden: int,
    choices: int,
    *,
    weighted: bool = True,
    wide: bool = False,
    scale: float | str = 1.0,
) -> Arguments:
    order = draw.uniform(tokens * choices).argsort().view(tokens, choices)
    dtype = torch.float32 if wide else draw.dtype
    weights = draw.normal(tokens, choices, dtype=dtype) if weighted else None
    return (draw.normal(tokens * choices, hidden, scale=scale), order, weights), {}


def _unpermute_calls() -> Iterator[Call]:
    sizes = "1x1.of:1 0x8.of:2 7x5.of:1 6x16.of:3 9x33.of:4 9x65.of:8 70x3.of:2 3x700.of:5"
    yield from _LABELS(_unpermuted, sizes, ends=("", ".unweighted"))
    yield from _LABELS(_unpermuted, "9x33.of:4.fp32-weights")
    yield from _LABELS(_unpermuted, "300x512.of:8", full=True)
    yield from _LABELS(partial(_unpermuted, tokens=9, hidden=14, choices=3), "huge tiny")
    # What is not finite stays in its token; 0 times it is NaN.
    numbers = {(3, 1): math.nan, (5, 2): math.inf, (9, 7): -math.inf}
    spoilt = [(0, place, number) for place, number in numbers.items()]
    small = partial(_unpermuted, tokens=8, hidden=10, choices=2)
    yield special("special", small, *spoilt, (2, 4, 0.0))


PERMUTE = differentiable(_permute, _permute_calls, "40x24.8of64")
UNPERMUTE = differentiable(_unpermute, _unpermute_calls, "9x33.of:4", "9x65.of:8", "3x700.of:5")
