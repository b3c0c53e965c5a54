"""Norms of a residual stream to which a dropped x is added: dropout_add_rms_norm, ..._layer_norm.

The sum is that of bias_dropout_add: rounded once, to the residual's dtype. What is normed is the
sum as stored, as in add_rms_norm, so the backward starts from the stored sum and the stream's
numbers. ``rows`` are those of dropout; a row is whole, so that nothing else need be said of it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anychip.contract import (
    Bound,
    Cost,
    OperatorSpec,
    Placement,
    Placements,
    Sample,
    SampleMaker,
    Sharding,
)
from anychip.contract.operator import Function
from anychip.operators.add_norm import add_layer_norm, add_rms_norm, both_gradients
from anychip.operators.dropout import bias_dropout_add, dropout, need_index
from anychip.operators.extents import Needs, batch_dims, nbytes
from anychip.operators.norm import layer_norm, rms_norm, sizes


def _check(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    rng: Tensor,
    *bias_and_rows: Tensor | None,
    p: float,
    eps: float,
) -> None:
    assert add_layer_norm.check is not None
    assert dropout.check is not None
    *bias, rows = bias_and_rows
    add_layer_norm.check(x, residual, weight, *bias, eps=eps)
    dropout.check(x, rng, rows, p=p, width=0 if rows is None else x.shape[-1])


def _samples(maker: SampleMaker, *, bias: bool) -> Iterator[Sample]:
    for shape, p in (((4, 8), 0.1), ((2, 3, 17), 0.5), ((5, 1000), 0.0), ((3, 24), 1.0)):
        args = [maker.normal(*shape), maker.normal(*shape), maker.normal(shape[-1])]
        args += [maker.rng(seed=1234, offset=5), *([maker.normal(shape[-1])] if bias else [])]
        label = f"{'x'.join(map(str, shape))},p={p}"
        yield Sample((*args, None), {"p": p, "eps": 1e-5}, label)
    x, residual = maker.normal(3, 24), maker.normal(3, 24, dtype=torch.float32)
    args = [x, residual, maker.normal(24), maker.rng(seed=4, offset=2**32 - 3)]
    args += [maker.normal(24)] if bias else []
    yield Sample((*args, None), {"p": 0.3, "eps": 1e-5}, "3x24,residual=float32")
    yield Sample((*args, maker.integers(50, 3)), {"p": 0.3, "eps": 1e-5}, "3x24,rows")


def _forward(norm: OperatorSpec) -> Function:
    def forward(
        x: Tensor, residual: Tensor, weight: Tensor, rng: Tensor, *more: Any, p: float, eps: float
    ) -> tuple[Tensor, ...]:
        *bias, rows = more
        total = bias_dropout_add.forward(x, residual, rng, None, rows, p=p, width=x.shape[-1])
        y, *kept = norm.forward(total.float(), weight, *bias, eps=eps)
        return y.to(x.dtype), total, *kept

    return forward


def _backward(norm: OperatorSpec) -> Function:
    def backward(
        grad: Tensor, dtotal: Tensor, total: Tensor, weight: Tensor, rng: Tensor,
        rows: Tensor | None, *kept: Tensor, p: float, eps: float, needs: Needs,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        assert norm.backward is not None
        inner = (needs[0] or needs[1], *needs[2:])
        dnorm, *rest = norm.backward(grad, total.float(), weight, *kept, eps=eps, needs=inner)
        dropped = partial(dropout.forward, rng=rng, rows=rows, p=p, width=grad.shape[-1])
        return *both_gradients(dnorm, grad, dtotal, needs, dropped), *rest

    return backward


def _fake(inner: OperatorSpec) -> Function:
    return lambda x, residual, weight, rng, *more, p, eps: inner.fake(
        x, residual, weight, *more[:-1], eps=eps
    )


def _shards(operator: str, residuals: int) -> Sharding:
    """Over the dims of rows. residuals: of the norm, which has as many weights."""

    def forward(x: Tensor, residual: Tensor, weight: Tensor, rng: Tensor, *more: Any) -> Placements:
        rows = more[residuals - 1]  # after the bias, where there is one
        need_index(operator, "rows", rows)
        small = [None for given in (weight, rng, *more[: residuals - 1]) if given is not None]
        return [([d] * (2 + residuals), [d, d, *small, d]) for d in batch_dims(x)]

    def backward(
        grad: Tensor, dtotal: Tensor, total: Tensor, weight: Tensor, rng: Tensor, *more: Any
    ) -> Placements:
        need_index(operator, "rows", more[0])
        sums: list[Placement] = ["partial"] * residuals
        return [
            ([d, d, *sums], [d, d, d, None, None, *[d] * (1 + residuals)]) for d in batch_dims(grad)
        ]

    return Sharding(forward, backward)


dropout_add_rms_norm = OperatorSpec(
    name="dropout_add_rms_norm",
    signature=(
        "(Tensor x, Tensor residual, Tensor weight, Tensor rng, Tensor? rows=None, *, "
        "float p=0.5, float eps=1e-06) -> (Tensor, Tensor)"),
    equation=(
        "sum = residual + dropout(x, rng, rows, p, width=H) in residual's dtype; "
        "y = rms_norm(sum, weight)"),
    source="Srivastava et al. 2014, JMLR 15; Zhang and Sennrich 2019, arXiv:1910.07467, equation 4",
    forward=_forward(rms_norm), backward=_backward(rms_norm), fake=_fake(add_rms_norm),
    residuals=rms_norm.residuals, saved=("y1", "weight", "rng", "rows", "rstd"),
    restore=lambda total, weight, rng, rows, *, p, eps: rms_norm.forward(
        total.float(), weight, eps=eps)[1],
    shaped_like={"x": "grad0", "residual": "y1"}, differentiable=("x", "residual", "weight"),
    check=_check, fixed_dtypes={"rng": "int64", "rows": "int64"}, sizes=sizes,
    sharding=_shards("dropout_add_rms_norm", residuals=1),
    cost=lambda x, residual, weight, rng, rows=None, **_: Cost(
        2 * nbytes(x, residual) + nbytes(weight, rows), 35 * x.numel()),
    backward_cost=lambda x, residual, weight, rng, rows=None, **_: Cost(
        2 * nbytes(x) + 3 * nbytes(residual) + 2 * nbytes(weight) + nbytes(rows), 40 * x.numel()),
    samples=lambda maker: _samples(maker, bias=False),
    bound=Bound(forward=10, backward=13, length=rms_norm.bound.length), random=True,
)  # fmt: skip


dropout_add_layer_norm = OperatorSpec(
    name="dropout_add_layer_norm",
    signature=(
        "(Tensor x, Tensor residual, Tensor weight, Tensor rng, Tensor? bias=None, "
        "Tensor? rows=None, *, float p=0.5, float eps=1e-05) -> (Tensor, Tensor)"),
    equation=(
        "sum = residual + dropout(x, rng, rows, p, width=H) in residual's dtype; "
        "y = layer_norm(sum, weight, bias)"),
    source="Srivastava et al. 2014, JMLR 15; Ba, Kiros and Hinton 2016, arXiv:1607.06450, "
    "equation 4",
    forward=_forward(layer_norm), backward=_backward(layer_norm), fake=_fake(add_layer_norm),
    residuals=layer_norm.residuals, saved=("y1", "weight", "rng", "rows", "mean", "rstd"),
    restore=lambda total, weight, rng, rows, *, p, eps: layer_norm.forward(
        total.float(), weight, None, eps=eps)[1:],
    shaped_like={"x": "grad0", "residual": "y1", "bias": "weight"},
    differentiable=("x", "residual", "weight", "bias"), check=_check,
    fixed_dtypes={"rng": "int64", "rows": "int64"}, sizes=sizes,
    sharding=_shards("dropout_add_layer_norm", residuals=2),
    cost=lambda x, residual, weight, rng, bias, rows=None, **_: Cost(
        2 * nbytes(x, residual) + nbytes(weight, bias, rows), 38 * x.numel()),
    backward_cost=lambda x, residual, weight, rng, bias, rows=None, **_: Cost(
        2 * nbytes(x) + 3 * nbytes(residual) + 2 * nbytes(weight, bias) + nbytes(rows),
        43 * x.numel()),
    samples=lambda maker: _samples(maker, bias=True),
    bound=Bound(forward=14, backward=19, length=rms_norm.bound.length), random=True,
)  # fmt: skip
