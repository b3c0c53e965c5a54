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
from anychip.conformance.calls import Arguments, Call, Draw
from anychip.conformance.formats import FP32
from anychip.conformance.labels import Labels
from anychip.conformance.oracles import dropout, norm
from anychip.conformance.oracles.dropout import Numbers
from anychip.conformance.oracles.oracle import Answer, Gradients, differentiable


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


def _after_dropout(normed: norm.Norm) -> norm.Norm:
    """Of the norm of the sum of what is kept and a residual."""

    def answer(
        x: Rounded,
        residual: Rounded,
        weight: Rounded,
        rng: Numbers,
        *bias_and_rows: Any,
        p: float,
        eps: float,
    ) -> Answer:
        *bias, rows = bias_and_rows
        total = _stored_sum(x, residual, rng, rows, p)
        results, of_sum = norm.of_sum(normed, total, weight, *bias, eps=eps)

        def backward(*grads: Rounded) -> Gradients:
            both, *rest = of_sum(*grads)
            assert both is not None
            return dropout._scaled(both, rng, rows, p=p, width=x.shape[-1]), *rest

        return results, backward

    return answer


def _with_rng(draw: Draw, arguments: Arguments, p: float, offset: int = 5) -> Arguments:
    """A call of the norm of a residual's sum, with dropout."""
    (x, residual, weight, *bias), attrs = arguments
    return (x, residual, weight, draw.rng(1234, offset), *bias), {"p": p, **attrs}


def _normal(
    draw: Draw, shape: tuple[int, ...], *, p: float = 0.2, offset: int = 5, **options: Any
) -> Arguments:
    return _with_rng(draw, norm._add_normal(draw, shape, **options), p, offset)


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


def _calls(*, bias: bool) -> Iterator[Call]:
    labels = Labels({**dropout.LABELS.words, **norm.LABELS.words, "rows": {},
                     "rows:far": {"rows": dropout.FAR}})  # fmt: skip
    make, part = partial(_normal, bias=bias), partial(_in_whole, bias=bias)
    yield from labels(make, """0x8 1x1 5 4x8 3x17 2x3x33 5x64 70x48 4x1000 3x0 11x40.p:0
        11x40.p:0.5 11x40.p:1 11x40.p:0.999999046 4x40.eps:0.5 8x33.carry
        6x96.residual:fp32""")  # fmt: skip
    yield from labels(part, "5.rows 4x17.rows 2x3x64.rows 6x40.rows:far")
    yield Call("5x40.cancel", partial(_cancelling, bias=bias), statistical=False)
    for value in ("nan", "inf"):
        special = partial(_special, value=float(value), bias=bias)
        yield Call(f"6x24.{value}", special, statistical=False, gradient=False)
    if bias:
        yield from labels(partial(make, p=0.3), "4x40.bias:none")


_LOWER = ("4x8", "3x17", "5x64", "4x1000")

DROPOUT_ADD_RMS_NORM = differentiable(
    _after_dropout(norm.rms), partial(_calls, bias=False), *_LOWER
)
DROPOUT_ADD_LAYER_NORM = differentiable(
    _after_dropout(norm.layer), partial(_calls, bias=True), *_LOWER
)
