"""Oracles of linear and embedding.

linear: y = x w^T + b; dx = dy w, dw = dy^T x, db = sum dy. Sums run over K, N and the rows; each
has its own length in the bound. embedding: a copy, exact; its gradient adds up the rows of an
index, and a row that is used once is a copy too, without any rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded, matmul
from anychip.conformance.calls import Arguments, Call, Draw, special
from anychip.conformance.labels import ROOTS, Labels
from anychip.conformance.oracles.oracle import Answer, Gradients, differentiable


def _rows(x: Rounded) -> Rounded:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def answer(x: Rounded, weight: Rounded, bias: Rounded | None, **_: Any) -> Answer:
    rows = _rows(x)
    y = matmul(rows, weight.transpose(1, 0))
    y = y if bias is None else _from(bias, y, rows.shape[1])

    def backward(dy: Rounded) -> Gradients:
        grad = _rows(dy)
        dx = matmul(grad, weight).reshape(*x.shape)
        return dx, matmul(grad.transpose(1, 0), rows), None if bias is None else grad.sum(0)

    return (y.reshape(*x.shape[:-1], weight.shape[0]),), backward


def _from(bias: Rounded, product: Rounded, count: int) -> Rounded:
    """The sum may begin with the bias, which every one of its roundings then sees."""
    y, size = product + bias, np.where(np.isfinite(bias.value), np.abs(bias.value), 0.0)
    return Rounded(y.value, y.worst + count * size, np.hypot(y.spread, np.sqrt(count) * size))


def _embedding(indices: NDArray[np.int64], weight: Rounded) -> Answer:
    return (weight[indices],), lambda dy: (_added_up(_rows(dy), indices.reshape(-1), weight.shape),)


def _added_up(grad: Rounded, flat: NDArray[np.int64], shape: tuple[int, ...]) -> Rounded:
    """Every row of a gradient, added to the row of its index."""

    def added(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        total = np.zeros(shape)
        np.add.at(total, flat, np.broadcast_to(rows, grad.shape))
        return total

    # n terms take n - 1 roundings here, so that one term is exact.
    roundings = np.maximum(np.bincount(flat, minlength=shape[0]) - 1, 0)[:, None]
    value = added(grad.value)
    worst = added(grad.worst) + roundings * added(np.abs(grad.value))
    squares = added(grad.spread**2) + roundings * (value**2 + added(grad.value**2))
    return Rounded(value, worst, np.sqrt(squares))


LABELS = Labels(
    {"bias": {"bias": True}, "to-float32": {"out_dtype": torch.float32}, **ROOTS},
    {r"(\d+)-(\d+)": ("inputs", "outputs")},
)
# rows, K, N: empty; one; beside tiles of 8, 16, 64; long in each of the three directions.
_SIZES = """0.8-4 1.1-1 3.8-5 scalar.16-7 2x4.33-17 5.64-64 2x3x2.65-15 7.127-9 3.1000-6 4.4096-5
    600.24-10 2.12-700 64.512-128"""
_FULL = "64.1024-256 3.16384-4 2048.64-64"


def _product(
    draw: Draw,
    shape: tuple[int, ...],
    inputs: int,
    outputs: int,
    *,
    bias: bool = False,
    scale: float | str = 1.0,
    **attrs: Any,
) -> Arguments:
    """out_dtype: float32, which 16-bit operands are no excuse for rounding twice."""
    x, weight = draw.normal(*shape, inputs, scale=scale), draw.normal(outputs, inputs)
    return (x, weight, draw.normal(outputs) if bias else None), attrs


def _spotlight(draw: Draw) -> Arguments:
    return (torch.eye(67, dtype=draw.dtype), draw.normal(19, 67), None), {}


def _linear_calls() -> Iterator[Call]:
    with_bias = partial(_product, bias=True)
    yield from LABELS(_product, _SIZES, ends=(".bias", ""))
    yield from LABELS(_product, _FULL, ends=(".bias", ""), full=True)
    yield from LABELS(_product, "6.40-12.huge 6.40-12.tiny")
    yield from LABELS(with_bias, "5.64-64.to-float32")
    yield from LABELS(_product, "3.1000-6 600.24-10 2x0.3-4 scalar.16-7", ends=(".to-float32",))
    yield Call("spotlight", _spotlight, statistical=False)
    yield special(
        "nan", partial(with_bias, shape=(4,), inputs=24, outputs=5), (0, (2, 11), math.nan)
    )


def _lookup(draw: Draw, shape: tuple[int, ...], count: int, width: int) -> Arguments:
    return (draw.integers(count, *shape), draw.normal(count, width)), {}


def _fixed_lookup(draw: Draw, indices: list[int]) -> Arguments:
    return (torch.tensor(indices), draw.normal(max(indices) + 1, 21)), {}


def _special_lookup(draw: Draw) -> Arguments:
    weight = draw.normal(6, 10)
    weight[2], weight[3, 4], weight[4] = math.inf, math.nan, draw.subnormal
    return (torch.tensor([2, 3, 4, 5, 3]), weight), {}


def _embedding_calls() -> Iterator[Call]:
    labels = Labels(forms={r"of:(\d+)x(\d+)": ("count", "width")})
    yield from labels(_lookup, """0.of:5x8 scalar.of:4x3 1.of:1x1 4.of:10x8 2x3.of:5x17 33.of:7x64
        3x100.of:50x96 500.of:3x5""")  # fmt: skip
    fixed = {"ends": [0, 40, 0, 40], "repeated": [3] * 130, "all-once": list(range(70))}
    for name, indices in fixed.items():
        yield Call(name, partial(_fixed_lookup, indices=indices))
    yield Call("special", _special_lookup, statistical=False, gradient=False)


LINEAR = differentiable(
    answer, _linear_calls, "5.64-64", "3.1000-6", "4.4096-5", "600.24-10", "64.512-128",
    "5.64-64.to-float32",
    "3.1000-6.to-float32", "600.24-10.to-float32",
)  # fmt: skip
EMBEDDING = differentiable(_embedding, _embedding_calls, "repeated", "500.of:3x5")
