"""16-bit numbers: every one of them to float, every rounding boundary back, against torch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.unit.cuda_emulator.programs import build

pytestmark = pytest.mark.grid

DTYPES = {"half": torch.float16, "bfloat16": torch.bfloat16}
ALL = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
each_format = pytest.mark.parametrize("name", DTYPES)


@pytest.fixture(scope="session")
def conversions() -> ctypes.CDLL:
    return ctypes.CDLL(str(build("plain") / "libconversions.so"))


def call(function: ctypes._NamedFuncPointer, *arrays: NDArray[np.generic], count: int) -> None:
    addresses = [array.ctypes.data_as(ctypes.c_void_p) for array in arrays]
    function(*addresses, ctypes.c_int64(count))


def to_float(library: ctypes.CDLL, name: str, bits: torch.Tensor) -> torch.Tensor:
    wide = np.empty(bits.numel(), dtype=np.float32)
    call(library[f"{name}_to_float"], bits.numpy(), wide, count=bits.numel())
    return torch.from_numpy(wide)


def from_float(library: ctypes.CDLL, name: str, wide: torch.Tensor) -> torch.Tensor:
    bits = np.empty(wide.numel(), dtype=np.uint16)
    call(library[f"float_to_{name}"], wide.numpy(), bits, count=wide.numel())
    return torch.from_numpy(bits)


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """As int32, with one pattern for every NaN."""
    return torch.where(values.isnan(), 0x7FFF, values.view(torch.uint16).to(torch.int32))


@each_format
def test_every_number_to_float_is_exact(conversions: ctypes.CDLL, name: str) -> None:
    got, want = to_float(conversions, name, ALL), ALL.view(DTYPES[name]).float()
    same = got.view(torch.int32) == want.view(torch.int32)
    assert bool((same | want.isnan()).all())
    assert bool(got[want.isnan()].isnan().all())


def test_nan_to_float_has_the_devices_bits(conversions: ctypes.CDLL) -> None:
    nans = ALL[ALL.view(torch.float16).isnan()]
    assert set(to_float(conversions, "half", nans).view(torch.int32).tolist()) == {0x7FFFFFFF}
    nans = ALL[ALL.view(torch.bfloat16).isnan()]
    kept = to_float(conversions, "bfloat16", nans).view(torch.int32) >> 16 & 0xFFFF
    assert torch.equal(kept, nans.to(torch.int32))


def neighbourhoods(dtype: torch.dtype) -> torch.Tensor:
    """Each number of a type, the middle between it and the next, and the floats beside both."""
    numbers = ALL.view(dtype).double()
    numbers = numbers[numbers.isfinite()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    largest = torch.tensor([2 * numbers[-1] - numbers[-2]])
    past = torch.cat([(numbers[-1:] + largest) / 2, largest])
    centres = torch.cat([numbers, middles, past, -past]).float()
    beside = [torch.nextafter(centres, torch.tensor(to)) for to in (-torch.inf, torch.inf)]
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1e-45, 3.4e38])
    return torch.cat([centres, *beside, special])


@each_format
def test_every_rounding_boundary_from_float_is_torchs(conversions: ctypes.CDLL, name: str) -> None:
    wide = neighbourhoods(DTYPES[name])
    got, want = from_float(conversions, name, wide), wide.to(DTYPES[name])
    assert torch.equal(got.to(torch.int32), bits_of(want))


@each_format
def test_any_bits_from_float_are_torchs(conversions: ctypes.CDLL, name: str) -> None:
    generator = torch.Generator().manual_seed(20)
    bits = torch.randint(-(2**31), 2**31, (10_000_000,), generator=generator, dtype=torch.int64)
    wide = bits.to(torch.int32).view(torch.float32)
    got, want = from_float(conversions, name, wide), wide.to(DTYPES[name])
    assert torch.equal(got.to(torch.int32), bits_of(want))


# Arithmetic


def rounded(exact: Fraction, dtype: torch.dtype) -> float:
    """To nearest, ties to even, in exact arithmetic."""
    if exact == 0:
        return 0.0
    fraction_bits, least = (10, -14) if dtype == torch.float16 else (7, -126)
    exponent = max(math.frexp(float(exact))[1] - 1, least)
    unit = Fraction(2) ** (exponent - fraction_bits)
    value = float(round(exact / unit) * unit)
    return math.copysign(math.inf, value) if abs(value) > torch.finfo(dtype).max else value


def random_operands(dtype: torch.dtype) -> torch.Tensor:
    """(3, count): of sizes so different that sums keep only a part of a term, or nothing."""
    generator = torch.Generator().manual_seed(7)
    widest = 14 if dtype == torch.float16 else 40
    sizes = torch.randint(-widest, widest + 1, (3, 4000), generator=generator)
    return (torch.randn(3, 4000, generator=generator) * 2.0**sizes).to(dtype)


def ties(dtype: torch.dtype) -> torch.Tensor:
    """(3, count): the product lies between two numbers, and c tips it: rounded twice, it would not.

    An odd product of one bit more than the type holds is a tie.
    """
    first, last = (2048, 4096) if dtype == torch.float16 else (256, 512)
    factors = [(a, b) for b in (3, 5, 7) for a in range(first // b + 1, last // b)]
    odd = [(a, b) for a, b in factors if a * b % 2 and a < first]
    smallest = 2.0**-24 if dtype == torch.float16 else 2.0**-120
    triples = [(a, b, c) for a, b in odd for c in (-smallest, 0.0, smallest)]
    return torch.tensor(triples).T.contiguous().to(dtype)


@pytest.mark.parametrize("operands", [random_operands, ties])
@each_format
def test_arithmetic_rounds_the_exact_result_once(
    conversions: ctypes.CDLL, name: str, operands: Callable[[torch.dtype], torch.Tensor]
) -> None:
    dtype = DTYPES[name]
    values = operands(dtype)
    count = values.shape[1]
    results = np.empty((3, count), dtype=np.uint16)
    bits = values.view(torch.uint16).numpy()
    call(conversions[f"{name}_arithmetic"], *bits, results, count=count)
    exact = [[Fraction(number) for number in row] for row in values.tolist()]
    want = [
        [rounded(result, dtype) for result in (a + b, a * b, a * b + c)]
        for a, b, c in zip(*exact, strict=True)
    ]
    assert torch.from_numpy(results).view(dtype).T.tolist() == want
