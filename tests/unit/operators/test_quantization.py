"""quantize and dequantize: words of shards, bits of all rows, bytes, and what is refused."""

import pytest
import torch
from torch import Tensor

import anychip
from anychip import ops
from tests.unit.dispatch.calls import bits


def round_trip(x: Tensor, rng: Tensor, *, bits: int, block: int) -> Tensor:
    codes, scales = ops.quantize(x, rng, bits=bits, block=block)
    return ops.dequantize(codes, scales, shape=list(x.shape), bits=bits, block=block)


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
