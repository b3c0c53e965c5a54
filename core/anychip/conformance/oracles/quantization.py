"""Oracles of quantize and dequantize: a code is the whole number next to x / scale.

A scale is one division, x / scale another: where both errors together can carry the quotient over
a rounding boundary, the code on either side is right; everywhere else it is one number. Where both
quotients are float32 numbers a division has no error: a half is a half, and goes to even. Random
rounding goes up when ``(word >> 8) < 2^24 frac``: the boundary is the word's. A scale of an MX
format is a power of two, and nothing is rounded twice.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anychip.conformance.arithmetic import SMALLEST_NORMAL, UNIT, Rounded, where
from anychip.conformance.calls import Arguments, Draw
from anychip.conformance.formats import Array
from anychip.conformance.oracles import philox
from anychip.conformance.oracles.oracle import Oracle

_INTEGERS = {"int8": 127, "int4": 7}
_NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip
"""Dettmers et al. 2023, arXiv:2305.14314, appendix E."""


def _numbers(exponent_bits: int, mantissa_bits: int, numbers: int) -> Array:
    """(codes,) values of a small float's codes without a sign; the last are no numbers: NaN."""
    codes = np.arange(1 << exponent_bits + mantissa_bits)
    exponents, parts = codes >> mantissa_bits, (codes % (1 << mantissa_bits)) / 2.0**mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    small, usual = parts * 2.0 ** (1 - bias), (1 + parts) * 2.0 ** (exponents - bias)
    return np.where(codes < numbers, np.where(exponents == 0, small, usual), np.nan)


_FLOATS = {"e4m3": _numbers(4, 3, 127), "e5m2": _numbers(5, 2, 124), "e2m1": _numbers(2, 1, 8)}
FORMATS = ("int8", "int4", "nf4", "e4m3", "e5m2", "mx_e4m3", "mx_e5m2", "mx_e2m1")
BYTES = {name: 0.5 if name in ("int4", "nf4", "mx_e2m1") else 1 for name in FORMATS}


def _floats(name: str) -> Array | None:
    return _FLOATS.get(name.removeprefix("mx_"))


def _largest(name: str) -> float:
    found = _floats(name)
    return float(np.nanmax(found)) if found is not None else _INTEGERS.get(name, 1)


def num_bytes(name: str, numel: int) -> int:
    """Of the codes of so many elements."""
    return math.ceil(numel * BYTES[name])


def _exponents(tops: Array, largest: float) -> Array:
    """E8M0 scales; 255 of a block with what is no number."""
    lowest = np.frexp(np.maximum(tops, 2.0**-126))[1] - np.frexp(largest)[1]
    return np.asarray(np.where(np.isfinite(tops), np.clip(lowest + 127.0, 1, 253), 255.0))


def _powers(scales: Array) -> Array:
    return np.asarray(np.where(scales == 255, np.nan, 2.0 ** (scales - 127.0)))


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
    return Rounded(value, size, lambda: np.where(near | small, size, scales.spread))


def _is_float32(array: Array) -> NDArray[np.bool_]:
    return np.asarray(array.astype(np.float32).astype(np.float64) == array)


def _nearest(steps: Array, values: Array, even: bool) -> Array:
    """Place of the nearest of ascending values; of two the even one, or the lower one."""
    above = np.clip(np.searchsorted(values, steps), 1, len(values) - 1)
    gap = (steps - values[above - 1]) - (values[above] - steps)
    goes_up = (gap > 0) | ((gap == 0) & even & (above % 2 == 0))
    return np.asarray(above - 1.0 + goes_up)


def _places(steps: Array, name: str, words: Array | None) -> Array:
    """Codes of steps, of floats as an unsigned number without the sign."""
    if name == "nf4":
        return _nearest(steps, _NF4, False)
    values = _floats(name)
    if values is not None:
        return _nearest(np.abs(steps), values[np.isfinite(values)], True)
    largest = _INTEGERS[name]
    return np.clip(_whole(steps, words), -largest, largest)


def _whole(steps: Array, words: Array | None) -> Array:
    if words is None:
        return np.rint(steps)
    below = np.floor(steps)
    up: Array = below + (words < (steps - below) * 2.0**24)
    return up


