"""The norms of a residual stream: add_rms_norm, add_layer_norm.

The sum is rounded to the residual's dtype, and what is normed is the sum as stored: the result is
that of an addition followed by the norm, and the backward starts from the stored sum alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from anychip.contract import (
    Bound,
    Cost,
    OperatorSpec,
    Placement,
    Placements,
    Residual,
    Sample,
    SampleMaker,
    Sharding,
)
from anychip.operators.norm import layer_norm, rms_norm

Needs = tuple[bool, ...]


def _check(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float
) -> None:
    if residual.shape != x.shape:
        raise ValueError(
            f"residual must have the shape of x {tuple(x.shape)}, got {tuple(residual.shape)}"
        )
    assert layer_norm.check is not None
    layer_norm.check(x, weight, bias, eps=eps)


def _sizes(x: Tensor, *_: Tensor | None, eps: float) -> dict[str, int]:
    hidden = x.shape[-1]
    return {"hidden": hidden, "rows": x.numel() // hidden if hidden else 0}


def _bytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _batch_dims(x: Tensor) -> range:
    return range(x.dim() - 1)


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


def _both_gradients(
    dnorm: Tensor | None, grad: Tensor, dtotal: Tensor, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and residual: one number, in the dtypes of y and of the sum, not one tensor.

    ``dtotal`` is what arrives at the sum from the next block, and has the residual's dtype.
    """
    if dnorm is None:
        return None, None
    total = dnorm + dtotal.float()
    return (
        total.to(grad.dtype) if needs[0] else None,
        total.to(dtotal.dtype, copy=True) if needs[1] else None,
    )


def _rms_forward(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = _stored_sum(x, residual)
    y, rstd = rms_norm.forward(total.float(), weight, eps=eps)
    return y.to(x.dtype), total, rstd


def _rms_backward(
    grad: Tensor,
    dtotal: Tensor,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    eps: float,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    assert rms_norm.backward is not None
    inner = (needs[0] or needs[1], needs[2])
    dnorm, dweight = rms_norm.backward(grad, total.float(), weight, rstd, eps=eps, needs=inner)
    return *_both_gradients(dnorm, grad, dtotal, needs), dweight


def _rms_fake(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd = rms_norm.fake(x, weight, eps=eps)
    return y, torch.empty_like(residual, memory_format=torch.contiguous_format), rstd


def _rms_shards(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Placements:
    return [([d, d, d], [d, d, None]) for d in _batch_dims(x)]


def _rms_backward_shards(
    grad: Tensor,
    dtotal: Tensor,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    eps: float,
    needs: list[bool],
) -> Placements:
    return [([d, d, "partial"], [d, d, d, None, d]) for d in _batch_dims(grad)]


add_rms_norm = OperatorSpec(
    name="add_rms_norm",
    signature=(
        "(Tensor x, Tensor residual, Tensor weight, *, float eps=1e-06) -> (Tensor, Tensor)"
    ),
    equation="sum = x + residual in residual's dtype; y = rms_norm(sum, weight)",
    source="Zhang and Sennrich 2019, arXiv:1910.07467, equation 4; He et al. 2016 (residual)",
    forward=_rms_forward,
    backward=_rms_backward,
    fake=_rms_fake,
    residuals=(Residual("rstd", "x.shape[:-1]", "float32"),),
    saved=("y1", "weight", "rstd"),
    restore=lambda total, weight, *, eps: rms_norm.forward(total.float(), weight, eps=eps)[1],
    shaped_like={"x": "grad0", "residual": "y1"},
    differentiable=("x", "residual", "weight"),
    check=_check,
    sizes=_sizes,
    sharding=Sharding(_rms_shards, _rms_backward_shards),
    cost=lambda x, residual, weight, *, eps: Cost(
        2 * _bytes(x, residual) + _bytes(weight), 5 * x.numel()
    ),
    backward_cost=lambda x, residual, weight, *, eps: Cost(
        2 * _bytes(x) + 3 * _bytes(residual) + 2 * _bytes(weight), 10 * x.numel()
    ),
    aten=frozenset({"mul", "mean", "rsqrt", "sum", "add", "sub", "pow", "_to_copy"}),
    samples=lambda maker: _samples(maker, bias=False),
    bound=Bound(forward=8, backward=12, length=rms_norm.bound.length),
)


def _layer_forward(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = _stored_sum(x, residual)
    y, mean, rstd = layer_norm.forward(total.float(), weight, bias, eps=eps)
    return y.to(x.dtype), total, mean, rstd


def _layer_backward(
    grad: Tensor,
    dtotal: Tensor,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    eps: float,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    assert layer_norm.backward is not None
    inner = (needs[0] or needs[1], needs[2], needs[3])
    wide = total.float()
    dnorm, dweight, dbias = layer_norm.backward(
        grad, wide, weight, mean, rstd, eps=eps, needs=inner
    )
    return *_both_gradients(dnorm, grad, dtotal, needs), dweight, dbias


def _layer_fake(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, total, rstd = _rms_fake(x, residual, weight, eps=eps)
    return y, total, torch.empty_like(rstd), rstd


def _layer_shards(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> Placements:
    replicated: list[Placement] = [None] if bias is None else [None, None]
    return [([d, d, d, d], [d, d, *replicated]) for d in _batch_dims(x)]


def _layer_backward_shards(
    grad: Tensor,
    dtotal: Tensor,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    needs: list[bool],
) -> Placements:
    return [([d, d, "partial", "partial"], [d, d, d, None, d, d]) for d in _batch_dims(grad)]


add_layer_norm = OperatorSpec(
    name="add_layer_norm",
    signature=(
        "(Tensor x, Tensor residual, Tensor weight, Tensor? bias=None, *, float eps=1e-05) -> "
        "(Tensor, Tensor)"
    ),
    equation="sum = x + residual in residual's dtype; y = layer_norm(sum, weight, bias)",
    source="Ba, Kiros and Hinton 2016, arXiv:1607.06450, equation 4; He et al. 2016 (residual)",
    forward=_layer_forward,
    backward=_layer_backward,
    fake=_layer_fake,
    residuals=(
        Residual("mean", "x.shape[:-1]", "float32"),
        Residual("rstd", "x.shape[:-1]", "float32"),
    ),
    saved=("y1", "weight", "mean", "rstd"),
    restore=lambda total, weight, *, eps: layer_norm.forward(total.float(), weight, None, eps=eps)[
        1:
    ],
    shaped_like={"x": "grad0", "residual": "y1"},
    differentiable=("x", "residual", "weight", "bias"),
    check=_check,
    sizes=_sizes,
    sharding=Sharding(_layer_shards, _layer_backward_shards),
    cost=lambda x, residual, weight, bias, *, eps: Cost(
        2 * _bytes(x, residual) + _bytes(weight, bias), 8 * x.numel()
    ),
    backward_cost=lambda x, residual, weight, bias, *, eps: Cost(
        2 * _bytes(x) + 3 * _bytes(residual) + 2 * _bytes(weight, bias), 13 * x.numel()
    ),
    aten=frozenset({"mul", "mean", "rsqrt", "sum", "add", "sub", "pow", "_to_copy"}),
    samples=lambda maker: _samples(maker, bias=True),
    bound=Bound(forward=12, backward=18, length=rms_norm.bound.length),
)
