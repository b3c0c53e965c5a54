"""Rows of quantize and dequantize."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from anychip.operators.quantization import code_bytes, num_scales
from anychip_cuda.native import Kernels, address
from anychip_cuda.table import declared


@declared.forward("quantize")
def quantize(
    kernels: Kernels, x: Tensor, rng: Tensor | None, *, bits: int, block: int
) -> tuple[Tensor, Tensor]:
    x, rng = x.contiguous(), None if rng is None else rng.contiguous()
    numel = x.numel()
    codes = torch.empty(code_bytes(numel, bits), dtype=torch.int8, device=x.device)
    scales = torch.empty(num_scales(numel, block), dtype=torch.float32, device=x.device)
    kernels.native.quantize(
        x.data_ptr(),
        address(rng),
        codes.data_ptr(),
        scales.data_ptr(),
        numel,
        block,
        bits,
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
    bits: int,
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
        bits,
        *kernels.place(scales),
    )
    return y
