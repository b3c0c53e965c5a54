"""Oracles of dropout_add_rms_norm and dropout_add_layer_norm.

Kept elements of x are x / (1 - p), where 1 / (1 - p) is one float32 number and the product is
rounded to float32. Their sum with the residual is then that of the operators without dropout: in a
16-bit type it is computed here bit for bit, and is an exact input of the norm; in float32 its two
roundings are part of the bound. The gradient of the sum is that of the residual, and dropped with
the same mask that of x.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from anychip.conformance.arithmetic import Rounded
from anychip.conformance.calls import Arguments, Call, Draw, in_layouts, shape_label
from anychip.conformance.formats import FP32
from anychip.conformance.oracles import dropout, norm
from anychip.conformance.oracles.dropout import Numbers
from anychip.conformance.oracles.oracle import Oracle


def _stored_sum(
    x: Rounded, residual: Rounded, rng: Numbers, rows: Numbers | None, p: float
) -> Rounded:
    width = x.shape[-1]
    if residual.format == FP32:
        return dropout._scaled(x, rng, rows, p=p, width=width) + residual
    keep = dropout.kept(x.shape, rng, rows, p=p, width=width)
    scale = np.float32(0.0 if p == 1.0 else 1.0 / (1.0 - p))
    product = x.value.astype(np.float32) * scale
    dropped = np.where(keep, product, np.float32(0.0)).astype(np.float64)
    return norm._stored_sum(Rounded.exact(dropped, FP32), residual)


def _forward(norm_forward: norm.Computed) -> norm.Computed:
    def forward(
        x: Rounded,
        residual: Rounded,
        weight: Rounded,
        rng: Numbers,
        *bias_and_rows: Any,
        p: float,
        eps: float,
    ) -> tuple[Rounded, ...]:
        *bias, rows = bias_and_rows
        total = _stored_sum(x, residual, rng, rows, p)
        y, *kept = norm_forward(total, weight, *bias, eps=eps)
        return y, total, *kept

    return forward


def _backward(norm_backward: norm.Computed) -> norm.Computed:
    def backward(
        grads: tuple[Rounded, Rounded],
        x: Rounded,
        residual: Rounded,
        weight: Rounded,
        rng: Numbers,
        *bias_and_rows: Any,
        p: float,
        eps: float,
    ) -> tuple[Rounded | None, ...]:
        (grad, dtotal), (*bias, rows) = grads, bias_and_rows
        total = _stored_sum(x, residual, rng, rows, p)
        dnorm, *rest = norm_backward((grad,), total, weight, *bias, eps=eps)
        both = dtotal + dnorm
        return dropout._scaled(both, rng, rows, p=p, width=x.shape[-1]), both, *rest

    return backward


_SHAPES: tuple[tuple[int, ...], ...] = (
    (0, 8), (1, 1), (5,), (4, 8), (3, 17), (2, 3, 33), (5, 64), (70, 48), (4, 1000), (3, 0),
)  # fmt: skip


def _with_rng(
    draw: Draw, arguments: Arguments, p: float, seed: int = 1234, offset: int = 5
) -> Arguments:
    """A call of the norm of a residual's sum, with dropout."""
    (x, residual, weight, *bias), attrs = arguments
    return (x, residual, weight, draw.rng(seed, offset), *bias), {"p": p, **attrs}


def _normal(
    draw: Draw,
    shape: tuple[int, ...],
    *,
    bias: bool,
    p: float = 0.2,
    offset: int = 5,
    **options: Any,
) -> Arguments:
    given = norm._add_normal(draw, shape, bias=bias, **options)
    return _with_rng(draw, given, p, offset=offset)


def _in_whole(
    draw: Draw, shape: tuple[int, ...], *, bias: bool, rows: torch.Tensor | None = None
) -> Arguments:
    args, attrs = _normal(draw, shape, bias=bias)
    return (*args, draw.integers(1000, *shape[:-1]) if rows is None else rows), attrs


def _special(draw: Draw, value: float, *, bias: bool) -> Arguments:
    # In x: one that is dropped leaves its row as it is, and one that is kept spoils it.
    x, stream = draw.normal(6, 24), draw.normal(6, 24)
    x[1:4, 5:9] = value
    stream[5, 0] = value
    return _with_rng(draw, norm._with_residual(draw, x, stream, bias=bias), 0.9)


def _cancelling(draw: Draw, *, bias: bool) -> Arguments:
    # What is kept and doubled cancels the stream: scaled or rounded otherwise, nothing is left.
    x = draw.normal(5, 40)
    return _with_rng(draw, norm._with_residual(draw, x, -2.0 * x, bias=bias), 0.5)


def _without_bias(draw: Draw) -> Arguments:
    args = (draw.normal(4, 40), draw.normal(4, 40), draw.normal(40), None)
    return _with_rng(draw, (args, {"eps": 1e-5}), 0.3)


def _calls(*, bias: bool) -> Iterator[Call]:
    make = partial(_normal, bias=bias)
    for shape in _SHAPES:
        yield Call(shape_label(shape), partial(make, shape=shape))
    for p in (0.0, 0.5, 1.0, 1.0 - 2.0**-20):
        yield Call(f"11x40.p:{p:.9g}", partial(make, shape=(11, 40), p=p))
    yield from in_layouts("5x6x50", partial(make, shape=(5, 6, 50)))
    yield Call("4x40.eps:0.5", partial(make, shape=(4, 40), eps=0.5))
    yield Call("8x33.carry", partial(make, shape=(8, 33), offset=2**32 - 20))
    yield Call("6x96.residual:fp32", partial(make, shape=(6, 96), residual=torch.float32))
    for shape in ((5,), (4, 17), (2, 3, 64)):
        rows = partial(_in_whole, bias=bias, shape=shape)
        yield Call(f"{shape_label(shape)}.rows", rows)
    yield Call("6x40.rows:far", partial(_in_whole, bias=bias, shape=(6, 40), rows=dropout.FAR))
    strided = partial(_in_whole, bias=bias, shape=(5, 48))
    yield Call("5x48.rows.strided", strided, layout="strided")
    yield Call("5x40.cancel", partial(_cancelling, bias=bias), statistical=False)
    for value in ("nan", "inf"):
        special = partial(_special, value=float(value), bias=bias)
        yield Call(f"6x24.{value}", special, statistical=False, gradient=False)
    if bias:
        yield Call("4x40.bias:none", _without_bias)


_LOWER = ("4x8", "3x17", "5x64", "4x1000")

DROPOUT_ADD_RMS_NORM = Oracle(
    forward=_forward(norm._rms_forward),
    backward=_backward(norm._rms_backward),
    calls=partial(_calls, bias=False),
    lower_precision=_LOWER,
)
DROPOUT_ADD_LAYER_NORM = Oracle(
    forward=_forward(norm._layer_forward),
    backward=_backward(norm._layer_backward),
    calls=partial(_calls, bias=True),
    lower_precision=_LOWER,
)
