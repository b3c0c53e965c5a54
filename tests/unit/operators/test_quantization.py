"""quantize and dequantize: known codes, published errors, and random rounding that is fair."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import anychip
from anychip import ops
from tests.unit.dispatch.calls import DTYPES, bits
from tests.unit.operators.philox import stream

LARGEST = {8: 127, 4: 7}
# Relative root mean square error on 2^20 normal numbers, round to nearest: measured
# with other code; within 2 %.
GOLDEN = {
    (8, 64): 5.93e-3, (8, 256): 6.97e-3, (8, 2048): 8.31e-3,
    (4, 64): 0.1077, (4, 256): 0.1265, (4, 2048): 0.1506,
}  # fmt: skip


@pytest.fixture(params=["cpu", "reference"])
def pin(request: pytest.FixtureRequest) -> Iterator[str]:
    with anychip.policy(pin={"quantize": request.param, "dequantize": request.param}):
        yield request.param


def round_trip(x: Tensor, rng: Tensor | None = None, *, bits: int, block: int) -> Tensor:
    codes, scales = ops.quantize(x, rng, bits=bits, block=block)
    return ops.dequantize(codes, scales, shape=list(x.shape), bits=bits, block=block)


@pytest.mark.parametrize(("bits", "block"), GOLDEN)
def test_error_on_normal_numbers_is_the_published_one(bits: int, block: int) -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    error = float((round_trip(x, bits=bits, block=block) - x).norm() / x.norm())
    assert error == pytest.approx(GOLDEN[bits, block], rel=0.02)


def test_codes_of_a_known_block(pin: str) -> None:
    x = torch.tensor([[1.0, -2.0, 127.0], [0.5, 1.5, 2.5], [-0.5, -127.0, 63.49]])
    codes, scales = ops.quantize(x, bits=8, block=9)
    assert scales.tolist() == [1.0]
    assert codes.dtype == torch.int8
    # Halves go to the even neighbour.
    assert codes.tolist() == [1, -2, 127, 0, 2, 2, 0, -127, 63]


def test_int4_is_packed_low_nibble_first_in_twos_complement(pin: str) -> None:
    x = torch.tensor([7.0, -1.0, 3.0, -7.0, 2.0])
    codes, scales = ops.quantize(x, bits=4, block=8)
    assert scales.tolist() == [1.0]
    assert [c & 0xFF for c in codes.tolist()] == [0xF7, 0x93, 0x02]
    assert ops.dequantize(codes, scales, shape=[5], bits=4, block=8).tolist() == x.tolist()


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_at_most_half_a_step(num_bits: int, dtype: torch.dtype, pin: str) -> None:
    x = torch.randn(3, 5, 67, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[1] *= 100.0
    got = round_trip(x, bits=num_bits, block=48)
    assert got.shape == x.shape
    assert got.dtype == torch.float32
    flat = torch.nn.functional.pad(x.float().flatten(), (0, -x.numel() % 48)).view(-1, 48)
    step = flat.abs().amax(1, keepdim=True) / LARGEST[num_bits]
    # x / scale is at most 127, and off by three roundings.
    allowed = (step * (0.5 + 3 * 127 * 2.0**-24)).expand_as(flat).flatten()[: x.numel()]
    assert bool(((got - x.float()).flatten().abs() <= allowed).all())


def test_blocks_are_independent_of_each_other(pin: str) -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(2))
    codes, scales = ops.quantize(x, bits=4, block=100)
    for start in (0, 35_000, 99_900):
        alone = ops.quantize(x[start : start + 100], bits=4, block=100)
        part = codes[start // 2 : start // 2 + 50], scales[start // 100 : start // 100 + 1]
        assert bits(list(part)) == bits(list(alone))


@pytest.mark.parametrize("num_bits", [8, 4])
def test_block_of_zeros_has_scale_zero(num_bits: int, pin: str) -> None:
    x = torch.zeros(12)
    x[4:8] = torch.tensor([1.0, -1.0, 0.0, -0.0])
    codes, scales = ops.quantize(x, bits=num_bits, block=4)
    assert scales[0] == scales[2] == 0.0
    assert round_trip(x, bits=num_bits, block=4).tolist() == x.tolist()
    assert not codes[: 4 if num_bits == 8 else 2].any()


@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-37])
def test_block_too_small_for_a_normal_scale_is_zeros(size: float, pin: str) -> None:
    codes, scales = ops.quantize(torch.full((4,), size), bits=8, block=4)
    assert not scales.any()
    assert not codes.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("num_bits", [8, 4])
def test_block_with_a_number_that_is_not_finite_comes_back_as_nan(
    num_bits: int, bad: float, pin: str
) -> None:
    x = torch.ones(12)
    x[5] = bad
    codes, scales = ops.quantize(x, bits=num_bits, block=4)
    assert not math.isfinite(scales[1])
    assert not codes[4:8].any() if num_bits == 8 else not codes[2:4].any()
    got = ops.dequantize(codes, scales, shape=[12], bits=num_bits, block=4)
    assert got[4:8].isnan().all()
    assert got[:4].tolist() == got[8:].tolist() == pytest.approx([1.0] * 4)


@settings(max_examples=40)
@given(
    numel=st.integers(0, 70), block=st.integers(1, 80), num_bits=st.sampled_from([4, 8]),
    seed=st.integers(-(2**63), 2**63 - 1), offset=st.integers(-(2**63), 2**63 - 1),
)  # fmt: skip
def test_random_rounding_goes_up_as_the_word_of_the_element_says(
    numel: int, block: int, num_bits: int, seed: int, offset: int
) -> None:
    largest = LARGEST[num_bits]
    x = np.sin(np.arange(numel, dtype=np.float32) * 3 + 1, dtype=np.float32)
    words = stream(seed, offset, numel) >> np.uint64(8)
    want = []
    for start in range(0, numel, block):
        part = x[start : start + block]
        scale = np.float32(np.abs(part).max() / np.float32(largest))
        for value, word in zip(part / scale, words[start : start + block], strict=True):
            below = math.floor(value)
            up = int(word) < (float(value) - below) * 2**24
            want.append(max(-largest, min(largest, below + up)))
    given_rng = torch.tensor([seed, offset])
    for pinned in ("cpu", "reference"):
        with anychip.policy(pin={"quantize": pinned}):
            codes, _ = ops.quantize(torch.from_numpy(x), given_rng, bits=num_bits, block=block)
        got = codes.tolist()
        if num_bits == 4:
            nibbles = [n for c in got for n in (c & 15, c >> 4 & 15)][:numel]
            got = [n - 16 if n > 7 else n for n in nibbles]
        assert got == want


@pytest.mark.parametrize("num_bits", [8, 4])
def test_random_rounding_is_right_on_average(num_bits: int) -> None:
    x = torch.linspace(-1.0, 1.0, 1021)
    rounds = 400
    total = torch.zeros_like(x)
    for seed in range(rounds):
        total += round_trip(x, torch.tensor([seed, 0]), bits=num_bits, block=2048)
    step = 1.0 / LARGEST[num_bits]
    # Standard deviation of one: at most half a step. Six of the mean's; the stream is fixed.
    error = (total / rounds - x).abs()
    assert float(error.max()) < 6 * 0.5 * step / rounds**0.5
    assert float((total / rounds - x).mean().abs()) < 6 * 0.5 * step / (rounds * 1021) ** 0.5
    # Nearest is off by up to half a step, in every round.
    nearest = (round_trip(x, bits=num_bits, block=2048) - x).abs()
    assert float(nearest.max()) > 0.4 * step


def test_random_rounding_of_numbers_on_the_grid_changes_nothing(pin: str) -> None:
    x = torch.arange(-127.0, 128.0)
    got = round_trip(x, torch.tensor([5, 6]), bits=8, block=255)
    assert torch.equal(got, x)


@pytest.mark.parametrize("num_bits", [8, 4])
def test_random_words_belong_to_the_index_of_the_whole_tensor(num_bits: int) -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(3))
    whole = round_trip(x, torch.tensor([1, 100]), bits=num_bits, block=64)
    shard = round_trip(x[128_000:], torch.tensor([1, 100 + 32_000]), bits=num_bits, block=64)
    assert torch.equal(whole[128_000:], shard)


@pytest.mark.parametrize("num_bits", [8, 4])
def test_rows_and_threads_give_the_bits_of_the_reference(num_bits: int) -> None:
    x = torch.randn(323_457, generator=torch.Generator().manual_seed(4))
    rng, found = torch.tensor([9, 2**32 - 3]), []
    threads = torch.get_num_threads()
    try:
        for number, pinned in ((1, "reference"), (1, "cpu"), (2, "cpu")):
            torch.set_num_threads(number)
            with anychip.policy(pin={"quantize": pinned, "dequantize": pinned}):
                codes, scales = ops.quantize(x, rng, bits=num_bits, block=96)
                y = ops.dequantize(codes, scales, shape=[x.numel()], bits=num_bits, block=96)
            found.append(bits([codes, scales, y]))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]


def test_bytes_per_element_are_those_of_the_format() -> None:
    codes, scales = ops.quantize(torch.ones(6400), bits=4, block=64)
    assert 8 * (codes.nbytes + scales.nbytes) / 6400 == 4.5


@pytest.mark.parametrize(("call", "message"), [
    (lambda: ops.quantize(torch.ones(4), bits=2), "bits must be 8 or 4, got 2"),
    (lambda: ops.quantize(torch.ones(4), block=0), "block must be at least 1, got 0"),
    (lambda: ops.quantize(torch.ones(4), torch.tensor([1])), r"rng must be int64\[2\]"),
    (lambda: ops.dequantize(torch.ones(4).to(torch.int8), torch.ones(1), shape=[5]),
     r"codes of int8 for shape \(5,\) in blocks of 256 must have shape \(5,\), got \(4,\)"),
    (lambda: ops.dequantize(torch.ones(3).to(torch.int8), torch.ones(2), shape=[5], bits=4),
     r"scales of int4 .* must have shape \(1,\), got \(2,\)"),
], ids=["bits", "block", "rng", "codes", "scales"])  # fmt: skip
def test_wrong_arguments_are_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
