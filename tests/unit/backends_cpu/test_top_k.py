"""top_k of the native kernels: rows that are sorted whole, and those of which a part is."""

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


def test_row_whose_large_numbers_no_sample_finds_is_sorted_whole() -> None:
    """512 blocks of 16 are looked at: all of them large here, and nothing else is."""
    length, k = 1 << 20, 10_000
    large = torch.zeros(512, length // 512)
    large[:, :16] = 100.0
    for x in (large.flatten() + _normal(length), (100.0 - large.flatten()) + _normal(length)):
        assert bits(_top_k(x, k)) == bits(_want(x, k))
