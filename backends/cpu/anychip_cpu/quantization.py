"""quantize and dequantize on the host, by chunks of whole blocks that stay in a cache.

The references on ranges of the flattened tensor: a block's codes depend on the block alone, and
the random words on the index of an element, so that the bits are those of one call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anychip import operators
from anychip.operators.codes import FORMATS, num_scales
from anychip_cpu.table import declared

_CHUNK = 1 << 17
"""Elements: 512 KiB of float32, as for the update rules."""


def _ranges(numel: int, block: int) -> Iterator[tuple[int, int]]:
    """Starts and ends of chunks; a start is a multiple of the block, and of 4 for the words."""
    length = max(_CHUNK // block // 4, 1) * 4 * block
    for start in range(0, numel, length):
        yield start, min(start + length, numel)


@declared.forward("quantize", kind="mapped")
def quantize(x: Tensor, rng: Tensor | None, *, format: str, block: int) -> tuple[Tensor, Tensor]:
    flat, numel, found = x.reshape(-1), x.numel(), FORMATS[format]
    codes = torch.empty(found.code_bytes(numel), dtype=torch.int8)
    scales = torch.empty(num_scales(numel, block), dtype=found.scale_dtype)
    for start, end in _ranges(numel, block):
        words = None if rng is None else torch.stack([rng[0], rng[1] + start // 4])
        some, some_scales = operators.quantize.forward(
            flat[start:end], words, format=format, block=block
        )
        first = found.code_bytes(start)
        codes[first : first + some.shape[0]] = some
        scales[start // block : start // block + some_scales.shape[0]] = some_scales
    return codes, scales


@declared.forward("dequantize", kind="mapped")
def dequantize(
    codes: Tensor, scales: Tensor, *, shape: Sequence[int], format: str, block: int
) -> Tensor:
    numel, found = math.prod(shape), FORMATS[format]
    y = torch.empty(numel, dtype=torch.float32)
    for start, end in _ranges(numel, block):
        y[start:end] = operators.dequantize.forward(
            codes[found.code_bytes(start) : found.code_bytes(end)],
            scales[start // block : num_scales(end, block)],
            shape=(end - start,),
            format=format,
            block=block,
        )
    return y.view(tuple(shape))
