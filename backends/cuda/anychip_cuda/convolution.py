"""conv1d and conv2d, mapped to torch's convolutions, cuDNN's, of float32 numbers.

16-bit numbers are widened: what cuDNN rounds in between, with a bias, is not written anywhere. The
gradient of the weight in float32 is a product of ours: where it is one of tiles that cuDNN
transforms first (Lavin and Gray 2016, arXiv:1509.09308), some elements lose digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anychip_cuda.numerics import exact_convolutions, exact_products
from anychip_cuda.table import Needs, declared

_PATCHES = 1 << 27
"""Numbers of patches at a time: half a gibibyte."""
PerDim = int | Sequence[int]
Attributes = tuple[list[int], list[int], list[int], bool, list[int], int]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _has_elements(x: Tensor, *_: object, **__: object) -> bool:
    return x.numel() > 0


def _attributes(stride: PerDim, padding: PerDim, dilation: PerDim, groups: int) -> Attributes:
    """As torch takes them: not transposed, and no padding of the output."""
    first, second, third = (
        [value] * 2 if isinstance(value, int) else list(value)
        for value in (stride, padding, dilation)
    )
    return first, second, third, False, [0, 0], groups


@declared.forward("conv2d", kind="mapped", accepts=_has_elements)
def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    stride: PerDim,
    padding: PerDim,
    dilation: PerDim,
    groups: int,
) -> Tensor:
    wide = [None if t is None else t.float().contiguous() for t in (x, weight, bias)]
    attributes = _attributes(stride, padding, dilation, groups)
    with exact_convolutions:
        y: Tensor = torch.ops.aten.convolution(*wide, *attributes)
    return y.to(x.dtype).contiguous()


@declared.backward(
    "conv2d", kind="mapped", accepts=lambda grad, x, *_, **__: min(grad.numel(), x.numel()) > 0
)
def conv2d_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    stride: PerDim,
    padding: PerDim,
    dilation: PerDim,
    groups: int,
    needs: Needs,
) -> Gradients:
    wide = [t.float().contiguous() for t in (grad, x, weight)]
    attributes = _attributes(stride, padding, dilation, groups)
    # Of kernels of one row or one column there are no tiles to be transformed.
    by_patches = x.dtype == torch.float32 and min(weight.shape[2:]) > 1
    asked = [needs[0], needs[1] and not by_patches]
    with exact_convolutions:
        found = torch.ops.aten.convolution_backward(
            *wide, [weight.shape[0]], *attributes, [*asked, False]
        )
    dx, dweight = (
        t.to(like.dtype).contiguous() if need else None
        for t, like, need in zip(found[:2], (x, weight), asked, strict=True)
    )
    if needs[1] and by_patches:
        dweight = _weight_gradient(wide[0], wide[1], wide[2], attributes)
    dbias = wide[0].sum((0, 2, 3)).to(weight.dtype) if needs[2] else None
    return dx, dweight, dbias


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, attributes: Attributes) -> Tensor:
    """sum over n, t of grad[n, o, t] and the patch of x[n] that output t sees, in float32."""
    stride, padding, dilation, *_, groups = attributes
    by_group = grad.reshape(grad.shape[0], groups, weight.shape[0] // groups, -1)
    total = weight.new_zeros(groups, by_group.shape[2], weight[0].numel())
    size = x.shape[1] * weight[0, 0].numel() * by_group.shape[3]
    for own, seen in zip(*(t.split(max(1, _PATCHES // size)) for t in (by_group, x)), strict=True):
        patches = torch.nn.functional.unfold(
            seen, tuple(weight.shape[2:]), tuple(dilation), tuple(padding), tuple(stride)
        )
        patches = patches.view(len(seen), groups, total.shape[2], -1)
        with exact_products:
            total += torch.einsum("ngot,ngkt->gok", own, patches)
    return total.view(weight.shape)


def _depthwise(x: Tensor) -> dict[str, Any]:
    return {"stride": 1, "padding": 0, "dilation": 1, "groups": x.shape[1]}


def _as_image(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(N, C, T) after zeros and (C, width) as an image of one row and its kernels."""
    seen = torch.nn.functional.pad(x, (weight.shape[1] - 1, 0))
    return seen[:, :, None], weight[:, None, None]


@declared.forward("conv1d", kind="mapped", accepts=_has_elements)
def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return conv2d(*_as_image(x, weight), bias, **_depthwise(x))[:, :, 0]


@declared.backward("conv1d", kind="mapped", accepts=_has_elements)
def conv1d_backward(grad: Tensor, x: Tensor, weight: Tensor, *, needs: Needs) -> Gradients:
    dx, dweight, dbias = conv2d_backward(
        grad[:, :, None], *_as_image(x, weight), **_depthwise(x), needs=needs
    )
    dx = None if dx is None else dx[:, :, 0, weight.shape[1] - 1 :].contiguous()
    return dx, None if dweight is None else dweight[:, 0, 0], dbias
