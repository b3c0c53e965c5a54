"""conv1d and conv2d, mapped to torch's convolutions, cuDNN's, of float32 numbers.

16-bit numbers are widened: what cuDNN rounds in between, with a bias, is not written anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anychip_cuda.numerics import exact_convolutions
from anychip_cuda.table import Needs, declared

PerDim = int | Sequence[int]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _has_elements(x: Tensor, *_: object, **__: object) -> bool:
    return x.numel() > 0


def _attributes(
    stride: PerDim, padding: PerDim, dilation: PerDim, groups: int
) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
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
    with exact_convolutions:
        found = torch.ops.aten.convolution_backward(
            *wide, [weight.shape[0]], *attributes, [*needs[:2], False]
        )
    dx, dweight = (
        t.to(like.dtype).contiguous() if need else None
        for t, like, need in zip(found[:2], (x, weight), needs[:2], strict=True)
    )
    dbias = wide[0].sum((0, 2, 3)).to(weight.dtype) if needs[2] else None
    return dx, dweight, dbias


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
