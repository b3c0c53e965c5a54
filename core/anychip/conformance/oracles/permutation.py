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
from anychip.conformance.calls import Arguments, Call, Draw, changed, in_layouts, special
from anychip.conformance.oracles.oracle import Oracle

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


def _map_of(order: Integers, shape: tuple[int, ...]) -> Integers:
    # Where each choice stands in the order.
    return np.argsort(order).reshape(shape)


def _permute(
    x: Rounded, indices: Integers, *given: Integers | None, num_experts: int
) -> tuple[Rounded, Rounded, Rounded]:
    order, experts = _order(indices, *given, num_experts=num_experts)
    offsets = np.bincount(experts, minlength=num_experts)[:num_experts].cumsum()
    row_map = Rounded.exact(_map_of(order, indices.shape))
    return x[order // indices.shape[1]], row_map, Rounded.exact(offsets)


def _permute_backward(
    grads: tuple[Any, ...], x: Rounded, indices: Integers, *given: Any, num_experts: int
) -> tuple[Rounded]:
    row_map = _map_of(_order(indices, *given, num_experts=num_experts)[0], indices.shape)
    return (grads[0][row_map].sum(1),)


def _unpermute(x: Rounded, row_map: Integers, weights: Rounded | None) -> tuple[Rounded]:
    rows = x[row_map]
    return ((rows if weights is None else rows * weights[..., None]).sum(1),)


def _unpermute_backward(
    grads: tuple[Rounded], x: Rounded, row_map: Integers, weights: Rounded | None
) -> tuple[Rounded, Rounded | None]:
    each = grads[0][:, None]
    spread = each.shaped(lambda array: np.repeat(array, row_map.shape[1], 1))
    scaled = spread if weights is None else spread * weights[..., None]
    rows = np.argsort(row_map.reshape(-1))
    dx = scaled.reshape(-1, x.shape[1])[rows] if x.shape[0] else scaled.reshape(*x.shape)
    return dx, None if weights is None else (each * x[row_map]).sum(-1)


# Tokens, choices, experts, hidden: one of everything; no tokens; one expert; as many choices as
# experts; more experts than choices; beside warps and blocks of 32, 256 and 1024 choices.
Sizes = tuple[int, int, int, int]
_SIZES: tuple[Sizes, ...] = (
    (1, 1, 1, 1), (0, 2, 4, 8), (7, 1, 3, 5), (6, 3, 1, 16), (9, 4, 4, 8), (5, 2, 70, 33),
    (33, 1, 2, 3), (129, 2, 9, 4), (350, 3, 300, 2), (40, 8, 64, 24),
)  # fmt: skip
_FULL: tuple[Sizes, ...] = ((2500, 2, 8, 6), (1025, 4, 1000, 8), (300, 8, 256, 512))


def _label(sizes: Sizes) -> str:
    tokens, choices, experts, hidden = sizes
    return f"{tokens}x{hidden}.{choices}of{experts}"


def _permuted(
    draw: Draw,
    sizes: Sizes,
    scale: float | str = 1.0,
    dtype: torch.dtype = torch.int64,
    outside: int = 0,
) -> Arguments:
    """``outside`` widens the range of the indices on both sides."""
    tokens, choices, experts, hidden = sizes
    indices = draw.integers(experts + 2 * outside, tokens, choices) - outside
    return (draw.normal(tokens, hidden, scale=scale), indices.to(dtype)), {"num_experts": experts}


def _uneven(draw: Draw) -> Arguments:
    """Empty experts first, last and beside each other; one that has most."""
    indices = torch.tensor([[2, 5], [5, 2], [5, 5], [2, 5], [5, 6], [5, 2]])
    return (draw.normal(6, 7), indices), {"num_experts": 9}


def _with_key(
    draw: Draw, sizes: Sizes, keys: int, tokens: int | None = None, dtype: Any = torch.int64
) -> Arguments:
    """With keys of so many kinds, far apart, and of so many tokens."""
    args, attrs = _permuted(draw, sizes, outside=1)
    far = 2**40 if dtype == torch.int64 else 2**20
    key = ((draw.integers(keys, sizes[0]) - keys // 2) * far).to(dtype) if keys else None
    return (*args, key, None if tokens is None else torch.tensor(tokens, dtype=dtype)), attrs


def _none_chosen(draw: Draw) -> Arguments:
    return (draw.normal(4, 5), torch.full((4, 2), -1)), {"num_experts": 3}


def _far_indices(draw: Draw) -> Arguments:
    """Numbers that are an expert again in 8, 16 or 32 bits."""
    indices = torch.tensor([[0, 256], [2**16 + 1, 2], [1, 2**32], [-(2**31), 2**62], [3, 4]])
    return (draw.normal(5, 6), indices), {"num_experts": 4}


def _permute_calls() -> Iterator[Call]:
    for sizes in (*_SIZES, *_FULL):
        make: Any = partial(_permuted, sizes=sizes)
        yield Call(_label(sizes), make, full=sizes in _FULL)
    for sizes in ((9, 4, 4, 8), (129, 2, 9, 4)):
        for dtype, name in ((torch.int64, "int64"), (torch.int32, "int32")):
            make = partial(_permuted, sizes=sizes, dtype=dtype, outside=2)
            yield Call(f"{_label(sizes)}.outside.{name}", make)
    for keys in (1, 5, 1000):
        make = partial(_with_key, sizes=(129, 2, 9, 4), keys=keys)
        yield Call(f"129x4.2of9.keys:{keys}", make)
    for tokens in (0, 7, 30, 31, 2000):
        make = partial(_with_key, sizes=(30, 3, 5, 6), keys=0, tokens=tokens)
        yield Call(f"30x6.3of5.tokens:{tokens}", make)
    both = partial(_with_key, sizes=(40, 4, 64, 9), keys=7, tokens=33, dtype=torch.int32)
    yield Call("40x9.4of64.keys:7.tokens:33.int32", both)
    for layout in ("strided", "offset"):
        make = partial(_with_key, sizes=(11, 3, 5, 20), keys=4, tokens=9)
        yield Call(f"11x20.3of5.keys:4.tokens:9.{layout}", make, layout=layout)
    yield from in_layouts("11x20.3of5", partial(_permuted, sizes=(11, 3, 5, 20)))
    for name in ("huge", "subnormal"):
        yield Call(name, partial(_permuted, sizes=(20, 2, 4, 12), scale=name))
    yield Call("uneven", _uneven)
    yield Call("none-chosen", _none_chosen)
    yield Call("far-indices", _far_indices)
    small = partial(_permuted, sizes=(6, 2, 3, 8))
    yield Call("zeros", changed(small, (0, 1, -0.0), (0, (4, 2), -0.0)), statistical=False)
    small = partial(_permuted, sizes=(8, 2, 3, 10))
    numbers = {(1, 3): math.nan, (4, 0): math.inf, (6, 9): -math.inf, 2: -0.0}
    yield special("special", small, *((0, place, number) for place, number in numbers.items()))


def _unpermuted(
    draw: Draw,
    sizes: tuple[int, int, int],
    weighted: bool = True,
    wide: bool = False,
    scale: float | str = 1.0,
) -> Arguments:
    tokens, choices, hidden = sizes
    order = draw.uniform(tokens * choices).argsort().view(tokens, choices)
    dtype = torch.float32 if wide else draw.dtype
    weights = draw.normal(tokens, choices, dtype=dtype) if weighted else None
    return (draw.normal(tokens * choices, hidden, scale=scale), order, weights), {}


_BACK: tuple[tuple[int, int, int], ...] = (
    (1, 1, 1), (0, 2, 8), (7, 1, 5), (6, 3, 16), (9, 4, 33), (5, 8, 65), (70, 2, 3), (3, 5, 700),
)  # fmt: skip


def _unpermute_calls() -> Iterator[Call]:
    for sizes in _BACK:
        tokens, choices, hidden = sizes
        for weighted in (True, False):
            make: Any = partial(_unpermuted, sizes=sizes, weighted=weighted)
            suffix = "" if weighted else ".unweighted"
            yield Call(f"{tokens}x{hidden}.of:{choices}{suffix}", make)
    yield Call("9x33.of:4.fp32-weights", partial(_unpermuted, sizes=(9, 4, 33), wide=True))
    yield Call("300x512.of:8", partial(_unpermuted, sizes=(300, 8, 512)), full=True)
    yield from in_layouts("11x20.of:3", partial(_unpermuted, sizes=(11, 3, 20)))
    for name in ("huge", "tiny"):
        yield Call(name, partial(_unpermuted, sizes=(9, 3, 14), scale=f"root-{name}"))
    # What is not finite stays in its token; 0 times it is NaN.
    numbers = {(3, 1): math.nan, (5, 2): math.inf, (9, 7): -math.inf}
    spoilt = [(0, place, number) for place, number in numbers.items()]
    yield special("special", partial(_unpermuted, sizes=(8, 2, 10)), *spoilt, (2, 4, 0.0))


PERMUTE = Oracle(
    forward=_permute,
    backward=_permute_backward,
    calls=_permute_calls,
    lower_precision=("40x24.8of64",),
)
UNPERMUTE = Oracle(
    forward=_unpermute,
    backward=_unpermute_backward,
    calls=_unpermute_calls,
    lower_precision=("9x33.of:4", "5x65.of:8", "3x700.of:5"),
)
