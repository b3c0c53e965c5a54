"""hadamard of the CUDA kernels: every length, against the product with the matrix of signs."""

import math

import pytest
import torch
from torch import Tensor

from tests.unit.backends_cuda.conftest import Chip
from tests.unit.dispatch.calls import bits
from tests.unit.operators.exactness import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _want(x: Tensor, length: int) -> Tensor:
    """By halves: H of 2n is [[H, H], [H, -H]]."""
    if length == 1:
        return x
    first, second = x[..., : length // 2], x[..., length // 2 :]
    parts = [_want(first + second, length // 2), _want(first - second, length // 2)]
    return torch.cat(parts, -1) / math.sqrt(2.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [2**bits for bits in range(16)])
def test_every_length_is_the_product_with_the_matrix(
    chip: Chip, length: int, dtype: torch.dtype
) -> None:
    # A part of a tile, one tile and a part, of the kernels that have several transforms in one.
    rows = max(1, 1_100 // length) if length <= 1024 else 2 if length <= 8192 else 1
    x = torch.randn(rows, length, generator=torch.Generator().manual_seed(length)).to(dtype)
    got = chip.call("hadamard", "forward", x, block=None)
    # Each entry is a sum of `length` terms in a tree, then one product.
    assert_close(got, _want(x.double(), length), 2 + math.log2(length))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [2, 32, 1024, 4096])
def test_tensors_at_any_address_have_the_bits_of_their_copies(
    chip: Chip, length: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(2 * length + 3, 2, generator=generator).to(dtype).to(chip.device)
    for x in (
        whole.view(-1)[1 : 2 * length + 1], whole.view(-1)[3 : 3 + length], whole[:length].t(),
    ):  # fmt: skip
        assert bits(chip.call("hadamard", "forward", x, block=length)) == bits(
            chip.call("hadamard", "forward", x.contiguous().clone(), block=length)
        )


def test_longer_transforms_than_a_block_holds_are_for_another_row(chip: Chip) -> None:
    (forward,) = chip.table.rows("hadamard", "forward")
    (backward,) = chip.table.rows("hadamard", "backward")
    longest = chip.kernels.native.LONGEST_HADAMARD
    assert longest in forward.limits["block"]
    assert 2 * longest not in forward.limits["block"]
    assert backward.accepts is not None
    grad = torch.empty(1, 2 * longest, device="meta")
    assert backward.accepts(grad, block=longest)
    assert not backward.accepts(grad, block=None)
