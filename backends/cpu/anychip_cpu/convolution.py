"""Convolutions on the host: conv2d is torch's, conv1d a native kernel.

conv2d is made of float32 numbers but where the processor has instructions that take 16 bits as they
are: tiles, or AMD's AVX-512 (measured on one, Zen 4: torch's own takes 0.4 to 0.9 of the time). And
of images whose channels are innermost, where those are quicker to multiply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.products import IN_TILES, OWN_BELOW
from anychip_cpu.table import Needs, address, declared, has_elements

_kernels: Any = native.kernels

Pair = int | Sequence[int]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _pair(value: Pair) -> list[int]:
    return list(value) if isinstance(value, (list, tuple)) else [value, value]  # type: ignore[list-item]


def _is_wide(
    x: Tensor, weight: Tensor, *others: Tensor | None, stride: Pair, padding: Pair, dilation: Pair
) -> bool:
    """Whether all have one dtype that torch convolves as it is.

    In 16 bits torch 2.13 does not do so soundly (of thousands of random calls): there are wrong
    numbers where results are one or two columns wide and weights step by more than one (torch's
    issue 169688); and where weights have gaps, or a crash. Steps wider than the weights write
    where they may not (oneDNN's pull request 5494). By AMX there are others in many shapes with 1,
    2, 4 ... 14 channels of a group; by AVX-512 alone, on AMD's Zen 4, in none of 14,000 calls. Of
    float32 nothing of the kind was seen. Numbers are multiplied by twos: of 1, 3 ... 13 channels
    one is, by 0, with its neighbour, and a NaN there spoils results that do not depend on it.
    """
    dtypes = {tensor.dtype for tensor in (x, weight, *others) if tensor is not None}
    if dtypes == {torch.float32}:
        return True
    if len(dtypes) > 1 or OWN_BELOW.get(x.dtype, 0.0) != math.inf:
        return False
    (_, channels, *kernel), steps = weight.shape, _pair(stride)
    room = x.shape[3] + 2 * _pair(padding)[1] - kernel[1]
    return (
        (channels >= 16 or (channels % 2 == 0 and not IN_TILES))
        and _pair(dilation) == [1, 1]
        and all(step <= size for step, size in zip(steps, kernel, strict=True))
        and (steps[1] == 1 or room // steps[1] >= 2)
    )


_NARROW = 16 if _kernels else math.inf
"""Of fewer channels or places torch's copy is the quicker one, and without native ones the only."""


def _innermost(x: Tensor) -> Tensor:
    """(N, C, H, W), with its channels innermost."""
    batch, channels, *size = x.shape
    places = math.prod(size)
    if x.is_contiguous(memory_format=torch.channels_last) or min(channels, places) < _NARROW:
        return x.contiguous(memory_format=torch.channels_last)
    x, y = x.contiguous(), x.new_empty((batch, *size, channels))
    _kernels.turn(address(x), address(y), batch, channels, places, CODES[x.dtype])
    return y.permute(0, 3, 1, 2)


def _outermost(x: Tensor) -> Tensor:
    """(N, C, H, W), contiguous."""
    batch, channels, *size = x.shape
    places = math.prod(size)
    if not x.is_contiguous(memory_format=torch.channels_last) or min(channels, places) < _NARROW:
        return x.contiguous()
    y = x.new_empty(x.shape)
    _kernels.turn(address(x), address(y), batch, places, channels, CODES[x.dtype])
    return y


_FEW = 1 << 17
"""Of images of fewer numbers in all the copies cost as much as they bring (measured on Zen 4)."""


def _prepared(
    x: Tensor, weight: Tensor, *others: Tensor | None, **places: Pair
) -> Callable[[Tensor], Tensor]:
    """What these go through before torch convolves them.

    In 16 bits, and of more numbers than weights, it is 0.9 to 2.5 times as fast where channels are
    innermost (by AMX; in float32, by an estimate, 0.6 to 1.6 times).
    """
    is_wide = _is_wide(x, weight, *others, **places)
    turns = is_wide and x.dtype != torch.float32 and x.numel() >= max(weight.numel(), _FEW)
    lie = _innermost if turns else Tensor.contiguous
    return lambda t: (lie if t.dim() == 4 else Tensor.contiguous)(t if is_wide else t.float())


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
    places = {"stride": stride, "padding": padding, "dilation": dilation}
    prepared = _prepared(x, weight, bias, **places)
    y = torch.convolution(
        prepared(x),
        prepared(weight),
        None if bias is None else prepared(bias),
        _pair(stride),
        _pair(padding),
        _pair(dilation),
        False,
        [0, 0],
        groups,
    )
    return _outermost(y.to(x.dtype))


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
    places = {"stride": stride, "padding": padding, "dilation": dilation}
    prepared = _prepared(x, weight, grad, **places)
    found = torch.ops.aten.convolution_backward(
        prepared(grad),
        prepared(x),
        prepared(weight),
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
        None if t is None or not need else t.to(x.dtype)
        for t, need in zip(found, needs, strict=True)
    )
    dx, dweight = (None if t is None else _outermost(t) for t in (dx, dweight))
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
