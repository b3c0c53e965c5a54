"""Oracles of dropout_add_rms_norm and dropout_add_layer_norm.

Kept elements of x are x / (1 - p), where 1 / (1 - p) is one float32 number and the product is
rounded to float32. Their sum with the residual is then that of the operators without dropout: in a
16-bit type it is computed here bit for bit, and is an exact input of the norm; in float32 its two
roundings are part of the bound. The gradient of the sum is that of the residual, and dropped with
the same mask that of x.
"""

from typing import Any

import numpy as np

from anychip.conformance.arithmetic import Rounded
from anychip.conformance.formats import FP32
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
        x: Rounded, residual: Rounded, weight: Rounded, rng: Numbers, *bias_and_rows: Any, p: float,
        eps: float,
    ) -> Answer:  # fmt: skip
        *bias, rows = bias_and_rows
        total = _stored_sum(x, residual, rng, rows, p)
        results, of_sum = norm.of_sum(normed, total, weight, *bias, eps=eps)

        def backward(*grads: Rounded) -> Gradients:
            both, *rest = of_sum(*grads)
            assert both is not None
            return dropout._scaled(both, rng, rows, p=p, width=x.shape[-1]), *rest

        return results, backward

    return answer


DROPOUT_ADD_RMS_NORM = differentiable(_after_dropout(norm.rms))
DROPOUT_ADD_LAYER_NORM = differentiable(_after_dropout(norm.layer))
