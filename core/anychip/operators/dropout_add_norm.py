"""Norms of a residual stream to which a dropped x is added: dropout_add_rms_norm, ..._layer_norm.

The sum is that of bias_dropout_add: rounded once, to the residual's dtype. What is normed is the
sum as stored, as in add_rms_norm, so the backward starts from the stored sum and the stream's
numbers. No sharding: a shard does not know its elements' index in the whole tensor, which the mask
depends on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Residual, Sample, SampleMaker
from anychip.operators.add_norm import add_layer_norm, add_rms_norm
from anychip.operators.dropout import bias_dropout_add, dropout
from anychip.operators.norm import layer_norm, rms_norm

Needs = tuple[bool, ...]


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


def _sizes(x: Tensor, *_: Tensor | None, p: float, eps: float) -> dict[str, int]:
    hidden = x.shape[-1]
    return {"hidden": hidden, "rows": x.numel() // hidden if hidden else 0}


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


def _rms_forward(
    x: Tensor, residual: Tensor, weight: Tensor, rng: Tensor, *, p: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = _stored_sum(x, residual, rng, p)
    y, rstd = rms_norm.forward(total.float(), weight, eps=eps)
    return y.to(x.dtype), total, rstd


def _rms_backward(
    grad: Tensor,
    dtotal: Tensor,
    total: Tensor,
    weight: Tensor,
    rng: Tensor,
    rstd: Tensor,
    *,
    p: float,
    eps: float,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    assert rms_norm.backward is not None
    inner = (needs[0] or needs[1], needs[2])
    dnorm, dweight = rms_norm.backward(grad, total.float(), weight, rstd, eps=eps, needs=inner)
    return *_both_gradients(dnorm, grad, dtotal, rng, p, needs), dweight


dropout_add_rms_norm = OperatorSpec(
    name="dropout_add_rms_norm",
    signature=(
        "(Tensor x, Tensor residual, Tensor weight, Tensor rng, *, float p=0.5, float eps=1e-06)"
        " -> (Tensor, Tensor)"
    ),
    equation="sum = residual + dropout(x, rng, p) in residual's dtype; y = rms_norm(sum, weight)",
    source="Srivastava et al. 2014, JMLR 15; Zhang and Sennrich 2019, arXiv:1910.07467, equation 4",
    forward=_rms_forward,
    backward=_rms_backward,
    fake=lambda x, residual, weight, rng, *, p, eps: add_rms_norm.fake(
        x, residual, weight, eps=eps
    ),
    residuals=(Residual("rstd", "x.shape[:-1]", "float32"),),
    saved=("y1", "weight", "rng", "rstd"),
    restore=lambda total, weight, rng, *, p, eps: rms_norm.forward(total.float(), weight, eps=eps)[
        1
    ],
    shaped_like={"x": "grad0", "residual": "y1"},
    differentiable=("x", "residual", "weight"),
    check=_check,
    fixed_dtypes={"rng": "int64"},
    sizes=_sizes,
    cost=lambda x, residual, weight, rng, *, p, eps: Cost(
        2 * (x.nbytes + residual.nbytes) + weight.nbytes, 35 * x.numel()
    ),
    backward_cost=lambda x, residual, weight, rng, *, p, eps: Cost(
        2 * x.nbytes + 3 * residual.nbytes + 2 * weight.nbytes, 40 * x.numel()
    ),
    aten=add_rms_norm.aten | bias_dropout_add.aten,
    samples=lambda maker: _samples(maker, bias=False),
    bound=Bound(forward=10, backward=13, length=rms_norm.bound.length),
    random=True,
)


def _layer_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    rng: Tensor,
    bias: Tensor | None,
    *,
    p: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = _stored_sum(x, residual, rng, p)
    y, mean, rstd = layer_norm.forward(total.float(), weight, bias, eps=eps)
    return y.to(x.dtype), total, mean, rstd


def _layer_backward(
    grad: Tensor,
    dtotal: Tensor,
    total: Tensor,
    weight: Tensor,
    rng: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    p: float,
    eps: float,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    assert layer_norm.backward is not None
    inner = (needs[0] or needs[1], needs[2], needs[3])
    dnorm, dweight, dbias = layer_norm.backward(
        grad, total.float(), weight, mean, rstd, eps=eps, needs=inner
    )
    return *_both_gradients(dnorm, grad, dtotal, rng, p, needs), dweight, dbias


def _bias_bytes(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.nbytes


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
    forward=_layer_forward,
    backward=_layer_backward,
    fake=lambda x, residual, weight, rng, bias, *, p, eps: add_layer_norm.fake(
        x, residual, weight, bias, eps=eps
    ),
    residuals=(
        Residual("mean", "x.shape[:-1]", "float32"),
        Residual("rstd", "x.shape[:-1]", "float32"),
    ),
    saved=("y1", "weight", "rng", "mean", "rstd"),
    restore=lambda total, weight, rng, *, p, eps: layer_norm.forward(
        total.float(), weight, None, eps=eps
    )[1:],
    shaped_like={"x": "grad0", "residual": "y1"},
    differentiable=("x", "residual", "weight", "bias"),
    check=_check,
    fixed_dtypes={"rng": "int64"},
    sizes=_sizes,
    cost=lambda x, residual, weight, rng, bias, *, p, eps: Cost(
        2 * (x.nbytes + residual.nbytes) + weight.nbytes + _bias_bytes(bias), 38 * x.numel()
    ),
    backward_cost=lambda x, residual, weight, rng, bias, *, p, eps: Cost(
        2 * x.nbytes + 3 * residual.nbytes + 2 * (weight.nbytes + _bias_bytes(bias)),
        43 * x.numel(),
    ),
    aten=add_layer_norm.aten | bias_dropout_add.aten,
    samples=lambda maker: _samples(maker, bias=True),
    bound=Bound(forward=14, backward=19, length=rms_norm.bound.length),
    random=True,
)
