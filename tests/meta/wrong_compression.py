"""Wrong backends whose mistake is in quantize, dequantize, hadamard or top_k."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.meta.honest import Row
from tests.meta.wrong import Attr, wrong, wrong_arguments, wrong_gradients

NIBBLES = ("int4", "nf4", "mx_e2m1")


@wrong("halves-away-from-zero", "wrong rounding", operator="quantize")
def halves_away(row: Row, x: Tensor, rng: Tensor | None, *, format: str, block: int) -> Any:
    codes, scales = row(x, rng, format=format, block=block)
    if rng is None and format == "int8":
        flat = x.reshape(-1).float()
        steps = flat / scales.repeat_interleave(block)[: flat.numel()]
        away = torch.sign(steps) * torch.floor(steps.abs() + 0.5)
        codes = torch.where(steps.isfinite(), away, 0.0).clamp(-127, 127).to(torch.int8)
    return codes, scales


@wrong("blocks-per-row", "physical for logical index", operator="quantize")
def blocks_per_row(row: Row, x: Tensor, rng: Tensor | None, *, format: str, block: int) -> Any:
    codes, scales = row(x, rng, format=format, block=block)
    if format != "int8" or x.dim() < 2:
        return codes, scales
    parts = [row(line, None, format=format, block=block)[0] for line in x.reshape(-1, x.shape[-1])]
    return torch.cat(parts), scales


@wrong("random-rounding-mirrored", "a comparison the wrong way round", operator="quantize")
def mirrored(row: Row, x: Tensor, rng: Tensor | None, **attrs: Attr) -> Any:
    if rng is None:
        return row(x, rng, **attrs)
    codes, scales = row(-x, rng, **attrs)
    if attrs["format"] == "int8":
        return -codes, scales
    low, high = -((codes << 4) >> 4), -(codes >> 4)
    return (low & 0xF) | (high << 4), scales


@wrong("random-word-of-the-block", "wrong counter", operator="quantize")
def word_of_block(row: Row, x: Tensor, rng: Tensor | None, *, format: str, block: int) -> Any:
    codes, scales = row(x, rng, format=format, block=block)
    if rng is None or format == "int4" or x.numel() <= block:
        return codes, scales
    parts = [row(part, rng, format=format, block=block)[0] for part in x.reshape(-1).split(block)]
    return torch.cat(parts), scales


@wrong("float-code-cut-off", "wrong rounding", operator="quantize")
def cut_off(row: Row, x: Tensor, rng: Tensor | None, *, format: str, block: int) -> Any:
    codes, scales = row(x, rng, format=format, block=block)
    if format != "e4m3":
        return codes, scales
    steps = x.reshape(-1).float() / scales.repeat_interleave(block)[: x.numel()]
    is_above = codes.view(torch.float8_e4m3fn).float().abs() > steps.abs()
    return torch.where(is_above, codes - 1, codes), scales


@wrong("codes-at-equal-steps", "a table that is another", operator="quantize")
def equal_steps(row: Row, x: Tensor, rng: Tensor | None, *, format: str, block: int) -> Any:
    if format != "nf4":
        return row(x, rng, format=format, block=block)
    return row(x, rng, format="int4", block=block)[0], row(x, rng, format=format, block=block)[1]


@wrong("power-above-the-largest", "off by one", operator="quantize")
def power_above(row: Row, x: Tensor, rng: Tensor | None, **attrs: Attr) -> Any:
    codes, scales = row(x, rng, **attrs)
    if scales.dtype != torch.uint8:
        return codes, scales
    codes, _ = row((x.float() / 2).to(x.dtype), rng, **attrs)
    return codes, torch.where(scales == 255, scales, scales + 1)


@wrong("exponent-by-128", "off by one", operator="dequantize")
def exponent_of_128(row: Row, codes: Tensor, scales: Tensor, **attrs: Attr) -> Any:
    is_exponent = scales.dtype == torch.uint8
    return row(
        codes, torch.where(scales == 255, scales, scales - 1) if is_exponent else scales, **attrs
    )


@wrong("nibble-without-sign", "sign not extended", operator="dequantize")
def unsigned(
    row: Row, codes: Tensor, scales: Tensor, *, shape: Any, format: str, block: int
) -> Any:
    if format != "int4":
        return row(codes, scales, shape=shape, format=format, block=block)
    wide = torch.stack([codes & 0xF, (codes >> 4) & 0xF], -1).reshape(-1)
    count = math.prod(shape)
    return row(wide[:count].clone(), scales, shape=shape, format="int8", block=block)


@wrong("sequency-order", "another order of the same numbers", operator="hadamard")
def reversed_bits(row: Row, x: Tensor, *, block: int | None) -> Any:
    length = x.shape[-1] if block is None else block
    width = length.bit_length() - 1
    order = [int(f"{i:0{width}b}"[::-1], 2) if width else 0 for i in range(length)]
    y = row(x, block=block)
    return y.unflatten(-1, (-1, length))[..., order].flatten(-2) if y.numel() else y


@wrong("one-block-for-all", "an attribute without effect", operator="hadamard")
def block_ignored(row: Row, x: Tensor, *, block: int | None) -> Any:
    length = x.shape[-1]
    return row(x, block=block if length & (length - 1) else None)


@wrong("largest-signed", "sign taken into account", operator="top_k")
def signed(row: Row, x: Tensor, *, k: int) -> Any:
    indices = torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :k].contiguous()
    return x.gather(-1, indices), indices


@wrong("ties-by-last-index", "order of equal numbers", operator="top_k")
def last_first(row: Row, x: Tensor, *, k: int) -> Any:
    values, indices = row(x.flip(-1), k=k)
    return values, x.shape[-1] - 1 - indices


@wrong("nan-is-smallest", "Inf or NaN lost", operator="top_k")
def nan_last(row: Row, x: Tensor, *, k: int) -> Any:
    _, indices = row(torch.where(x.isnan(), 0.0, x), k=k)
    return x.gather(-1, indices), indices


ARGUMENTS = (
    wrong_arguments("high-nibble-first", "layout swapped", "quantize",
        y0=lambda y0, format: y0 if format not in NIBBLES else (y0 << 4) | ((y0 >> 4) & 0xF)),
    wrong_arguments("scale-by-128", "off by one", "quantize",
        y1=lambda y1, format: y1 * {"int8": 127 / 128, "int4": 7 / 8}.get(format, 1)),
    wrong_arguments("zero-block-is-nan", "a special case forgotten", "quantize",
        y1=lambda y1: torch.where(y1 == 0.0, math.nan, y1) if y1.is_floating_point() else y1),
    wrong_arguments("not-normalised", "missing factor", "hadamard",
        y=lambda y, x, block: y * math.sqrt(block or x.shape[-1])),
    wrong_arguments("magnitude-for-value", "sign lost", "top_k",
        y0=lambda y0: y0.abs()),
    wrong_gradients("gradient-not-transformed", "derivative of another function", "hadamard",
        dx=lambda grad: grad.clone()),
    wrong_arguments("infinite-block-hidden", "Inf or NaN lost", "quantize",
        x=lambda x: torch.nan_to_num(x)),
    wrong_arguments("scale-of-the-next-block", "off by one", "dequantize",
        scales=lambda scales: scales.roll(-1)),
    wrong_arguments("scale-in-bfloat16", "lower precision of factors", "dequantize",
        scales=lambda scales: scales.bfloat16().float()),
    wrong_arguments("hadamard-in-half", "lower precision of factors", "hadamard",
        x=lambda x: x.bfloat16().float()),
    wrong_gradients("gradient-to-first-places", "gradient of an index", "top_k",
        y1=lambda y1: y1.sort(-1).values),
)  # fmt: skip
