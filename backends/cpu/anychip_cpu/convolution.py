"""conv1d and conv2d on the host, mapped to torch's convolutions of float32 numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anychip_cpu.table import Needs, declared, has_elements

Pair = int | Sequence[int]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _pair(value: Pair) -> list[int]:
    return list(value) if isinstance(value, (list, tuple)) else [value, value]  # type: ignore[list-item]


@declared.forward("conv2d", kind="mapped", accepts=has_elements)
def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    y = torch.convolution(
        x.float().contiguous(),
        weight.float().contiguous(),
        None if bias is None else bias.float(),
        _pair(stride),
        _pair(padding),
        _pair(dilation),
        False,
        [0, 0],
        groups,
    )
    return y.to(x.dtype).contiguous()


@declared.backward("conv2d", kind="mapped", accepts=has_elements)
def conv2d_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    needs: Needs,
) -> Gradients:
    found = torch.ops.aten.convolution_backward(
        grad.float().contiguous(),
        x.float().contiguous(),
        weight.float().contiguous(),
        [weight.shape[0]],
        _pair(stride),
        _pair(padding),
        _pair(dilation),
        False,
        [0, 0],
        groups,
        list(needs),
    )
    dx, dweight, dbias = (
        None if t is None or not need else t.to(x.dtype).contiguous()
        for t, need in zip(found, needs, strict=True)
    )
    return dx, dweight, dbias


def _depthwise(x: Tensor) -> dict[str, Any]:
    return {"stride": 1, "padding": 0, "dilation": 1, "groups": x.shape[1]}


@declared.forward("conv1d", kind="mapped", accepts=has_elements)
def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    seen = torch.nn.functional.pad(x, (weight.shape[1] - 1, 0))[:, :, None]
    y = conv2d(seen, weight[:, None, None], bias, **_depthwise(x))
    return y[:, :, 0]


@declared.backward("conv1d", kind="mapped", accepts=has_elements)
def conv1d_backward(grad: Tensor, x: Tensor, weight: Tensor, *, needs: Needs) -> Gradients:
    before = weight.shape[1] - 1
    given = torch.nn.functional.pad(x, (before, 0))[:, :, None], weight[:, None, None]
    found = conv2d_backward(grad[:, :, None], *given, **_depthwise(x), needs=needs)
    dx, dweight, dbias = found
    dx = None if dx is None else dx[:, :, 0, before:].contiguous()
    return dx, None if dweight is None else dweight[:, 0, 0], dbias
