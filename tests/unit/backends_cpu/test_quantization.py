"""The native quantize and dequantize next to the references: bits with bits, in every format."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import anychip
from anychip import operators
from anychip.operators.codes import FORMATS
from anychip_cpu import native, quantization
from tests.unit.dispatch.calls import bits

pytestmark = pytest.mark.skipif(native.kernels is None, reason=str(native.problem))

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUMEL = 5003
"""Past a group of blocks, and odd: the last half byte stays empty."""


@pytest.fixture(params=native.kernels.available_isas() if native.kernels else [])
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    assert native.kernels is not None
    used = native.kernels.build_info()["isa"]
    native.kernels.set_isa(request.param)
    yield
    native.kernels.set_isa(used)


def _values(kind: str, dtype: torch.dtype) -> Tensor:
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    if kind == "halves":  # steps between two codes, and zeros of both signs
        x = (x * 4).round() / 2
        x = torch.where(x == 0, -0.0, x)
        x[::64] = 127.0
    if kind == "far apart":
        reach = 24 if dtype == torch.float16 else 148
        x *= torch.exp2(torch.arange(NUMEL) % reach - float(reach - 14 if reach == 24 else 126))
    if kind == "not finite":
        x[NUMEL // 2], x[NUMEL // 3] = math.nan, -math.inf
    return x.to(dtype)


def _same(got: tuple[Tensor, ...] | Tensor, want: tuple[Tensor, ...] | Tensor) -> bool:
    """Bits, with every NaN as one."""
    pairs = [[got], [want]] if isinstance(got, Tensor) else [got, want]
    cleared = [[torch.nan_to_num(t, nan=12345.0, posinf=math.inf, neginf=-math.inf)
                if t.is_floating_point() else t for t in ts] for ts in pairs]  # fmt: skip
    return bool(bits(cleared[0]) == bits(cleared[1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "halves", "far apart", "not finite"])
@pytest.mark.parametrize("format", FORMATS)
def test_codes_and_numbers_have_the_bits_of_the_references(
    format: str, kind: str, dtype: torch.dtype, isa: None
) -> None:
    x = _values(kind, dtype)
    for block in (32,) if FORMATS[format].is_mx else (1, 33, 256, 10**6):
        attrs = {"format": format, "block": block}
        want = operators.quantize.forward(x, None, **attrs)
        assert _same(quantization.quantize(x, None, format=format, block=block), want), block
        codes = (torch.arange(want[0].shape[0]) % 256 - 128).to(torch.int8)
        numbers = operators.dequantize.forward(codes, want[1], shape=(NUMEL,), **attrs)
        got = quantization.dequantize(codes, want[1], shape=(NUMEL,), format=format, block=block)
        assert _same(got, numbers), block


@pytest.mark.parametrize("block", [3, 64, 257])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_numbers_drawn_have_the_bits_of_the_reference(format: str, block: int, isa: None) -> None:
    x, rng = _values("halves", torch.float32) * 1.1, torch.tensor([3, 2**32 - 5])
    want = operators.quantize.forward(x, rng, format=format, block=block)
    assert _same(quantization.quantize(x, rng, format=format, block=block), want)


def test_tensors_that_are_not_contiguous_are_read_where_they_are() -> None:
    x, rng = torch.randn(40, 30).t(), torch.tensor([[3, 0], [5, 0]])[:, 0]
    with anychip.policy(fallback="strict"):
        codes, scales = anychip.ops.quantize(x, rng, format="int4", block=16)
        spread = torch.stack([codes, codes], 1)[:, 0]
        y = anychip.ops.dequantize(spread, scales, shape=[30, 40], format="int4", block=16)
    want = operators.quantize.forward(x.contiguous(), rng.contiguous(), format="int4", block=16)
    assert bits([codes, scales]) == bits(list(want))
    attrs = {"shape": (30, 40), "format": "int4", "block": 16}
    assert bits([y]) == bits([operators.dequantize.forward(*want, **attrs)])
