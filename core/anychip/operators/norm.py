"""Normalisation over the last dim: rms_norm, layer_norm; over groups of channels: group_norm."""

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
    name="rms_norm", signature="(Tensor x, Tensor weight, *, float eps=1e-06) -> Tensor",
    equation="y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2, last dim) + eps)",
    source="Zhang and Sennrich 2019, arXiv:1910.07467, equation 4",
    forward=_rms_forward, backward=_rms_backward, fake=_rms_fake,
    residuals=(Residual("rstd", "x.shape[:-1]", "float32"),), saved=("x", "weight", "rstd"),
    differentiable=("x", "weight"), check=_check, sizes=sizes, sharding=shards(residuals=1),
    cost=lambda x, weight, *, eps: Cost(2 * nbytes(x) + nbytes(weight), 4 * x.numel()),
    backward_cost=lambda x, weight, *, eps: Cost(3 * nbytes(x) + 2 * nbytes(weight), 9 * x.numel()),
    samples=lambda maker: _samples(maker, bias=False),
    bound=Bound(forward=6, backward=10, length=_length),
)  # fmt: skip


# layer_norm


def _standardised(wide: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of mean 0 and variance 1 over the last dim; the mean and 1 over the deviation."""
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * rstd, mean, rstd


def _standardised_gradient(scaled: Tensor, normed: Tensor, rstd: Tensor) -> Tensor:
    projected = normed * (scaled * normed).mean(-1, keepdim=True)
    return (scaled - scaled.mean(-1, keepdim=True) - projected) * rstd


def _layer_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    normed, mean, rstd = _standardised(x.float(), eps)
    y = normed * weight.float()
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
        dx = _standardised_gradient(scaled, normed, rstd.unsqueeze(-1)).to(x.dtype)
    if needs[1]:
        dweight = _column_sum(grad.float() * normed).to(weight.dtype)
    if needs[2]:
        dbias = _column_sum(grad.float()).to(weight.dtype)
    return dx, dweight, dbias


def _layer_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd = _rms_fake(x, weight, eps=eps)
    return y, rstd.new_empty(rstd.shape), rstd


layer_norm = OperatorSpec(
    name="layer_norm",
    signature="(Tensor x, Tensor weight, Tensor? bias=None, *, float eps=1e-05) -> Tensor",
    equation="y = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(mean((x - mean)^2) + eps)",
    source="Ba, Kiros and Hinton 2016, arXiv:1607.06450, equation 4",
    forward=_layer_forward, backward=_layer_backward, fake=_layer_fake,
    residuals=(
        Residual("mean", "x.shape[:-1]", "float32"), Residual("rstd", "x.shape[:-1]", "float32")),
    saved=("x", "weight", "mean", "rstd"), shaped_like={"bias": "weight"},
    restore=lambda x, weight, *, eps: _layer_forward(x, weight, None, eps=eps)[1:],
    differentiable=("x", "weight", "bias"), check=_check, sizes=sizes, sharding=shards(residuals=2),
    cost=lambda x, weight, bias, *, eps: Cost(2 * nbytes(x) + nbytes(weight, bias), 7 * x.numel()),
    backward_cost=lambda x, weight, bias, *, eps: Cost(
        3 * nbytes(x) + 2 * nbytes(weight, bias), 12 * x.numel()),
    samples=lambda maker: _samples(maker, bias=True),
    bound=Bound(forward=10, backward=16, length=_length),
)  # fmt: skip


# group_norm


def _grouped(x: Tensor, num_groups: int) -> Tensor:
    """(N, C, ...) as (N, groups, numbers of a group)."""
    return x.float().reshape(x.shape[0], num_groups, _group_size(x, num_groups))


def _group_size(x: Tensor, num_groups: int) -> int:
    return x.shape[1:].numel() // num_groups


def by_channel(x: Tensor, values: Tensor) -> Tensor:
    """(C,) in float32, as it goes with x."""
    return values.float().reshape(-1, *[1] * (x.dim() - 2))


def channel_sum(values: Tensor) -> Tensor:
    """Over all dims but the second."""
    # Of a view of few numbers torch sums in another order.
    return values.transpose(0, 1).flatten(1).contiguous().sum(1)


def _group_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, num_groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    normed, mean, rstd = _standardised(_grouped(x, num_groups), eps)
    y = normed.reshape(x.shape) * by_channel(x, weight)
    if bias is not None:
        y = y + by_channel(x, bias)
    return y.to(x.dtype).contiguous(), mean.squeeze(-1), rstd.squeeze(-1)


def _group_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, *, num_groups: int,
    eps: float, needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    normed = (_grouped(x, num_groups) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    dx = dweight = dbias = None
    if needs[0]:
        scaled = _grouped(grad.float() * by_channel(x, weight), num_groups)
        found = _standardised_gradient(scaled, normed, rstd.unsqueeze(-1))
        dx = found.reshape(x.shape).to(x.dtype)
    if needs[1]:
        dweight = channel_sum(grad.float() * normed.reshape(x.shape)).to(weight.dtype)
    if needs[2]:
        dbias = channel_sum(grad.float()).to(weight.dtype)
    return dx, dweight, dbias


def _group_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, num_groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    mean = x.new_empty((x.shape[0], num_groups), dtype=torch.float32)
    return y, mean, mean.new_empty(mean.shape)


def _group_check(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, num_groups: int, eps: float
) -> None:
    channels = x.shape[1] if x.dim() > 1 else None
    if channels is None or num_groups < 1 or channels % num_groups:
        raise ValueError(
            f"x must be (N, C, ...) with C a multiple of num_groups {num_groups}; "
            f"got {tuple(x.shape)}"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != (channels,):
            raise ValueError(f"{name} must have shape ({channels},), got {tuple(tensor.shape)}")


def _group_samples(maker: SampleMaker) -> Iterator[Sample]:
    for shape, groups in (((2, 4, 5), 2), ((3, 6), 3), ((2, 6, 3, 5), 1), ((1, 3, 33), 3)):
        args = (maker.normal(*shape), maker.normal(shape[1]), maker.normal(shape[1]))
        label = f"{'x'.join(map(str, shape))},groups={groups}"
        yield Sample(args, {"num_groups": groups, "eps": 1e-5}, label)


group_norm = OperatorSpec(
    name="group_norm",
    signature="(Tensor x, Tensor weight, Tensor? bias=None, *, int num_groups, float eps=1e-05)"
    " -> Tensor",
    equation="y = (x - mean) * rstd * weight + bias, mean and rstd of each group of channels",
    source="Wu and He 2018, arXiv:1803.08494, equations 1 to 7",
    forward=_group_forward, backward=_group_backward, fake=_group_fake,
    residuals=(
        Residual("mean", "(x.shape[0], num_groups)", "float32"),
        Residual("rstd", "(x.shape[0], num_groups)", "float32")),
    saved=("x", "weight", "mean", "rstd"), shaped_like={"bias": "weight"},
    restore=lambda x, weight, **attrs: _group_forward(x, weight, None, **attrs)[1:],
    differentiable=("x", "weight", "bias"), check=_group_check,
    sizes=lambda x, weight, bias, *, num_groups, eps: {
        "channels": x.shape[1], "group": _group_size(x, num_groups)},
    sharding=Sharding(
        lambda x, weight, bias, *_: [([0, 0, 0], [0, None, *([] if bias is None else [None])])],
        lambda *_: [([0, "partial", "partial"], [0, 0, None, 0, 0])]),
    cost=lambda x, weight, bias, **_: Cost(2 * nbytes(x) + nbytes(weight, bias), 7 * x.numel()),
    backward_cost=lambda x, weight, bias, **_: Cost(
        3 * nbytes(x) + 2 * nbytes(weight, bias), 12 * x.numel()),
    samples=_group_samples,
    bound=Bound(
        forward=10, backward=16, length=lambda x, *_, num_groups, **__: _group_size(x, num_groups)),
)  # fmt: skip
