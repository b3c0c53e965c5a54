"""Normalisation over the last dim: rms_norm, layer_norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
from anychip.operators.extents import Needs, batch_dims, nbytes


def _check(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> None:
    hidden = x.shape[-1] if x.dim() else None
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.dim() != 1 or tensor.shape[0] != hidden):
            raise ValueError(
                f"{name} must have shape ({hidden},), the last dim of x {tuple(x.shape)}; "
                f"got {tuple(tensor.shape)}"
            )


def sizes(x: Tensor, *_: Tensor | None, **__: float) -> dict[str, int]:
    hidden = x.shape[-1]
    return {"hidden": hidden, "rows": x.numel() // hidden if hidden else 0}


def _length(x: Tensor, *_: object, **__: object) -> int:
    return x.shape[-1]


def _samples(maker: SampleMaker, *, bias: bool) -> Iterator[Sample]:
    for shape in ((4, 8), (2, 3, 17), (1, 64), (5, 1000)):
        weights = [maker.normal(shape[-1]) for _ in range(2 if bias else 1)]
        yield Sample((maker.normal(*shape), *weights), {"eps": 1e-5}, "x".join(map(str, shape)))


def _column_sum(values: Tensor) -> Tensor:
    # Not reshape(-1, H), which cannot tell the number of rows when H is 0.
    return values.unsqueeze(0).flatten(0, -2).sum(0)


def shards(residuals: int, rows: int = 1) -> Sharding:
    """Over the dims of rows.

    Args:
        residuals: of the norm, which has as many weights.
        rows: arguments of x's shape: x, and a residual's stream; so many outputs are as well.
    """

    def forward(x: Tensor, *rest: Any) -> Placements:
        weights = [None for given in rest[rows - 1 : -1] if given is not None]
        return [([d] * (rows + residuals), [*[d] * rows, *weights]) for d in batch_dims(x)]

    def backward(grad: Tensor, *_: object) -> Placements:
        # From gradients of y and of the sum, what was normed, the weight and the residuals.
        sums: list[Placement] = ["partial"] * residuals
        return [
            ([*[d] * rows, *sums], [*[d] * (rows + 1), None, *[d] * residuals])
            for d in batch_dims(grad)
        ]

    return Sharding(forward, backward)


# rms_norm


def _rms_forward(x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = (wide * rstd * weight.float()).to(x.dtype)
    return y.contiguous(), rstd.squeeze(-1).contiguous()


def _rms_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *, eps: float, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    normed = x.float() * rstd.unsqueeze(-1)
    dx = dweight = None
    if needs[0]:
        scaled = grad.float() * weight.float()
        mean = (scaled * normed).mean(-1, keepdim=True)
        dx = ((scaled - normed * mean) * rstd.unsqueeze(-1)).to(x.dtype)
    if needs[1]:
        dweight = _column_sum(grad.float() * normed).to(weight.dtype)
    return dx, dweight


def _rms_fake(x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.shape[:-1], dtype=torch.float32)


rms_norm = OperatorSpec(
    name="rms_norm",
    signature="(Tensor x, Tensor weight, *, float eps=1e-06) -> Tensor",
    equation="y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2, last dim) + eps)",
    source="Zhang and Sennrich 2019, arXiv:1910.07467, equation 4",
    forward=_rms_forward,
    backward=_rms_backward,
    fake=_rms_fake,
    residuals=(Residual("rstd", "x.shape[:-1]", "float32"),),
    saved=("x", "weight", "rstd"),
    differentiable=("x", "weight"),
    check=_check,
    sizes=sizes,
    sharding=shards(residuals=1),
    cost=lambda x, weight, *, eps: Cost(2 * nbytes(x) + nbytes(weight), 4 * x.numel()),
    backward_cost=lambda x, weight, *, eps: Cost(3 * nbytes(x) + 2 * nbytes(weight), 9 * x.numel()),
    samples=lambda maker: _samples(maker, bias=False),
    bound=Bound(forward=6, backward=10, length=_length),
)


# layer_norm


def _layer_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = centred * rstd * weight.float()
    if bias is not None:
        y = y + bias.float()
    return (
        y.to(x.dtype).contiguous(),
        mean.squeeze(-1).contiguous(),
        rstd.squeeze(-1).contiguous(),
    )


def _layer_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, *, eps: float, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    normed = (x.float() - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    dx = dweight = dbias = None
    if needs[0]:
        scaled = grad.float() * weight.float()
        projected = normed * (scaled * normed).mean(-1, keepdim=True)
        centred = scaled - scaled.mean(-1, keepdim=True) - projected
        dx = (centred * rstd.unsqueeze(-1)).to(x.dtype)
    if needs[1]:
        dweight = _column_sum(grad.float() * normed).to(weight.dtype)
    if needs[2]:
        dbias = _column_sum(grad.float()).to(weight.dtype)
    return dx, dweight, dbias


def _layer_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd = _rms_fake(x, weight, eps=eps)
    return y, torch.empty_like(rstd), rstd


layer_norm = OperatorSpec(
    name="layer_norm",
    signature="(Tensor x, Tensor weight, Tensor? bias=None, *, float eps=1e-05) -> Tensor",
    equation="y = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(mean((x - mean)^2) + eps)",
    source="Ba, Kiros and Hinton 2016, arXiv:1607.06450, equation 4",
    forward=_layer_forward,
    backward=_layer_backward,
    fake=_layer_fake,
    residuals=(
        Residual("mean", "x.shape[:-1]", "float32"),
        Residual("rstd", "x.shape[:-1]", "float32"),
    ),
    saved=("x", "weight", "mean", "rstd"),
    shaped_like={"bias": "weight"},
    restore=lambda x, weight, *, eps: _layer_forward(x, weight, None, eps=eps)[1:],
    differentiable=("x", "weight", "bias"),
    check=_check,
    sizes=sizes,
    sharding=shards(residuals=2),
    cost=lambda x, weight, bias, *, eps: Cost(2 * nbytes(x) + nbytes(weight, bias), 7 * x.numel()),
    backward_cost=lambda x, weight, bias, *, eps: Cost(
        3 * nbytes(x) + 2 * nbytes(weight, bias), 12 * x.numel()
    ),
    samples=lambda maker: _samples(maker, bias=True),
    bound=Bound(forward=10, backward=16, length=_length),
)
