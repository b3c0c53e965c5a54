"""Oracles of hadamard and top_k.

hadamard: the product with the matrix of signs, n terms per entry in any order, and the factor
1 / sqrt(n). It is symmetric: the gradient is the transform of the gradient. top_k: a selection, so
that values and indices are exact; the gradient goes back to where a value came from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from anychip.conformance.arithmetic import Rounded, matmul
from anychip.conformance.calls import Arguments, Call, Draw, special
from anychip.conformance.formats import Array
from anychip.conformance.labels import PLAIN
from anychip.conformance.oracles.oracle import Answer, differentiable


def _signs(length: int) -> Rounded:
    """(-1)^(number of bits that row and column have in common)."""
    index = np.arange(length)
    common = index[:, None] & index
    bits = sum((common >> place & 1 for place in range(length.bit_length())), 0 * common)
    return Rounded.exact(np.where(bits % 2, -1.0, 1.0))


def _hadamard(x: Rounded, *, block: int | None) -> Answer:
    length = x.shape[-1] if block is None else block

    def transformed(x: Rounded) -> tuple[Rounded]:
        product = matmul(x.reshape(-1, length), _signs(length))
        return ((product * (1.0 / math.sqrt(length))).reshape(*x.shape),)

    return transformed(x), transformed


def _order(x: Array, k: int) -> Any:
    # NaN sorts to the end: of the magnitudes turned round, that is the front.
    size = np.where(np.isnan(x), -math.inf, -np.abs(x))
    key = np.where(np.isnan(x), 0, 1)
    return np.lexsort((size, key), axis=-1)[..., :k]


def _top_k(x: Rounded, *, k: int) -> Answer:
    indices = _order(x.value, k)

    def scattered(array: Array) -> Array:
        whole = np.zeros(x.shape)
        np.put_along_axis(whole, indices, array, -1)
        return whole

    values = x.shaped(lambda array: np.take_along_axis(array, indices, -1))
    return (values, Rounded.exact(indices)), lambda grad, *_: (grad.shaped(scattered),)


# Calls


def _normal(
    draw: Draw, shape: tuple[int, ...], scale: float | str = 1.0, **attrs: Any
) -> Arguments:
    return (draw.normal(*shape, scale=scale),), attrs


def _one_hot(draw: Draw) -> Arguments:
    """Every column of the matrix once: order and signs."""
    return (torch.eye(32, dtype=draw.dtype),), {"block": None}


def _hadamard_calls() -> Iterator[Call]:
    whole = partial(_normal, block=None)
    yield from PLAIN(whole, "0x8 1 2 3x8 5x16 2x3x64 7x256 2x1024")
    yield from PLAIN(_normal, "5x192", ends=(".block:1", ".block:2", ".block:8", ".block:64"))
    yield Call("one-hot", _one_hot, statistical=False)
    yield from PLAIN(partial(_normal, shape=(6, 64), block=32), "huge subnormal")
    small = partial(_normal, shape=(3, 16), block=4)
    yield special("special", small, (0, (0, 3), math.nan), (0, (1, 5), math.inf))
    yield from PLAIN(whole, "3x4096", full=True)


def _ties(draw: Draw, k: int) -> Arguments:
    """Few different magnitudes, of both signs: the index decides."""
    return ((draw.integers(7, 5, 40) - 3).to(draw.dtype),), {"k": k}


def _top_k_special(draw: Draw) -> Arguments:
    x = draw.normal(4, 20)
    x[0, 3], x[0, 9], x[1, 5], x[2, 7] = math.nan, math.nan, math.inf, -math.inf
    x[3] = 0.0
    x[3, 4] = -0.0
    return (x,), {"k": 6}


def _top_k_calls() -> Iterator[Call]:
    yield from PLAIN(_normal, "0x8.k:3 1.k:1 17.k:5 33.k:33 33.k:0 6x31.k:4 2x3x40.k:1 5000.k:50")
    for k in (1, 7, 40):
        yield Call(f"ties.k:{k}", partial(_ties, k=k), statistical=False)
    yield from PLAIN(partial(_normal, shape=(6, 64), k=10), "huge subnormal")
    yield Call("special", _top_k_special, statistical=False, gradient=False)
    yield from PLAIN(partial(_normal, k=3000), "300001", full=True)


HADAMARD = differentiable(_hadamard, _hadamard_calls, "5x16", "7x256", "5x192.block:64")
TOP_K = differentiable(_top_k, _top_k_calls, "6x31.k:4")
