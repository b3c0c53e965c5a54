"""quantize and dequantize on the host: native kernels, with the bits of the references."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anychip.operators.codes import FORMATS, num_scales
from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import address, declared

_kernels: Any = native.kernels


def _number_of(format: str) -> int:
    """The kernels' number for a format."""
    return int(getattr(_kernels, format.upper()))


@declared.forward("quantize")
def quantize(x: Tensor, rng: Tensor | None, *, format: str, block: int) -> tuple[Tensor, Tensor]:
    x, numel, found = x.contiguous(), x.numel(), FORMATS[format]
    rng = None if rng is None else rng.contiguous()
    codes = torch.empty(found.code_bytes(numel), dtype=torch.int8)
    scales = torch.empty(num_scales(numel, block), dtype=found.scale_dtype)
    addresses = (x.data_ptr(), address(rng), codes.data_ptr(), scales.data_ptr())
    _kernels.quantize(*addresses, numel, block, _number_of(format), CODES[x.dtype])
    return codes, scales


@declared.forward("dequantize")
def dequantize(
    codes: Tensor, scales: Tensor, *, shape: Sequence[int], format: str, block: int
) -> Tensor:
    codes, scales = codes.contiguous(), scales.contiguous()
    y = torch.empty(tuple(shape), dtype=torch.float32)
    addresses = (codes.data_ptr(), scales.data_ptr(), y.data_ptr())
    _kernels.dequantize(*addresses, math.prod(shape), block, _number_of(format))
    return y
