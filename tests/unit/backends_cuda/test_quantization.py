"""quantize and dequantize of the CUDA kernels: blocks of any length, and the host's own bits."""

import math

import pytest
import torch
from torch import Tensor

from anychip import operators
from tests.unit.backends_cuda.conftest import Chip, drawn
from tests.unit.dispatch.calls import bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of 32 elements a float32 block is 2 lanes; 64 and 512: between one and all lanes of a warp; 513 is
# no multiple of a vector; 1,032 and 4,096 are a block of the grid's; 40,000 and 1 take passes.
BLOCKS = (1, 3, 8, 32, 64, 256, 512, 513, 1032, 4096, 40_000)


def _quantize(chip: Chip, x: Tensor, rng: Tensor | None, width: int, block: int) -> list[Tensor]:
    return list(chip.call("quantize", "forward", x, rng, format=f"int{width}", block=block))


def _want(x: Tensor, rng: Tensor | None, width: int, block: int) -> list[Tensor]:
    return list(operators.quantize.forward(x, rng, format=f"int{width}", block=block))


@pytest.mark.parametrize("random", [False, True], ids=["nearest", "random"])
@pytest.mark.parametrize("width", [8, 4], ids=["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_of_any_length_have_the_bits_of_the_reference(
    chip: Chip, block: int, dtype: torch.dtype, width: int, random: bool
) -> None:
    # Several blocks, the last one short; an odd number, so that a byte is half full.
    x = drawn(max(1, 2_300 // block) * block + block // 3 + (0 if block % 2 else 1), dtype=dtype)
    rng = torch.tensor([17, 2**32 - 3]) if random else None
    assert bits(_quantize(chip, x, rng, width, block)) == bits(_want(x, rng, width, block))


@pytest.mark.parametrize("width", [8, 4], ids=["int8", "int4"])
@pytest.mark.parametrize("block", [32, 256, 2048])
def test_halves_go_to_even_and_their_neighbours_to_the_nearest(
    chip: Chip, block: int, width: int
) -> None:
    largest = 127 if width == 8 else 7
    halves = torch.arange(-largest, largest, dtype=torch.float32) + 0.5
    up, down = halves.nextafter(halves + 1), halves.nextafter(halves - 1)
    x = torch.cat([torch.tensor([float(largest)]), halves, up, down])
    x = torch.cat([x.new_tensor([float(largest), *part]) for part in x.split(block - 1)])
    assert bits(_quantize(chip, x, None, width, block)) == bits(_want(x, None, width, block))


@pytest.mark.parametrize("block", [4, 64, 1024, 40_000])
def test_numbers_that_are_not_finite_or_tiny_stay_in_their_block(chip: Chip, block: int) -> None:
    x = drawn(6 * block, dtype=torch.float32)
    x[1], x[block], x[3 * block - 1] = math.nan, math.inf, -math.inf
    x[3 * block : 4 * block] = -0.0
    x[4 * block : 5 * block] = 1e-38
    codes, scales = _quantize(chip, x, None, 8, block)
    want = _want(x, None, 8, block)
    # Which NaN it is, is not said.
    torch.testing.assert_close(scales, want[1], rtol=0, atol=0, equal_nan=True)
    assert bits(codes) == bits(want[0])


@pytest.mark.parametrize("start", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_at_any_address_have_the_bits_of_their_copies(
    chip: Chip, dtype: torch.dtype, start: int
) -> None:
    whole = drawn(1_500, dtype=dtype).to(chip.device)
    (row,) = chip.table.rows("quantize", "forward")
    for x in (whole[start:], whole.view(30, 50).t(), whole[::2]):
        for width in (8, 4):
            got = row.function(x, None, format=f"int{width}", block=64)
            want = row.function(x.clone().contiguous(), None, format=f"int{width}", block=64)
            assert bits([t.cpu() for t in got]) == bits([t.cpu() for t in want])


@pytest.mark.parametrize("width", [8, 4], ids=["int8", "int4"])
@pytest.mark.parametrize("block", [1, 3, 4, 64, 300, 5000])
@pytest.mark.parametrize("numel", [1, 3, 4, 31, 4096, 5003])
def test_dequantize_is_the_product_of_code_and_scale(
    chip: Chip, numel: int, block: int, width: int
) -> None:
    x = drawn(numel, dtype=torch.float32)
    codes, scales = _want(x, None, width, block)
    attrs = {"shape": (numel,), "format": f"int{width}", "block": block}
    want = operators.dequantize.forward(codes, scales, **attrs)
    # Codes at an odd address, too: no access of several bytes.
    for given in (codes, chip.at(codes, 1)):
        assert bits(chip.call("dequantize", "forward", given, scales, **attrs)) == bits(want)
