"""top_k of the CUDA kernels: rows that are sorted, searched by a block, and by the whole grid."""

import math

import pytest
import torch
from torch import Tensor

from tests.unit.backends_cuda.conftest import Chip, drawn
from tests.unit.dispatch.calls import bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Up to 2,048 a row is sorted whole, beside others; then a block looks for its largest.
LENGTHS = (1, 2, 3, 33, 64, 1023, 1024, 1025, 2047, 2048, 2049, 2056, 5001)


def _top_k(chip: Chip, x: Tensor, k: int) -> list[Tensor]:
    return list(chip.call("top_k", "forward", x, k=k))


def _want(x: Tensor, k: int) -> list[Tensor]:
    size = x.abs().double()
    size = torch.where(size.isnan(), torch.inf, torch.where(size.isinf(), 1e308, size))
    indices = torch.sort(size, dim=-1, descending=True, stable=True).indices[..., :k].contiguous()
    return [x.gather(-1, indices), indices]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_of_any_length_are_sorted_by_magnitude(
    chip: Chip, length: int, dtype: torch.dtype
) -> None:
    x = drawn(3, length, dtype=dtype)
    for k in {1, min(length, 40), length if length <= 2049 else 2048}:
        assert bits(_top_k(chip, x, k)) == bits(_want(x, k))


@pytest.mark.parametrize("length", [40, 3000, 140_000])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_of_equal_magnitudes_the_lower_index_comes_first(
    chip: Chip, dtype: torch.dtype, length: int
) -> None:
    x = drawn(2, length).mul(0.7).round().to(dtype)  # whole numbers, zeros of both signs
    for k in (1, 17, 39):
        assert bits(_top_k(chip, x, k)) == bits(_want(x, k))
    assert bits(_top_k(chip, torch.zeros(1, length), 9)) == bits(_want(torch.zeros(1, length), 9))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [20, 2500])
def test_nan_is_above_infinity_and_infinity_above_all_numbers(
    chip: Chip, length: int, dtype: torch.dtype
) -> None:
    x = drawn(2, length, dtype=dtype)
    x[0, 3], x[0, 9], x[0, 11], x[0, 1] = math.nan, -math.nan, -math.inf, math.inf
    x[1, 0], x[1, 7] = torch.finfo(dtype).max, torch.finfo(dtype).tiny / 4
    # Every NaN is as large as another, whatever its bits.
    numbers = x.view({4: torch.int32, 2: torch.int16}[dtype.itemsize])
    numbers[1, 5] = torch.tensor(math.inf, dtype=dtype).view(numbers.dtype) + 1
    numbers[1, 6] = torch.iinfo(numbers.dtype).max
    got, want = _top_k(chip, x, 12), _want(x, 12)
    assert bits(got[1]) == bits(want[1])
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "length", "k"), [
    (2, 3000, 2049), (1, 5003, 5003), (1, 9000, 4097), (1, 140_001, 7), (3, 2304, 2100),
], ids=lambda n: str(n))  # fmt: skip
def test_rows_that_the_whole_grid_searches_are_sorted_by_magnitude(
    chip: Chip, rows: int, length: int, k: int, dtype: torch.dtype
) -> None:
    assert chip.kernels.native.top_k_scratch(rows, length, k, 100) > 0
    x = drawn(rows, length, dtype=dtype)
    assert bits(_top_k(chip, x, k)) == bits(_want(x, k))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [7, 5000])
def test_largest_elements_at_the_end_of_a_row_that_the_whole_grid_searches(
    chip: Chip, k: int, dtype: torch.dtype
) -> None:
    """Were they not counted, as many others would be taken for the largest too."""
    x = drawn(1, 140_001, dtype=dtype)
    x[:, -8000:] *= 1000.0
    assert chip.kernels.native.top_k_scratch(1, 140_001, k, 100) > 0
    assert bits(_top_k(chip, x, k)) == bits(_want(x, k))


def test_scratch_that_was_used_before_changes_nothing(chip: Chip) -> None:
    native, x = chip.kernels.native, drawn(1, 3000).to(chip.device)
    size = native.top_k_scratch(1, 3000, 2500, 4)
    for fill in (0xFF, 0x00, 0x5A):
        scratch = torch.full((size,), fill, dtype=torch.uint8, device=chip.device)
        values, indices = x.new_empty(2500), x.new_empty(2500, dtype=torch.int64)
        addresses = [t.data_ptr() for t in (x, values, indices, scratch)]
        native.top_k(*addresses, 1, 3000, 2500, 4, native.FLOAT32, *chip.kernels.place(x))
        assert bits([values.cpu(), indices.cpu()]) == bits([t[0] for t in _want(x.cpu(), 2500)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_goes_to_where_a_value_came_from(chip: Chip, dtype: torch.dtype) -> None:
    x = drawn(5, 70, dtype=dtype)
    for k in (0, 1, 33, 70):
        _, indices = _want(x, k)
        grad = drawn(5, max(k, 1), dtype=dtype)[:, :k]
        (dx,) = chip.call("top_k", "backward", grad, indices, x, indices, k=k, needs=(True,))
        assert bits(dx) == bits(torch.zeros_like(x).scatter(-1, indices, grad))


def test_scratch_of_huge_rows_is_counted_in_64_bits(chip: Chip) -> None:
    scratch = chip.kernels.native.top_k_scratch
    assert scratch(3, 2**31, 2**30, 132) > 3 * 8 * 2**30
    assert scratch(4096, 50_000, 2048, 132) == 0
    assert scratch(4096, 2**20, 64, 132) == 0
