"""top_k of the native kernels: rows that are sorted whole, and those of which a part is."""

import math

import pytest
import torch
from torch import Tensor

import anychip
from anychip import ops
from anychip_cpu import native
from tests.unit.dispatch.calls import bits

pytestmark = pytest.mark.skipif(native.kernels is None, reason=str(native.problem))

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Around a vector's width, what is sorted by comparisons, and what is sampled.
LENGTHS = [0, 1, 2, 15, 17, 33, 255, 256, 767, 768, 769, 4095, 5001, 70_001]


def _normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _top_k(x: Tensor, k: int) -> list[Tensor]:
    with anychip.policy(fallback="strict"):
        return list(ops.top_k(x, k=k))


def _want(x: Tensor, k: int) -> list[Tensor]:
    size = x.abs().double()
    size = torch.where(size.isnan(), torch.inf, torch.where(size.isinf(), 1e308, size))
    indices = torch.sort(size, dim=-1, descending=True, stable=True).indices[..., :k].contiguous()
    # As whole numbers: torch makes other NaN of bfloat16 ones.
    numbers = x.view({4: torch.int32, 2: torch.int16}[x.dtype.itemsize])
    return [numbers.gather(-1, indices).view(x.dtype), indices]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_of_any_length_are_sorted_by_magnitude(length: int, dtype: torch.dtype) -> None:
    x = _normal(300 if length < 40 else 3, length, dtype=dtype)
    for k in {0, min(1, length), min(length, 40), length // 9, length}:
        assert bits(_top_k(x, k)) == bits(_want(x, k))
    x = _normal(length, 3, dtype=dtype).t()
    assert bits(_top_k(x, length // 2)) == bits(_want(x, length // 2))


@pytest.mark.parametrize("length", [40, 3000, 50_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_equal_magnitudes_the_lower_index_comes_first(dtype: torch.dtype, length: int) -> None:
    x = _normal(2, length).mul(0.7).round().to(dtype)  # whole numbers, zeros of both signs
    for k in (1, 17, 39):
        assert bits(_top_k(x, k)) == bits(_want(x, k))
    assert bits(_top_k(torch.zeros(1, length), 9)) == bits(_want(torch.zeros(1, length), 9))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [20, 2500, 9000])
def test_nan_is_above_infinity_and_infinity_above_all_numbers(
    length: int, dtype: torch.dtype
) -> None:
    x = _normal(2, length, dtype=dtype)
    x[0, 3], x[0, 9], x[0, 11], x[0, 1] = math.nan, -math.nan, -math.inf, math.inf
    x[1, 0], x[1, 7] = torch.finfo(dtype).max, torch.finfo(dtype).tiny / 4
    # Every NaN is as large as another, whatever its bits.
    numbers = x.view({4: torch.int32, 2: torch.int16}[x.dtype.itemsize])
    numbers[1, 5] = torch.tensor(math.inf, dtype=dtype).view(numbers.dtype) + 1
    numbers[1, 6] = torch.iinfo(numbers.dtype).max
    assert bits(_top_k(x, 7)) == bits(_want(x, 7))


def test_row_whose_large_numbers_no_sample_finds_is_sorted_whole() -> None:
    """512 blocks of 16 are looked at: all of them large here, and nothing else is."""
    length, k = 1 << 20, 10_000
    large = torch.zeros(512, length // 512)
    large[:, :16] = 100.0
    for x in (large.flatten() + _normal(length), (100.0 - large.flatten()) + _normal(length)):
        assert bits(_top_k(x, k)) == bits(_want(x, k))
