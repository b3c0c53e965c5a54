"""Rows of quantize and dequantize: int8 and int4; the other formats are the reference's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from anychip.operators.codes import FORMATS, num_scales
from anychip_cuda.native import Kernels, address
from anychip_cuda.table import declared


def _is_integer(*_: object, format: str, **__: object) -> bool:
    return format in ("int8", "int4")


@declared.forward("quantize", accepts=_is_integer)
def quantize(
    kernels: Kernels, x: Tensor, rng: Tensor | None, *, format: str, block: int
) -> tuple[Tensor, Tensor]:
    x, rng = x.contiguous(), None if rng is None else rng.contiguous()
    numel, found = x.numel(), FORMATS[format]
    codes = torch.empty(found.code_bytes(numel), dtype=torch.int8, device=x.device)
    scales = torch.empty(num_scales(numel, block), dtype=torch.float32, device=x.device)
    kernels.native.quantize(
        x.data_ptr(),
        address(rng),
        codes.data_ptr(),
        scales.data_ptr(),
        numel,
        block,
        found.bits,
        kernels.codes[x.dtype],
        *kernels.place(x),
    )
    return codes, scales


@declared.forward("dequantize", accepts=_is_integer)
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
        FORMATS[format].bits,
        *kernels.place(scales),
    )
    return y
