"""quantize and dequantize: formats next to torch's and to published errors, words of shards, bits
of all rows, bytes, one argument for all, and what is refused."""

import numpy as np
import pytest
import torch
from torch import Tensor

import anychip
from anychip import ops
from anychip.conformance.oracles import ORACLES, philox
from anychip.conformance.oracles.oracle import numbers
from anychip.operators.codes import FORMATS
from tests.unit.dispatch.calls import bits


def round_trip(x: Tensor, rng: Tensor, *, format: str, block: int) -> Tensor:
    codes, scales = ops.quantize(x, rng, format=format, block=block)
    return ops.dequantize(codes, scales, shape=list(x.shape), format=format, block=block)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_random_words_belong_to_the_index_of_the_whole_tensor(format: str) -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(3))
    whole = round_trip(x, torch.tensor([1, 100]), format=format, block=64)
    shard = round_trip(x[128_000:], torch.tensor([1, 100 + 32_000]), format=format, block=64)
    assert torch.equal(whole[128_000:], shard)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_rows_and_threads_give_the_bits_of_the_reference(format: str) -> None:
    x = torch.randn(323_457, generator=torch.Generator().manual_seed(4))
    rng, found = torch.tensor([9, 2**32 - 3]), []
    threads = torch.get_num_threads()
    try:
        for number, pinned in ((1, "reference"), (1, "cpu"), (2, "cpu")):
            torch.set_num_threads(number)
            with anychip.policy(pin={"quantize": pinned, "dequantize": pinned}):
                codes, scales = ops.quantize(x, rng, format=format, block=96)
                y = ops.dequantize(codes, scales, shape=[x.numel()], format=format, block=96)
            found.append(bits([codes, scales, y]))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]


FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("format", FLOATS)
def test_codes_of_small_floats_are_torchs_of_every_16_bit_number(format: str) -> None:
    """A block for each number, next to the largest value, so that the scale is 1."""
    every = torch.arange(2**16).to(torch.uint16).view(torch.float16).float()
    every = every[every.abs() <= FORMATS[format].largest]
    largest = torch.full_like(every, FORMATS[format].largest)
    pairs = torch.stack([every, largest], 1)
    codes, scales = ops.quantize(pairs, format=format, block=2)
    assert torch.equal(scales, torch.ones(len(every)))
    want = every.to(FLOATS[format]).view(torch.int8)
    assert torch.equal(codes.view(-1, 2)[:, 0], want)
    again = ops.dequantize(codes, scales, shape=[len(every), 2], format=format, block=2)
    assert torch.equal(again[:, 0], want.view(FLOATS[format]).float())


@pytest.mark.parametrize(("format", "block", "error"), [
    ("int8", 64, 5.93e-3), ("int4", 64, 0.1077), ("nf4", 64, 0.0920), ("e4m3", 256, 2.64e-2),
    ("e5m2", 256, 5.26e-2),
])  # fmt: skip
def test_error_of_normal_numbers_is_what_the_format_is_known_for(
    format: str, block: int, error: float
) -> None:
    """Relative root mean square; 2 % of it is more than a sample of 2^20 strays."""
    x = torch.randn(2**20, generator=torch.Generator().manual_seed(1))
    y = ops.dequantize(ops.coded(x, format=format, block=block))
    assert float((y - x).norm() / x.norm()) == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize("format", ["mx_e4m3", "mx_e5m2", "mx_e2m1"])
def test_scales_of_mx_formats_are_the_powers_of_the_specification(format: str) -> None:
    """OCP Microscaling Formats 1.0, section 6.3: floor(log2 max) less the format's exponent."""
    largest = {"mx_e4m3": 8, "mx_e5m2": 15, "mx_e2m1": 2}[format]
    tops = torch.tensor([1.0, 1.999, 2.0, 6.0, 448.0, 2.0**-100, 2.0**120, 0.0])
    codes, scales = ops.quantize(tops[:, None].expand(-1, 32), format=format, block=32)
    powers = [max(int(np.floor(np.log2(t))) - largest, -126) if t else -126 for t in tops.tolist()]
    assert scales.tolist() == [power + 127 for power in powers]
    y = ops.dequantize(codes, scales, shape=[8, 32], format=format, block=32)
    most = torch.tensor([2.0**power * FORMATS[format].largest for power in powers])
    assert torch.all((y[:, 0] - torch.minimum(tops, most)).abs() <= tops / 8)


def test_codes_as_one_argument_are_those_of_five() -> None:
    x = torch.randn(7, 9, generator=torch.Generator().manual_seed(2))
    for format in FORMATS:
        codes = ops.coded(x, format=format, block=32)
        parts = {"shape": [7, 9], "format": format, "block": 32}
        want = ops.dequantize(codes.codes, codes.scales, **parts)
        assert torch.equal(ops.dequantize(codes), want)
        assert torch.equal(ops.dequantize(codes=codes), want)
        assert torch.equal(torch.ops.anychip.dequantize(codes.codes, codes.scales, **parts), want)
    with pytest.raises(TypeError, match="got 'format' twice"):
        ops.dequantize(codes, format="int8")


def test_quantize_oracle_leaves_open_only_what_rounding_may_change() -> None:
    forward = ORACLES["quantize"].forward
    x = torch.tensor([127.0, 0.5, 1.5, -2.5, 3.0])
    codes, scales = forward(numbers(x), None, format="int8", block=8)
    assert codes.value.tolist() == [127.0, 0.0, 2.0, -2.0, 3.0]
    assert scales.value.tolist() == [1.0]
    assert not codes.worst.any()
    packed, _ = forward(numbers(torch.tensor([7.0, -1.0, -7.0])), None, format="int4", block=8)
    assert [int(c) & 255 for c in packed.value] == [0xF7, 0x09]
    # 100 / 3 and 200 / 6 are halves but for a rounding: the scale of 127 / 3 is not exact.
    near = torch.tensor([127.0 / 3, 0.5 / 3])
    codes, _ = forward(numbers(near), None, format="int8", block=8)
    assert codes.worst[1] > 0.0
    drawn = philox.words(3, 4, 5) >> np.uint64(8)
    codes, _ = forward(numbers(x), np.array([3, 4]), format="int8", block=8)
    want = [127, int(drawn[1] < 2**23), 1 + int(drawn[2] < 2**23), -3 + int(drawn[3] < 2**23), 3]
    assert codes.value.tolist() == want