def _divisor(scales: Rounded) -> tuple[Rounded, NDArray[np.bool_]]:
    """A column of scales, 1 where a block's is 0 or no number; and where it can be used."""
    usable = np.isfinite(scales.value) & (scales.value > 0.0)
    return where(usable, scales, 1.0)[:, None], usable[:, None]


def _codes(rows: Rounded, scales: Rounded, words: Array | None, name: str) -> Rounded:
    divisor, usable = _divisor(scales)
    steps = rows / divisor
    value = np.where(usable, steps.value, 0.0)
    exact = usable & _is_float32(divisor.value) & _is_float32(value)
    # The ends between nf4's values are rounded themselves.
    exact &= name != "nf4"
    error = np.where(usable & ~exact, steps.worst, 0.0) * UNIT
    low, mid, high = (_places(value + shift, name, words) for shift in (-error, 0.0, error))
    size = np.maximum(np.abs(high - mid), np.abs(mid - low)) / UNIT
    values = _floats(name)
    if values is not None:
        negative = np.signbit(value)
        # What a chip flushes has no sign either.
        size = np.where((mid == 0.0) & (rows.worst > 0.0), 256.0 / UNIT, size)
        mid = mid + np.where(negative, len(values), 0)
        mid = np.where(mid > 127, mid - 256, mid)
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
    x: Rounded, rng: NDArray[np.int64] | None, *, format: str, block: int
) -> tuple[Rounded, Rounded]:
    count = x.value.size
    rows = x.shaped(lambda array: _rows(array, block))
    words = None
    if rng is not None:
        drawn = philox.words(int(rng[0]), int(rng[1]), count) >> np.uint64(8)
        words = _rows(drawn.astype(np.float64), block)
    if format.startswith("mx_"):
        tops = np.abs(rows.value).max(1, initial=0.0)
        scales = Rounded.exact(_exponents(tops, _largest(format)))
        divisor = Rounded.exact(np.where(tops < SMALLEST_NORMAL, 0.0, _powers(scales.value)))
    else:
        divisor = scales = _scales(rows, _largest(format))
    codes = _codes(rows, divisor, words, format).shaped(lambda array: array.reshape(-1)[:count])
    return (codes if BYTES[format] == 1 else _packed(codes)), scales


def _dequantize(
    codes: NDArray[np.int8], scales: Any, *, shape: Sequence[int], format: str, block: int
) -> tuple[Rounded]:
    count, values = math.prod(shape), _floats(format)
    places, top = codes.astype(np.int64) & 255, 256
    if BYTES[format] < 1:
        places, top = np.stack([places & 15, places >> 4], -1).reshape(-1)[:count], 16
    if format == "nf4":
        numbers = _NF4[places]
    elif values is not None:
        numbers = np.concatenate([values, -values])[places]
        if format.endswith("e5m2"):
            numbers = np.where(
                places % 128 == 124, np.where(places > 128, -np.inf, np.inf), numbers
            )
    else:
        numbers = np.where(places >= top // 2, places - top, places).astype(np.float64)
    if format.startswith("mx_"):
        scales = Rounded.exact(_powers(np.asarray(scales, np.float64)))
    each = scales.shaped(lambda array: np.repeat(array, block)[:count])
    return ((Rounded.exact(numbers) * each).reshape(*shape),)


# Calls


def coded(draw: Draw, shape: tuple[int, ...], format: str, block: int = 32) -> Arguments:
    """Codes of any bits, but the one of int8 that quantize does not write."""
    count = math.prod(shape)
    span = 255 if format == "int8" else 256
    codes = draw.integers(span, num_bytes(format, count)) - (127 if format == "int8" else 128)
    if format.startswith("mx_"):
        scales = (draw.integers(16, -(-count // block)) + 119).to(torch.uint8)
    else:
        scales = draw.normal(-(-count // block), dtype=torch.float32).abs()
    return (codes.to(torch.int8), scales), {"shape": list(shape), "format": format, "block": block}


QUANTIZE = Oracle(forward=_quantize)
DEQUANTIZE = Oracle(forward=_dequantize)
