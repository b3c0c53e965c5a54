"""Convolutions: conv2d, and conv1d, causal and depthwise. Kernels are not turned, as everywhere.

Each is a product with the windows of x that the kernel sees, in float32. The gradient of x is such
a product too: of the output's gradient, with zeros where a stride leaves numbers of x out.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

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
from anychip.operators.extents import Needs, empty_like, nbytes
from anychip.operators.linear import check_bias
from anychip.operators.norm import channel_sum

PerDim = int | Sequence[int]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _pair(value: PerDim) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value, value)  # type: ignore[return-value]


def _padded(x: Tensor, padding: PerDim) -> Tensor:
    height, width = _pair(padding)
    return pad(x.float(), (width, width, height, height))


def _windows(x: Tensor, weight: Tensor, stride: PerDim, dilation: PerDim, groups: int) -> Tensor:
    """(N, C, H, W) as (groups, numbers under a kernel, N, rows, columns)."""
    # Not unfold, whose gradient not every chip has.
    rows, columns = (
        [_seen(x.shape[dim], weight.shape[dim], place, step, apart)
         for place in range(weight.shape[dim])]
        for dim, step, apart in zip((2, 3), _pair(stride), _pair(dilation), strict=True)
    )  # fmt: skip
    seen = torch.stack([x[:, :, row, column] for row in rows for column in columns], 2)
    seen = seen.permute(1, 2, 0, 3, 4)
    return seen.reshape(groups, x.shape[1] // groups * len(rows) * len(columns), *seen.shape[2:])


def _seen(size: int, kernel: int, place: int, step: int, apart: int) -> slice:
    """What one place of the kernel sees along a dim."""
    outputs = (size - (kernel - 1) * apart - 1) // step + 1
    return slice(place * apart, place * apart + (outputs - 1) * step + 1, step)


def _product(x: Tensor, weight: Tensor, stride: PerDim, dilation: PerDim, groups: int) -> Tensor:
    """Of x, padded, and kernels (outputs, C / groups, high, wide), both float32."""
    windows = _windows(x, weight, stride, dilation, groups)
    kernels = weight.reshape(groups, weight.shape[0] // groups, windows.shape[1])
    y = torch.einsum("gok,gkp->gop", kernels, windows.flatten(2))
    return y.reshape(weight.shape[0], *windows.shape[2:]).transpose(0, 1)


# conv2d


def _conv2d_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, stride: PerDim, padding: PerDim,
    dilation: PerDim, groups: int,
) -> Tensor:  # fmt: skip
    y = _product(_padded(x, padding), weight.float(), stride, dilation, groups)
    if bias is not None:
        y = y + bias.float()[:, None, None]
    return y.to(x.dtype).contiguous()


def _conv2d_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *, stride: PerDim, padding: PerDim, dilation: PerDim,
    groups: int, needs: Needs,
) -> Gradients:  # fmt: skip
    wide = grad.float()
    dx = dweight = dbias = None
    if needs[0]:
        kernels = weight.float().reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        kernels = kernels.transpose(1, 2).flatten(0, 1)
        spread = _spread(wide, x, weight, _pair(stride), _pair(padding), _pair(dilation))
        dx = _product(spread, kernels.flip(-2, -1), 1, dilation, groups).to(x.dtype).contiguous()
    if needs[1]:
        windows = _windows(_padded(x, padding), weight, stride, dilation, groups).flatten(2)
        grads = wide.transpose(0, 1).reshape(groups, weight.shape[0] // groups, windows.shape[2])
        dweight = torch.einsum("gop,gkp->gok", grads, windows).reshape(weight.shape)
        dweight = dweight.to(weight.dtype)
    if needs[2]:
        dbias = channel_sum(wide).to(weight.dtype)
    return dx, dweight, dbias


def _spread(
    grad: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], *rest: Sequence[int]
) -> Tensor:
    """The gradient with its numbers ``stride`` apart, padded so that x's gradient has x's size."""
    apart = pad(grad[..., None, :, None], (0, stride[1] - 1, 0, 0, 0, stride[0] - 1))
    apart = apart.flatten(4).flatten(2, 3)
    edges: list[int] = []
    for dim, padding, dilation in zip((2, 3), *rest, strict=True):
        before = (weight.shape[dim] - 1) * dilation - padding
        edges = [before, x.shape[dim] + padding - apart.shape[dim], *edges]
    return pad(apart, edges)


def _conv2d_check(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, groups: int, **moves: PerDim
) -> None:
    if x.dim() != 4 or weight.dim() != 4 or groups < 1 or x.shape[1] != weight.shape[1] * groups:
        raise ValueError(
            f"x must be (N, C, H, W) and weight (O, C / groups, KH, KW); got {tuple(x.shape)} and "
            f"{tuple(weight.shape)} with groups={groups}"
        )
    if weight.shape[0] % groups:
        raise ValueError(f"weight must have a multiple of {groups} outputs, got {weight.shape[0]}")
    check_bias(x, weight, bias)
    for name, low in (("stride", 1), ("padding", 0), ("dilation", 1)):
        value = moves[name]
        if len(_pair(value)) != 2 or min(_pair(value)) < low:
            raise ValueError(f"{name} must be one or two numbers of at least {low}, got {value}")
    if min(weight.shape[2:]) < 1 or min(_size(x, weight, **moves)) < 1:
        raise ValueError(
            f"the kernel must have numbers, and fit into x with its padding; got "
            f"{tuple(weight.shape)} with dilation={moves['dilation']} for {tuple(x.shape)} with "
            f"padding={moves['padding']}"
        )


def _size(
    x: Tensor, weight: Tensor, *, stride: PerDim, padding: PerDim, dilation: PerDim, **_: object
) -> list[int]:
    """Height and width of the output."""
    given = zip((2, 3), _pair(stride), _pair(padding), _pair(dilation), strict=True)
    return [
        (x.shape[dim] + 2 * around - (weight.shape[dim] - 1) * apart - 1) // step + 1
        for dim, step, around, apart in given
    ]


def _conv2d_fake(x: Tensor, weight: Tensor, bias: Tensor | None, **attrs: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0], *_size(x, weight, **attrs)))


def _conv2d_cost(x: Tensor, weight: Tensor, bias: Tensor | None, **attrs: Any) -> Cost:
    y = _conv2d_fake(x.to("meta"), weight.to("meta"), None, **attrs)
    return Cost(nbytes(x, weight, bias, y), 2 * y.numel() * weight[0].numel())


def _conv2d_backward_cost(x: Tensor, weight: Tensor, bias: Tensor | None, **attrs: Any) -> Cost:
    cost = _conv2d_cost(x, weight, bias, **attrs)
    return Cost(2 * cost.nbytes, 2 * cost.flops)


def _conv2d_samples(maker: SampleMaker) -> Iterator[Sample]:
    plain = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1}
    for shape, kernel, attrs in (
        ((2, 3, 5, 6), (4, 3, 3, 2), {"padding": [1, 0]}),
        ((1, 4, 7, 9), (6, 2, 2, 3), {"stride": [2, 3], "dilation": [3, 1], "groups": 2}),
        ((2, 3, 4, 4), (3, 1, 1, 1), {"groups": 3, "stride": [3, 1]}),
    ):
        x, weight = maker.normal(*shape), maker.normal(*kernel)
        for bias in (maker.normal(kernel[0]), None):
            sizes = "*".join("x".join(map(str, s)) for s in (shape, kernel))
            yield Sample((x, weight, bias), {**plain, **attrs}, f"{sizes},bias={bias is not None}")


def _conv2d_shards(x: Tensor, weight: Tensor, bias: Tensor | None, *attrs: Any) -> Placements:
    rest: list[Placement] = [] if bias is None else [None]
    batch: Placements = [([0], [0, None, *rest])]
    return [*batch, ([1], [None, 0, *(0 for _ in rest)])] if attrs[-1] == 1 else batch


def _conv2d_backward_shards(grad: Tensor, x: Tensor, weight: Tensor, *attrs: Any) -> Placements:
    batch: Placements = [([0, "partial", "partial"], [0, 0, None])]
    return [*batch, (["partial", 0, 0], [1, None, 0])] if attrs[-2] == 1 else batch


conv2d = OperatorSpec(
    name="conv2d",
    signature="(Tensor x, Tensor weight, Tensor? bias=None, *, int[2] stride=1, int[2] padding=0,"
    " int[2] dilation=1, int groups=1) -> Tensor",
    equation="y[n,o,i,j] = bias[o] + sum of weight[o,c,h,w] x[n,c,i*stride+h*dilation-padding,...]",
    source="torch.nn.functional.conv2d",
    forward=_conv2d_forward, backward=_conv2d_backward, fake=_conv2d_fake, saved=("x", "weight"),
    differentiable=("x", "weight", "bias"), shaped_like={"bias": "weight[0]"}, check=_conv2d_check,
    sizes=lambda x, weight, bias, **_: {"in": weight.shape[1], "out": weight.shape[0]},
    autocast="lower", sharding=Sharding(_conv2d_shards, _conv2d_backward_shards), cost=_conv2d_cost,
    backward_cost=_conv2d_backward_cost, samples=_conv2d_samples,
    bound=Bound(forward=2, backward=2, length=lambda x, weight, *_, **__: weight[0].numel()),
)  # fmt: skip


# conv1d


def _as_conv2d(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """x of height 1 behind as many zeros as the kernel is long: one output more, before all."""
    attrs = {"stride": 1, "padding": 0, "dilation": 1, "groups": x.shape[1]}
    return pad(x, (weight.shape[1], 0))[:, :, None], weight[:, None, None], attrs


def _conv1d_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    seen, kernels, attrs = _as_conv2d(x, weight)
    return _conv2d_forward(seen, kernels, bias, **attrs)[:, :, 0, 1:].contiguous()


def _conv1d_backward(grad: Tensor, x: Tensor, weight: Tensor, *, needs: Needs) -> Gradients:
    seen, kernels, attrs = _as_conv2d(x, weight)
    wide = pad(grad, (1, 0))[:, :, None]
    dx, dweight, dbias = _conv2d_backward(wide, seen, kernels, **attrs, needs=needs)
    dx = None if dx is None else dx[:, :, 0, weight.shape[1] :].contiguous()
    return dx, None if dweight is None else dweight[:, 0, 0], dbias


def _conv1d_check(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    if x.dim() != 3 or weight.dim() != 2 or x.shape[1] != weight.shape[0] or not weight.numel():
        raise ValueError(
            f"x must be (N, C, T) and weight (C, K); got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    check_bias(x, weight, bias)


def _conv1d_samples(maker: SampleMaker) -> Iterator[Sample]:
    for shape, kernel in (((2, 3, 7), 4), ((1, 5, 33), 3), ((2, 2, 1), 2), ((3, 1, 4), 1)):
        x, weight = maker.normal(*shape), maker.normal(shape[1], kernel)
        for bias in (maker.normal(shape[1]), None):
            label = f"{'x'.join(map(str, shape))},kernel={kernel},bias={bias is not None}"
            yield Sample((x, weight, bias), {}, label)


def _conv1d_shards(x: Tensor, weight: Tensor, bias: Tensor | None) -> Placements:
    rest = 0 if bias is None else 1
    return [([0], [0, None, *[None] * rest]), ([1], [1, 0, *[0] * rest])]


conv1d = OperatorSpec(
    name="conv1d", signature="(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    equation="y[n,c,t] = bias[c] + sum of weight[c,k] x[n,c,t+k+1-K], x being 0 before its start",
    source="Gu and Dao 2023, arXiv:2312.00752, section 3.4",
    forward=_conv1d_forward, backward=_conv1d_backward, fake=lambda x, weight, bias: empty_like(x),
    saved=("x", "weight"), differentiable=("x", "weight", "bias"),
    shaped_like={"bias": "weight[0]"}, check=_conv1d_check,
    sizes=lambda x, weight, bias: {"kernel": weight.shape[1], "length": x.shape[2]},
    autocast="lower",
    sharding=Sharding(
        _conv1d_shards,
        lambda *_: [([0, "partial", "partial"], [0, 0, None]), ([1, 0, 0], [1, 1, 0])]),
    cost=lambda x, weight, bias: Cost(
        2 * nbytes(x) + nbytes(weight, bias), 2 * x.numel() * weight.shape[1]),
    backward_cost=lambda x, weight, bias: Cost(
        3 * nbytes(x) + 2 * nbytes(weight, bias), 4 * x.numel() * weight.shape[1]),
    samples=_conv1d_samples,
    bound=Bound(forward=2, backward=2, length=lambda x, weight, *_, **__: weight.shape[1]),
)  # fmt: skip
