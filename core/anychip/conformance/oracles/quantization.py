"""Oracles of quantize and dequantize: a code is the whole number next to x / scale.

A scale is one division, x / scale another: where both errors together can carry the quotient over
a rounding boundary, the code on either side is right; everywhere else it is one number. Where both
quotients are float32 numbers a division has no error: a half is a half, and goes to even. Random
rounding goes up when ``(word >> 8) < 2^24 frac``: the boundary is the word's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anychip.conformance.arithmetic import SMALLEST_NORMAL, UNIT, Rounded
from anychip.conformance.calls import Arguments, Call, Draw, in_layouts, shape_label
from anychip.conformance.formats import Array
from anychip.conformance.oracles import philox
from anychip.conformance.oracles.oracle import Oracle

_LARGEST = {8: 127, 4: 7}


def _rows(array: Array, block: int) -> Array:
    flat = array.reshape(-1)
    return np.pad(flat, (0, -flat.size % block)).reshape(-1, block)


def _scales(rows: Rounded, largest: float) -> Rounded:
    top = np.abs(rows.value).max(1, initial=0.0)
    flushed = rows.worst.max(1, initial=0.0)
    scales = Rounded(top, flushed, flushed) / float(largest)
    # Below the smallest normal number a scale is 0; next to it, it may be.
    small = scales.value < SMALLEST_NORMAL
    near = np.abs(scales.value - SMALLEST_NORMAL) <= scales.worst * UNIT
    value = np.where(small, 0.0, scales.value)
    size = np.where(near, SMALLEST_NORMAL * 2 / UNIT, np.where(small, 0.0, scales.worst))
    return Rounded(value, size, np.where(near | small, size, scales.spread))


def _is_float32(array: Array) -> NDArray[np.bool_]:
    return np.asarray(array.astype(np.float32).astype(np.float64) == array)


def _whole(steps: Array, words: Array | None) -> Array:
    if words is None:
        return np.rint(steps)
    below = np.floor(steps)
    up: Array = below + (words < (steps - below) * 2.0**24)
    return up


def _codes(rows: Rounded, scales: Rounded, words: Array | None, largest: int) -> Rounded:
    usable = np.isfinite(scales.value) & (scales.value > 0.0)
    divisor = Rounded(
        np.where(usable, scales.value, 1.0)[:, None],
        np.where(usable, scales.worst, 0.0)[:, None],
        np.where(usable, scales.spread, 0.0)[:, None],
    )
    steps = rows / divisor
    value = np.where(usable[:, None], steps.value, 0.0)
    exact = usable[:, None] & _is_float32(divisor.value) & _is_float32(value)
    error = np.where(usable[:, None] & ~exact, steps.worst, 0.0) * UNIT
    low, mid, high = (
        np.clip(_whole(value + shift, words), -largest, largest) for shift in (-error, 0.0, error)
    )
    size = np.maximum(high - mid, mid - low) / UNIT
    return Rounded(mid, size, size)


def _packed(codes: Rounded) -> Rounded:
    """Two codes to a byte, as the signed number that the byte is."""
    pairs = np.pad(codes.value, (0, codes.value.size % 2)).reshape(-1, 2).astype(np.int64) & 15
    byte = (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8).astype(np.int8)
    unsure = np.pad(codes.worst, (0, codes.value.size % 2)).reshape(-1, 2).any(1)
    # A code on the other side of a boundary may change every bit of its half.
    size = np.where(unsure, 256.0 / UNIT, 0.0)
    return Rounded(byte.astype(np.float64), size, size)


def _quantize(
    x: Rounded, rng: NDArray[np.int64] | None, *, bits: int, block: int
) -> tuple[Rounded, Rounded]:
    largest, count = _LARGEST[bits], x.value.size
    rows = x.shaped(lambda array: _rows(array, block))
    words = None
    if rng is not None:
        drawn = philox.words(int(rng[0]), int(rng[1]), count) >> np.uint64(8)
        words = _rows(drawn.astype(np.float64), block)
    scales = _scales(rows, largest)
    codes = _codes(rows, scales, words, largest).shaped(lambda array: array.reshape(-1)[:count])
    return (codes if bits == 8 else _packed(codes)), scales


def _dequantize(
    codes: NDArray[np.int8], scales: Rounded, *, shape: Sequence[int], bits: int, block: int
) -> tuple[Rounded]:
    count = math.prod(shape)
    if bits == 4:
        byte = codes.astype(np.int64)
        nibbles = np.stack([byte & 15, byte >> 4 & 15], -1).reshape(-1)[:count]
        codes = np.where(nibbles > 7, nibbles - 16, nibbles).astype(np.int8)
    each = scales.shaped(lambda array: np.repeat(array, block)[:count])
    return ((Rounded.exact(codes.astype(np.float64)) * each).reshape(*shape),)


# Calls


def _arguments(
    draw: Draw,
    shape: tuple[int, ...],
    bits: int,
    block: int = 32,
    offset: int | None = None,
    scale: float = 1.0,
) -> Arguments:
    rng = None if offset is None else draw.rng(1234, offset)
    return (draw.normal(*shape, scale=scale), rng), {"bits": bits, "block": block}


def _of_scale(draw: Draw, name: str, bits: int) -> Arguments:
    return _arguments(draw, (400,), bits, scale=getattr(draw, name))


def _mixed(draw: Draw, bits: int) -> Arguments:
    """Blocks of zeros, of one value, of one outlier, of both ends; ties at half a step."""
    x = torch.zeros(6, 32)
    x[1] = -2.5
    x[2, 7] = 1000.0
    x[3, 0], x[3, 31] = 3.0, -3.0
    x[4] = (torch.arange(32) - 16) / 4
    x[4, 0] = float(_LARGEST[bits])
    x[5] = draw.normal(32, dtype=torch.float32)
    return (x.to(draw.dtype), None), {"bits": bits, "block": 32}


def _special(draw: Draw, bits: int) -> Arguments:
    x = draw.normal(5, 32)
    x[1, 3], x[2, 4], x[3, 5], x[3, 6] = math.nan, math.inf, -math.inf, math.nan
    return (x, None), {"bits": bits, "block": 32}


def _quantize_calls() -> Iterator[Call]:
    shapes: tuple[tuple[int, ...], ...] = (
        (0,), (1,), (), (31,), (32,), (33,), (7, 9), (4099,),
    )  # fmt: skip
    for bits in (8, 4):
        for shape in shapes:
            make = partial(_arguments, shape=shape, bits=bits)
            yield Call(f"{shape_label(shape)}.int{bits}", make)
            make = partial(_arguments, shape=shape, bits=bits, offset=5)
            yield Call(f"{shape_label(shape)}.int{bits}.random", make)
        for block in (1, 3, 64, 5000):
            make = partial(_arguments, shape=(33, 40), bits=bits, block=block)
            yield Call(f"33x40.int{bits}.block:{block}", make)
        yield from in_layouts(
            f"9x31.int{bits}", partial(_arguments, shape=(9, 31), bits=bits, offset=2**32 - 7)
        )
        for name in ("huge", "subnormal"):
            yield Call(f"{name}.int{bits}", partial(_of_scale, name=name, bits=bits))
        for name, chosen in (("mixed", _mixed), ("special", _special)):
            yield Call(f"{name}.int{bits}", partial(chosen, bits=bits), statistical=False)
        make = partial(_arguments, shape=(300_001,), bits=bits, block=256, offset=9)
        yield Call(f"300001.int{bits}", make, full=True)
        make = partial(_arguments, shape=(300_001,), bits=bits, block=3, offset=9)
        yield Call(f"300001.int{bits}.block:3", make, full=True)


def _coded(draw: Draw, shape: tuple[int, ...], bits: int, block: int = 32) -> Arguments:
    count = math.prod(shape)
    span = 255 if bits == 8 else 256
    codes = draw.integers(span, count if bits == 8 else (count + 1) // 2) - 127
    scales = draw.normal(-(-count // block), dtype=torch.float32).abs()
    return (codes.to(torch.int8), scales), {"shape": list(shape), "bits": bits, "block": block}


def _coded_special(draw: Draw, bits: int) -> Arguments:
    args, attrs = _coded(draw, (5, 32), bits)
    args[1][1], args[1][2], args[1][4] = math.nan, math.inf, 0.0
    return args, attrs


def _dequantize_calls() -> Iterator[Call]:
    shapes: tuple[tuple[int, ...], ...] = ((0,), (1,), (), (31,), (33,), (7, 9), (2, 3, 5), (4099,))
    for bits in (8, 4):
        for shape in shapes:
            make: Any = partial(_coded, shape=shape, bits=bits)
            yield Call(f"{shape_label(shape)}.int{bits}", make)
        for block in (1, 3, 64, 5000):
            make = partial(_coded, shape=(33, 40), bits=bits, block=block)
            yield Call(f"33x40.int{bits}.block:{block}", make)
        yield from in_layouts(f"9x31.int{bits}", partial(_coded, shape=(9, 31), bits=bits))
        yield Call(f"special.int{bits}", partial(_coded_special, bits=bits), statistical=False)
        for block in (256, 1 << 19):
            make = partial(_coded, shape=(300_001,), bits=bits, block=block)
            yield Call(f"300001.int{bits}.block:{block}", make, full=True)


QUANTIZE = Oracle(
    forward=_quantize, calls=_quantize_calls, lower_precision=("4099.int8", "4099.int4.random")
)
DEQUANTIZE = Oracle(
    forward=_dequantize,
    calls=_dequantize_calls,
    lower_precision=("4099.int8", "33x40.int4.block:3"),
)
