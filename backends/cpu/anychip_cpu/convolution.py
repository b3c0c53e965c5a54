"""Convolutions on the host: conv2d is torch's, conv1d a native kernel.

conv2d is made of float32 numbers but where the processor has instructions that take 16 bits as they
are: tiles, or AMD's AVX-512 (measured on one, Zen 4: torch's own takes 0.4 to 0.9 of the time).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.products import OWN_BELOW
from anychip_cpu.table import Needs, address, declared, has_elements

_kernels: Any = native.kernels

Pair = int | Sequence[int]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _pair(value: Pair) -> list[int]:
    return list(value) if isinstance(value, (list, tuple)) else [value, value]  # type: ignore[list-item]


def _widening(*tensors: Tensor | None) -> Callable[[Tensor], Tensor]:
    """What these go through before torch convolves them: all have one dtype then."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if len(dtypes) == 1 and all(OWN_BELOW.get(dtype, 0.0) == math.inf for dtype in dtypes):
        return Tensor.contiguous
    return lambda tensor: tensor.float().contiguous()


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
    wide = _widening(x, weight, bias)
    y = torch.convolution(
        wide(x),
        wide(weight),
        None if bias is None else wide(bias),
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
    wide = _widening(grad, x, weight)
    found = torch.ops.aten.convolution_backward(
        wide(grad),
        wide(x),
        wide(weight),
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


@declared.forward("conv1d", accepts=has_elements)
def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None and bias.dtype != weight.dtype:
        # The kernel takes one dtype for both; the narrower one would lose digits of the other.
        weight, bias = weight.float(), bias.float()
    x, weight = x.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    y = torch.empty_like(x)
    codes = CODES[x.dtype], CODES[weight.dtype]
    given = map(address, (x, weight, bias, y))
    _kernels.conv1d_forward(*given, *x.shape, weight.shape[1], *codes)
    return y


@declared.backward("conv1d", accepts=has_elements)
def conv1d_backward(grad: Tensor, x: Tensor, weight: Tensor, *, needs: Needs) -> Gradients:
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    dx = torch.empty_like(x) if needs[0] else None
    dweight = torch.empty_like(weight) if needs[1] else None
    dbias = weight.new_empty(weight.shape[0]) if needs[2] else None
    codes = CODES[x.dtype], CODES[weight.dtype]
    given = map(address, (grad, x, weight, dx, dweight, dbias))
    _kernels.conv1d_backward(*given, *x.shape, weight.shape[1], *codes)
    return dx, dweight, dbias
