"""Codes with block scales: which formats there are, and a tensor of them as one argument.

A block is a range of the flattened tensor; it has one scale, and a number is its code's value times
that. Codes are bytes (int8), two to a byte where they have 4 bits, the element of lower index in
the low nibble; after an odd number the last high nibble is 0.

============== ==== ======================================== =====================================
format         bits a code's value                           a block's scale
============== ==== ======================================== =====================================
int8, int4     8, 4 -127 to 127, -7 to 7, two's complement   float32: max |x| / 127, / 7
nf4            4    16 quantiles of a normal distribution    float32: max |x|
e4m3, e5m2     8    an 8-bit float, largest 448 and 57344    float32: max |x| / 448, / 57344
mx_e4m3, _e5m2 8    the same                                 a power of two, as its exponent + 127
mx_e2m1        4    a 4-bit float, largest 6                 in a uint8, of blocks of 32
============== ==== ======================================== =====================================

Dettmers et al. 2022, arXiv:2110.02861, section 2.1 (scales by block); Dettmers et al. 2023,
arXiv:2305.14314, appendix E (nf4); Micikevicius et al. 2022, arXiv:2209.05433, table 1 (e4m3,
e5m2); OCP Microscaling Formats 1.0, sections 5 and 6.3 (mx).
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
MX_BLOCK = 32


class Format(NamedTuple):
    """How numbers are coded.

    Attributes:
        bits: of a code, 8 or 4.
        largest: magnitude of the largest finite value.
        floats: exponent and mantissa bits of a float; None: integers, or ``table``.
        table: the values in the order of their codes.
        is_mx: blocks are of 32, and a scale is the exponent of a power of two.
    """

    bits: int
    largest: float
    floats: tuple[int, int] | None = None
    table: tuple[float, ...] = ()
    is_mx: bool = False

    @property
    def scale_dtype(self) -> torch.dtype:
        """Of a block's scale."""
        return torch.uint8 if self.is_mx else torch.float32

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes of so many elements."""
        return numel if self.bits == 8 else (numel + 1) // 2


FORMATS = {
    "int8": Format(8, 127.0), "int4": Format(4, 7.0), "nf4": Format(4, 1.0, table=NF4),
    "e4m3": Format(8, 448.0, (4, 3)), "e5m2": Format(8, 57344.0, (5, 2)),
    "mx_e4m3": Format(8, 448.0, (4, 3), is_mx=True),
    "mx_e5m2": Format(8, 57344.0, (5, 2), is_mx=True),
    "mx_e2m1": Format(4, 6.0, (2, 1), is_mx=True),
}  # fmt: skip


class Codes(NamedTuple):
    """A tensor as codes with block scales, in place of one argument of a call.

    For an argument ``codes`` it stands for ``codes``, the argument ``scales`` and the attributes
    ``shape``, ``format`` and ``block``; for one named ``weight``, say, for ``weight``,
    ``weight_scales``, ``weight_shape``, ``weight_format`` and ``weight_block``.

    Attributes:
        codes: int8, one dim.
        scales: one per block; float32, or uint8 of an MX format.
        shape: of the tensor that they stand for.
        format: a key of ``FORMATS``.
        block: elements per scale.
    """

    codes: Tensor
    scales: Tensor
    shape: tuple[int, ...]
    format: str
    block: int

    def as_arguments(self, name: str) -> dict[str, Any]:
        """What it stands for in a call, by name, the tensors first."""
        prefix = "" if name == "codes" else f"{name}_"
        return {name: self.codes} | {f"{prefix}{key}": getattr(self, key) for key in _REST}


_REST = ("scales", "shape", "format", "block")


def num_scales(numel: int, block: int) -> int:
    """Blocks; the last one may be shorter."""
    return (numel + block - 1) // block


def format_of(name: str, block: int) -> Format:
    """The format of a name.

    Raises:
        ValueError: there is none, or it has no such blocks.
    """
    found = FORMATS.get(name)
    if found is None:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {name!r}")
    if found.is_mx and block != MX_BLOCK:
        raise ValueError(f"{name} has blocks of {MX_BLOCK}, got {block}")
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    return found


def check_codes(
    codes: Tensor, scales: Tensor, *, shape: Sequence[int], format: str, block: int
) -> None:
    """Raises ValueError for codes or scales that are not those of a shape in a format."""
    found, numel = format_of(format, block), math.prod(shape)
    for name, tensor, wanted in (
        ("codes", codes, found.code_bytes(numel)),
        ("scales", scales, num_scales(numel, block)),
    ):
        if tensor.dim() != 1 or tensor.shape[0] != wanted:
            raise ValueError(
                f"{name} of {format} for shape {tuple(shape)} in blocks of {block} must have "
                f"shape ({wanted},), got {tuple(tensor.shape)}"
            )
    if scales.dtype != found.scale_dtype:
        raise ValueError(f"scales of {format} must be {found.scale_dtype}, got {scales.dtype}")


# Codes of whole numbers of bytes


def packed(codes: Tensor, bits: int) -> Tensor:
    """int8 bytes of codes, whose low ``bits`` count, in one dim."""
    if bits == 8:
        return codes.to(torch.int8)
    pairs = torch.nn.functional.pad(codes.to(torch.int8), (0, codes.shape[0] % 2)).view(-1, 2)
    return (pairs[:, 0] & 0xF) | (pairs[:, 1] << 4)


def unpacked(codes: Tensor, bits: int, numel: int) -> Tensor:
    """The opposite of :func:`packed`, with the sign of the highest bit."""
    if bits == 8:
        return codes
    # Shifting left and back by 4 extends the sign of the low nibble.
    return torch.stack([(codes << 4) >> 4, codes >> 4], dim=-1).reshape(-1)[:numel]


# What codes stand for


def float_values(exponent_bits: int, mantissa_bits: int) -> list[float]:
    """Values of a small float's codes without a sign, in their order; inf and NaN where there are.

    With 4 exponent bits only the last code is no number, with 5 it is as IEEE 754 has it, and with
    2 all are numbers (arXiv:2209.05433, table 1; OCP Microscaling Formats 1.0, section 5.3).
    """
    scale, found = 1 << mantissa_bits, []
    bias = (1 << exponent_bits - 1) - 1
    for code in range(1 << exponent_bits + mantissa_bits):
        exponent, mantissa = divmod(code, scale)
        significand = mantissa + (scale if exponent else 0)
        found.append(math.ldexp(significand, max(exponent, 1) - bias - mantissa_bits))
    if exponent_bits == 4:
        found[-1] = math.nan
    if exponent_bits == 5:
        found[-scale:] = [math.inf, *[math.nan] * (scale - 1)]
    return found


def encoded(steps: Tensor, found: Format) -> Tensor:
    """int8 codes of the values next to ``steps``, float32 and no NaN; what is larger is clamped.

    A half goes to the even code, but of nf4 to the lower one.
    """
    if found.table:
        ends = _boundaries(found.table, steps)
        return torch.bucketize(steps, ends).to(torch.int8)
    if found.floats is None:
        return torch.round(steps).clamp(-found.largest, found.largest).to(torch.int8)
    ends = _boundaries([v for v in float_values(*found.floats) if v <= found.largest], steps)
    sizes = steps.abs()
    low, high = torch.bucketize(sizes, ends), torch.bucketize(sizes, ends, right=True)
    codes = torch.where(low % 2 == 0, low, high)
    sign = 1 << sum(found.floats)
    return torch.where(torch.signbit(steps), codes | sign, codes).to(torch.int8)


def decoded(codes: Tensor, found: Format) -> Tensor:
    """float32 values of codes, one to an element."""
    if not (found.table or found.floats):
        return codes.float()
    if found.table:
        values = list(found.table)
    else:
        assert found.floats is not None
        values = float_values(*found.floats)
        values += [-value for value in values]
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    places = codes.long() & (len(values) - 1)
    # Not table[places]: an adapter may pass no index as an empty one.
    return table.index_select(0, places.reshape(-1)).view(places.shape)


def _boundaries(values: Sequence[float], like: Tensor) -> Tensor:
    """Halfway between neighbours, float32."""
    halves = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    return torch.tensor(halves, dtype=torch.float32, device=like.device)


def exponent_codes(tops: Tensor, largest: float) -> Tensor:
    """E8M0 scales of blocks by their largest magnitudes: floor(log2 top) less the format's own.

    At least 1, for 2^-126; 255 for a block with a NaN or an Inf.
    """
    exponents = (tops.contiguous().view(torch.int32) >> 23) & 0xFF
    scales = (exponents - math.frexp(largest)[1] + 1).clamp(1, 253)
    return torch.where(exponents == 255, 255, scales).to(torch.uint8)


def powers(scales: Tensor) -> Tensor:
    """float32 values of E8M0 scales; 255 is NaN, and 0 is 2^-127, which some chips flush."""
    found = (scales.to(torch.int32) << 23).view(torch.float32)
    found = torch.where(scales == 0, 2.0**-127, found)
    return torch.where(scales == 255, math.nan, found)
