"""Wrong backends whose mistake is in dropout_add_rms_norm or dropout_add_layer_norm."""

from typing import Any

import torch
from torch import Tensor

from anychip import operators
from tests.meta.honest import Row
from tests.meta.wrong import Attr, wrong, wrong_arguments, wrong_backward, wrong_gradients


@wrong("norm-of-the-undropped-sum", "two ways to the same number", operator="dropout_add_rms_norm")
def norms_another_sum(row: Row, x: Tensor, *rest: Tensor, p: float, eps: float) -> Any:
    y, _, rstd = row(x, *rest, p=0.0, eps=eps)
    return y, row(x, *rest, p=p, eps=eps)[1], rstd


@wrong(
    "dropped-x-rounded-before-the-sum", "a rounding too many", operator="dropout_add_layer_norm",
    select="dropout_add_layer_norm and bf16", dtypes=frozenset({torch.bfloat16, torch.float32}),
)  # fmt: skip
def rounds_twice(
    row: Row, x: Tensor, residual: Tensor, weight: Tensor, rng: Tensor, *rest: Any, **attrs: Attr
) -> Any:
    dropped = operators.dropout.forward(x, rng, rest[1], p=attrs["p"], width=x.shape[-1])
    return row(dropped, residual, weight, rng, *rest, p=0.0, eps=attrs["eps"])


@wrong("mask-anew-in-every-row", "an index of the row", operator="dropout_add_layer_norm")
def row_by_row(
    row: Row, x: Tensor, residual: Tensor, weight: Tensor, rng: Tensor, *rest: Any, **attrs: Attr
) -> Any:
    scale = operators.dropout.forward(torch.ones(x.shape[-1]), rng, p=attrs["p"])
    return row(x * scale.to(x.dtype), residual, weight, rng, *rest, p=0.0, eps=attrs["eps"])


@wrong_backward(
    "gradient-of-x-not-dropped", "mask forgotten in the backward", operator="dropout_add_rms_norm"
)
def keeps_all(row: Row, *args: Tensor, p: float, eps: float, needs: Any) -> Any:
    dx, *others = row(*args, p=0.0, eps=eps, needs=needs)
    return dx, *others


@wrong_backward(
    "gradient-of-the-stream-dropped", "mask at the wrong place", operator="dropout_add_rms_norm"
)
def drops_both(row: Row, *args: Tensor, needs: Any, **attrs: Attr) -> Any:
    dx, _, dweight = row(*args, needs=(True, True, needs[2]), **attrs)
    return (dx if needs[0] else None), (dx.to(args[1].dtype) if needs[1] else None), dweight


@wrong_backward(
    "stream-not-in-the-gradient-of-x", "missing term of a derivative",
    operator="dropout_add_layer_norm",
)  # fmt: skip
def x_of_the_norm_only(row: Row, grad: Tensor, dtotal: Tensor, *saved: Any, **attrs: Attr) -> Any:
    _, *others = row(grad, dtotal, *saved, **attrs)
    dx, *_ = row(grad, torch.zeros_like(dtotal), *saved, **attrs)
    return dx, *others


ARGUMENTS = (
    wrong_gradients("gradient-dropped-but-not-scaled", "missing factor", "dropout_add_layer_norm",
        dx=lambda dx, p: dx * (1.0 - p)),
    wrong_arguments("sum-dropped-whole", "an argument at the wrong place", "dropout_add_rms_norm",
        x=lambda x, residual: x + residual, residual=lambda residual: torch.zeros_like(residual)),
)  # fmt: skip
