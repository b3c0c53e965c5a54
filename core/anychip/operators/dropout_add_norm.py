"""Norms of a residual stream to which a dropped x is added: dropout_add_rms_norm, ..._layer_norm.

The sum is that of bias_dropout_add: rounded once, to the residual's dtype. What is normed is the
sum as stored, as in add_rms_norm, so the backward starts from the stored sum and the stream's
numbers. No sharding: a shard does not know its elements' index in the whole tensor, which the mask
depends on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Sample, SampleMaker
from anychip.contract.operator import Function
from anychip.operators.add_norm import add_layer_norm, add_rms_norm
from anychip.operators.dropout import bias_dropout_add, dropout
from anychip.operators.extents import Needs, nbytes
from anychip.operators.norm import layer_norm, rms_norm, sizes


def _check(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    rng: Tensor,
    bias: Tensor | None = None,
    *,
    p: float,
    eps: float,
) -> None:
    assert add_layer_norm.check is not None
    assert dropout.check is not None
    add_layer_norm.check(x, residual, weight, bias, eps=eps)
    dropout.check(x, rng, p=p)


def _samples(maker: SampleMaker, *, bias: bool) -> Iterator[Sample]:
    for shape, p in (((4, 8), 0.1), ((2, 3, 17), 0.5), ((5, 1000), 0.0), ((3, 24), 1.0)):
        args = [maker.normal(*shape), maker.normal(*shape), maker.normal(shape[-1])]
        args += [maker.rng(seed=1234, offset=5), *([maker.normal(shape[-1])] if bias else [])]
        label = f"{'x'.join(map(str, shape))},p={p}"
        yield Sample(tuple(args), {"p": p, "eps": 1e-5}, label)
    x, residual = maker.normal(3, 24), maker.normal(3, 24, dtype=torch.float32)
    args = [x, residual, maker.normal(24), maker.rng(seed=4, offset=2**32 - 3)]
    args += [maker.normal(24)] if bias else []
    yield Sample(tuple(args), {"p": 0.3, "eps": 1e-5}, "3x24,residual=float32")


def _stored_sum(x: Tensor, residual: Tensor, rng: Tensor, p: float) -> Tensor:
    total: Tensor = bias_dropout_add.forward(x, residual, rng, None, p=p)
    return total


def _both_gradients(
    dnorm: Tensor | None, grad: Tensor, dtotal: Tensor, rng: Tensor, p: float, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x, which is dropped as x was, and of the residual, in the dtypes of both.

    ``dtotal`` is what arrives at the sum from the next block, and has the residual's dtype.
    """
    if dnorm is None:
        return None, None
    total = dnorm + dtotal.float()
    return (
        dropout.forward(total, rng, p=p).to(grad.dtype) if needs[0] else None,
        total.to(dtotal.dtype, copy=True) if needs[1] else None,
    )


def _forward(norm: OperatorSpec) -> Function:
    def forward(
        x: Tensor, residual: Tensor, weight: Tensor, rng: Tensor, *bias: Any, p: float, eps: float
    ) -> tuple[Tensor, ...]:
        total = _stored_sum(x, residual, rng, p)
        y, *kept = norm.forward(total.float(), weight, *bias, eps=eps)
        return y.to(x.dtype), total, *kept

    return forward


def _backward(norm: OperatorSpec) -> Function:
    def backward(
        grad: Tensor,
        dtotal: Tensor,
        total: Tensor,
        weight: Tensor,
        rng: Tensor,
        *kept: Tensor,
        p: float,
        eps: float,
        needs: Needs,
    ) -> tuple[Tensor | None, ...]:
        assert norm.backward is not None
        inner = (needs[0] or needs[1], *needs[2:])
        dnorm, *rest = norm.backward(grad, total.float(), weight, *kept, eps=eps, needs=inner)
        return *_both_gradients(dnorm, grad, dtotal, rng, p, needs), *rest

    return backward


def _fake(inner: OperatorSpec) -> Function:
    def fake(
        x: Tensor, residual: Tensor, weight: Tensor, rng: Tensor, *bias: Any, p: float, eps: float
    ) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = inner.fake(x, residual, weight, *bias, eps=eps)
        return made

    return fake


dropout_add_rms_norm = OperatorSpec(
    name="dropout_add_rms_norm",
    signature=(
        "(Tensor x, Tensor residual, Tensor weight, Tensor rng, *, float p=0.5, float eps=1e-06)"
        " -> (Tensor, Tensor)"
    ),
    equation="sum = residual + dropout(x, rng, p) in residual's dtype; y = rms_norm(sum, weight)",
    source="Srivastava et al. 2014, JMLR 15; Zhang and Sennrich 2019, arXiv:1910.07467, equation 4",
    forward=_forward(rms_norm),
    backward=_backward(rms_norm),
    fake=_fake(add_rms_norm),
    residuals=rms_norm.residuals,
    saved=("y1", "weight", "rng", "rstd"),
    restore=lambda total, weight, rng, *, p, eps: rms_norm.forward(total.float(), weight, eps=eps)[
        1
    ],
    shaped_like={"x": "grad0", "residual": "y1"},
    differentiable=("x", "residual", "weight"),
    check=_check,
    fixed_dtypes={"rng": "int64"},
    sizes=sizes,
    cost=lambda x, residual, weight, rng, *, p, eps: Cost(
        2 * nbytes(x, residual) + nbytes(weight), 35 * x.numel()
    ),
    backward_cost=lambda x, residual, weight, rng, *, p, eps: Cost(
        2 * nbytes(x) + 3 * nbytes(residual) + 2 * nbytes(weight), 40 * x.numel()
    ),
    samples=lambda maker: _samples(maker, bias=False),
    bound=Bound(forward=10, backward=13, length=rms_norm.bound.length),
    random=True,
)


dropout_add_layer_norm = OperatorSpec(
    name="dropout_add_layer_norm",
    signature=(
        "(Tensor x, Tensor residual, Tensor weight, Tensor rng, Tensor? bias=None, *, "
        "float p=0.5, float eps=1e-05) -> (Tensor, Tensor)"
    ),
    equation=(
        "sum = residual + dropout(x, rng, p) in residual's dtype; y = layer_norm(sum, weight, bias)"
    ),
    source="Srivastava et al. 2014, JMLR 15; Ba, Kiros and Hinton 2016, arXiv:1607.06450, "
    "equation 4",
    forward=_forward(layer_norm),
    backward=_backward(layer_norm),
    fake=_fake(add_layer_norm),
    residuals=layer_norm.residuals,
    saved=("y1", "weight", "rng", "mean", "rstd"),
    restore=lambda total, weight, rng, *, p, eps: layer_norm.forward(
        total.float(), weight, None, eps=eps
    )[1:],
    shaped_like={"x": "grad0", "residual": "y1", "bias": "weight"},
    differentiable=("x", "residual", "weight", "bias"),
    check=_check,
    fixed_dtypes={"rng": "int64"},
    sizes=sizes,
    cost=lambda x, residual, weight, rng, bias, *, p, eps: Cost(
        2 * nbytes(x, residual) + nbytes(weight, bias), 38 * x.numel()
    ),
    backward_cost=lambda x, residual, weight, rng, bias, *, p, eps: Cost(
        2 * nbytes(x) + 3 * nbytes(residual) + 2 * nbytes(weight, bias), 43 * x.numel()
    ),
    samples=lambda maker: _samples(maker, bias=True),
    bound=Bound(forward=14, backward=19, length=rms_norm.bound.length),
    random=True,
)
