"""quantize and dequantize of the CUDA kernels: blocks of any length, and the host's own bits."""

import math

import pytest
import torch
from torch import Tensor

from anychip import operators
from anychip.operators.codes import FORMATS, MX_BLOCK, decoded
from tests.unit.backends_cuda.conftest import Chip, drawn
from tests.unit.dispatch.calls import bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of 32 elements a float32 block is 2 lanes; 64 and 512: between one and all lanes of a warp; 513 is
# no multiple of a vector; 1,032 and 4,096 are a block of the grid's; 40,000 and 1 take passes.
BLOCKS = (1, 3, 8, 32, 64, 256, 512, 513, 1032, 4096, 40_000)
MX = tuple(name for name, found in FORMATS.items() if found.is_mx)
PLAIN = tuple(name for name in FORMATS if name not in MX)


def _quantize(chip: Chip, x: Tensor, rng: Tensor | None, format: str, block: int) -> list[Tensor]:
    return list(chip.call("quantize", "forward", x, rng, format=format, block=block))


def _want(x: Tensor, rng: Tensor | None, format: str, block: int) -> list[Tensor]:
    return list(operators.quantize.forward(x, rng, format=format, block=block))


@pytest.mark.parametrize(("format", "block", "random"), [
    *((name, block, False) for name in PLAIN for block in BLOCKS),
    *((name, block, True) for name in ("int8", "int4") for block in BLOCKS),
    *((name, MX_BLOCK, False) for name in MX),
])  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_any_length_have_the_bits_of_the_reference(
    chip: Chip, block: int, dtype: torch.dtype, format: str, random: bool
) -> None:
    # Several blocks, the last one short; an odd number, so that a byte is half full.
    x = drawn(max(1, 2_300 // block) * block + block // 3 + (0 if block % 2 else 1), dtype=dtype)
    rng = torch.tensor([17, 2**32 - 3]) if random else None
    assert bits(_quantize(chip, x, rng, format, block)) == bits(_want(x, rng, format, block))


@pytest.mark.parametrize(("format", "block"), [
    *((name, block) for name in PLAIN for block in (32, 256, 2048)), *((name, 32) for name in MX),
])  # fmt: skip
def test_halves_go_to_even_and_their_neighbours_to_the_nearest(
    chip: Chip, block: int, format: str
) -> None:
    largest = FORMATS[format].largest
    values = decoded(torch.arange(256, dtype=torch.int16).to(torch.int8), FORMATS[format])
    values = values[values.isfinite()].unique()  # in order
    halves = (values[1:] + values[:-1]) / 2
    up, down = halves.nextafter(halves + 1), halves.nextafter(halves - 1)
    x = torch.cat([values, -values[values == 0], halves, up, down])
    x = torch.cat([x.new_tensor([largest, *part]) for part in x.split(block - 1)])
    assert bits(_quantize(chip, x, None, format, block)) == bits(_want(x, None, format, block))


@pytest.mark.parametrize(("format", "block"), [
    *(("int8", block) for block in (4, 64, 1024, 40_000)),
    *(("nf4", 64), ("e5m2", 64), ("mx_e4m3", 32)),
])  # fmt: skip
def test_numbers_that_are_not_finite_or_tiny_stay_in_their_block(
    chip: Chip, format: str, block: int
) -> None:
    x = drawn(6 * block, dtype=torch.float32)
    x[1], x[block], x[3 * block - 1] = math.nan, math.inf, -math.inf
    x[3 * block : 4 * block] = -0.0
    x[4 * block : 5 * block] = 1e-38
    codes, scales = _quantize(chip, x, None, format, block)
    want = _want(x, None, format, block)
    # Which NaN it is, is not said.
    torch.testing.assert_close(scales, want[1], rtol=0, atol=0, equal_nan=True)
    assert bits(codes) == bits(want[0])


@pytest.mark.parametrize(("format", "block"), [
    *((name, block) for name in PLAIN for block in (1, 3, 4, 64, 300, 5000)),
    *((name, MX_BLOCK) for name in MX),
])  # fmt: skip
@pytest.mark.parametrize("numel", [1, 3, 4, 31, 4096, 5003])
def test_dequantize_is_the_product_of_code_and_scale(
    chip: Chip, numel: int, block: int, format: str
) -> None:
    codes, scales = _want(drawn(numel, dtype=torch.float32), None, format, block)
    attrs = {"shape": (numel,), "format": format, "block": block}
    want = operators.dequantize.forward(codes, scales, **attrs)
    # Codes at an odd address, too: no access of several bytes.
    for given in (codes, chip.at(codes, 1)):
        assert bits(chip.call("dequantize", "forward", given, scales, **attrs)) == bits(want)


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_and_scale_has_its_value(chip: Chip, format: str) -> None:
    found = FORMATS[format]
    codes = torch.arange(256, dtype=torch.int16).to(torch.int8).repeat(256)
    numel = codes.numel() * 8 // found.bits
    num_blocks = numel // MX_BLOCK
    scales = torch.arange(num_blocks) % 256 if found.is_mx else torch.ones(num_blocks)
    attrs = {"shape": (numel,), "format": format, "block": MX_BLOCK}
    args = (codes, scales.to(found.scale_dtype))
    got = chip.call("dequantize", "forward", *args, **attrs)
    want = operators.dequantize.forward(*args, **attrs)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit() | got.isnan(), want.signbit() | want.isnan())


def test_format_that_is_none_is_an_error(chip: Chip) -> None:
    place = chip.kernels.place(torch.empty(0, device=chip.device))
    with pytest.raises(ValueError, match="no format int5"):
        chip.kernels.native.dequantize(0, 0, 0, 0, 1, "int5", *place)
