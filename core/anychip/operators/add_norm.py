"""The norms of a residual stream: add_rms_norm, add_layer_norm.

The sum is rounded to the residual's dtype, and what is normed is the sum as stored: the result is
that of an addition followed by the norm, and the backward starts from the stored sum alone.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Sample, SampleMaker
from anychip.contract.operator import Function
from anychip.operators.extents import Needs, empty_like, nbytes
from anychip.operators.norm import layer_norm, rms_norm, shards, sizes


def _check(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float
) -> None:
    if residual.shape != x.shape:
        raise ValueError(
            f"residual must have the shape of x {tuple(x.shape)}, got {tuple(residual.shape)}"
        )
    assert layer_norm.check is not None
    layer_norm.check(x, weight, bias, eps=eps)


def _samples(maker: SampleMaker, *, bias: bool) -> Iterator[Sample]:
    for shape in ((4, 8), (2, 3, 17), (5, 1000)):
        x, residual = maker.normal(*shape), maker.normal(*shape)
        weights = [maker.normal(shape[-1]) for _ in range(2 if bias else 1)]
        yield Sample((x, residual, *weights), {"eps": 1e-5}, "x".join(map(str, shape)))
    x, residual = maker.normal(3, 24), maker.normal(3, 24, dtype=torch.float32)
    weights = [maker.normal(24) for _ in range(2 if bias else 1)]
    yield Sample((x, residual, *weights), {"eps": 1e-5}, "3x24,residual=float32")


def _stored_sum(x: Tensor, residual: Tensor) -> Tensor:
    return (x.float() + residual.float()).to(residual.dtype).contiguous()


def both_gradients(
    dnorm: Tensor | None, grad: Tensor, dtotal: Tensor, needs: Needs,
    dropped: Callable[[Tensor], Tensor] = lambda total: total,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x and residual: one number, in the dtypes of y and of the sum, not one tensor.

    ``dtotal`` is what arrives at the sum from the next block, and has the residual's dtype;
    ``dropped`` gives x's what dropout gave x.
    """
    if dnorm is None:
        return None, None
    total = dnorm + dtotal.float()
    dresidual = total.to(dtotal.dtype, copy=True) if needs[1] else None
    return (dropped(total).to(grad.dtype) if needs[0] else None), dresidual


def _forward(norm: OperatorSpec) -> Function:
    def forward(
        x: Tensor, residual: Tensor, *weights: Tensor | None, eps: float
    ) -> tuple[Tensor, ...]:
        total = _stored_sum(x, residual)
        y, *kept = norm.forward(total.float(), *weights, eps=eps)
        return y.to(x.dtype), total, *kept

    return forward


def _backward(norm: OperatorSpec) -> Function:
    def backward(
        grad: Tensor, dtotal: Tensor, total: Tensor, *saved: Tensor, eps: float, needs: Needs
    ) -> tuple[Tensor | None, ...]:
        assert norm.backward is not None
        inner = (needs[0] or needs[1], *needs[2:])
        dnorm, *rest = norm.backward(grad, total.float(), *saved, eps=eps, needs=inner)
        return *both_gradients(dnorm, grad, dtotal, needs), *rest

    return backward


def _fake(norm: OperatorSpec) -> Function:
    def fake(
        x: Tensor, residual: Tensor, *weights: Tensor | None, eps: float
    ) -> tuple[Tensor, ...]:
        y, *kept = norm.fake(x, *weights, eps=eps)
        return y, empty_like(residual), *kept

    return fake


add_rms_norm = OperatorSpec(
    name="add_rms_norm",
    signature=(
        "(Tensor x, Tensor residual, Tensor weight, *, float eps=1e-06) -> (Tensor, Tensor)"),
    equation="sum = x + residual in residual's dtype; y = rms_norm(sum, weight)",
    source="Zhang and Sennrich 2019, arXiv:1910.07467, equation 4; He et al. 2016 (residual)",
    forward=_forward(rms_norm), backward=_backward(rms_norm), fake=_fake(rms_norm),
    residuals=rms_norm.residuals, saved=("y1", "weight", "rstd"),
    restore=lambda total, weight, *, eps: rms_norm.forward(total.float(), weight, eps=eps)[1],
    shaped_like={"x": "grad0", "residual": "y1"}, differentiable=("x", "residual", "weight"),
    check=_check, sizes=sizes, sharding=shards(residuals=1, rows=2),
    cost=lambda x, residual, weight, *, eps: Cost(
        2 * nbytes(x, residual) + nbytes(weight), 5 * x.numel()),
    backward_cost=lambda x, residual, weight, *, eps: Cost(
        2 * nbytes(x) + 3 * nbytes(residual) + 2 * nbytes(weight), 10 * x.numel()),
    samples=lambda maker: _samples(maker, bias=False),
    bound=Bound(forward=8, backward=12, length=rms_norm.bound.length),
)  # fmt: skip


add_layer_norm = OperatorSpec(
    name="add_layer_norm",
    signature=(
        "(Tensor x, Tensor residual, Tensor weight, Tensor? bias=None, *, float eps=1e-05) -> "
        "(Tensor, Tensor)"),
    equation="sum = x + residual in residual's dtype; y = layer_norm(sum, weight, bias)",
    source="Ba, Kiros and Hinton 2016, arXiv:1607.06450, equation 4; He et al. 2016 (residual)",
    forward=_forward(layer_norm), backward=_backward(layer_norm), fake=_fake(layer_norm),
    residuals=layer_norm.residuals, saved=("y1", "weight", "mean", "rstd"),
    restore=lambda total, weight, *, eps: layer_norm.forward(
        total.float(), weight, None, eps=eps)[1:],
    shaped_like={"x": "grad0", "residual": "y1", "bias": "weight"},
    differentiable=("x", "residual", "weight", "bias"), check=_check, sizes=sizes,
    sharding=shards(residuals=2, rows=2),
    cost=lambda x, residual, weight, bias, *, eps: Cost(
        2 * nbytes(x, residual) + nbytes(weight, bias), 8 * x.numel()),
    backward_cost=lambda x, residual, weight, bias, *, eps: Cost(
        2 * nbytes(x) + 3 * nbytes(residual) + 2 * nbytes(weight, bias), 13 * x.numel()),
    samples=lambda maker: _samples(maker, bias=True),
    bound=Bound(forward=12, backward=18, length=rms_norm.bound.length),
)  # fmt: skip
