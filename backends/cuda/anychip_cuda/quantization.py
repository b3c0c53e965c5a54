"""Rows of quantize and dequantize, in every format."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from anychip.operators.codes import FORMATS, num_scales
from anychip_cuda.native import Kernels, address
from anychip_cuda.table import declared


@declared.forward("quantize")
def quantize(
    kernels: Kernels, x: Tensor, rng: Tensor | None, *, format: str, block: int
) -> tuple[Tensor, Tensor]:
    x, rng = x.contiguous(), None if rng is None else rng.contiguous()
    numel, found = x.numel(), FORMATS[format]
    if found.is_mx and x.data_ptr() % 16:  # the kernel reads vectors of blocks of 32 only
        x = x.clone()
    codes = torch.empty(found.code_bytes(numel), dtype=torch.int8, device=x.device)
    scales = torch.empty(num_scales(numel, block), dtype=found.scale_dtype, device=x.device)
    kernels.native.quantize(
        x.data_ptr(),
        address(rng),
        codes.data_ptr(),
        scales.data_ptr(),
        numel,
        block,
        format,
        kernels.codes[x.dtype],
        *kernels.place(x),
    )
    return codes, scales


@declared.forward("dequantize")
def dequantize(
    kernels: Kernels,
    codes: Tensor,
    scales: Tensor,
    *,
    shape: Sequence[int],
    format: str,
    block: int,
) -> Tensor:
    codes, scales = codes.contiguous(), scales.contiguous()
    y = torch.empty(tuple(shape), dtype=torch.float32, device=scales.device)
    kernels.native.dequantize(
        codes.data_ptr(),
        scales.data_ptr(),
        y.data_ptr(),
        math.prod(shape),
        block,
        format,
        *kernels.place(scales),
    )
    return y
