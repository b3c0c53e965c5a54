"""The random stream and dropout: the same bits from the reference, the native row and numpy."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anychip
from anychip import ops
from anychip.conformance.oracles import philox
from anychip.operators import philox as torch_philox
from anychip_cpu import native
from tests.unit.dispatch.calls import bits

STREAMS = [
    (0, 0),
    (1, 1),
    (-1, 0),
    (-(2**63), 3),
    (2**63 - 1, 2**32 - 2),  # the low word of the counter overflows within the stream
    (1234567890123, 2**40 + 7),
    (42, 2**63 - 2),  # past the largest int64, which is the lower half of the unsigned range
    (42, -2),  # past 2^64 - 1, to 0
]
TINY = 2.0**-33
PROBABILITIES = [0.0, TINY, 2.0**-32, 0.1, 0.5, 1.0 - 2.0**-32, 1.0]


@pytest.fixture(params=["cpu", "reference"])
def pin(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cpu" and native.kernels is None:
        pytest.skip(str(native.problem))
    with anychip.policy(pin={"dropout": request.param}):
        yield request.param


def dropped_by_numpy(values: Any, seed: int, offset: int, p: float, which: Any = None) -> Any:
    """float32 dropout by these words: what is kept, times 1 / (1 - p) rounded to float32."""
    keep = philox.kept(seed, offset, values.size if which is None else which, p)
    keep = keep.reshape(values.shape)
    scale = np.float32(0.0 if p == 1.0 else 1.0 / (1.0 - p))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(keep, values * scale, np.float32(0.0))


@pytest.mark.parametrize(("seed", "offset"), STREAMS)
def test_torch_and_native_streams_equal_numpy(seed: int, offset: int) -> None:
    want = philox.words(seed, offset, 21).tolist()
    assert torch_philox.words(torch.tensor([seed, offset]), 21).tolist() == want
    if native.kernels is not None:
        unsigned = seed % 2**64, offset % 2**64
        assert list(native.kernels.philox(*unsigned, 21)) == want


def test_first_block_is_the_published_one() -> None:
    assert torch_philox.words(torch.tensor([0, 0]), 4).tolist() == list(philox.KNOWN_ANSWERS[0][2])


@pytest.mark.grid
@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize(("seed", "offset"), STREAMS)
def test_dropout_in_float32_has_the_bits_of_numpy(
    seed: int, offset: int, p: float, pin: str
) -> None:
    x = np.linspace(-3, 3, 1037, dtype=np.float32)
    want = dropped_by_numpy(x, seed, offset, p)
    got = ops.dropout(torch.from_numpy(x), torch.tensor([seed, offset]), p=p)
    assert got.numpy().tobytes() == want.tobytes()


def test_dropout_keeps_a_word_that_equals_the_threshold_and_no_smaller_one(pin: str) -> None:
    rng = torch.tensor([11, 12])
    for place, word in enumerate(philox.words(11, 12, 8).tolist()):
        at = ops.dropout(torch.ones(8), rng, p=word / 2**32)
        above = ops.dropout(torch.ones(8), rng, p=(word + 1) / 2**32)
        assert at[place] != 0
        assert above[place] == 0


@settings(max_examples=60)
@given(
    seed=st.integers(-(2**63), 2**63 - 1), offset=st.integers(-(2**63), 2**63 - 1),
    p=st.floats(0.0, 1.0), count=st.integers(0, 70),
)  # fmt: skip
def test_dropout_of_ones_equals_numpy_everywhere(
    seed: int, offset: int, p: float, count: int
) -> None:
    want = dropped_by_numpy(np.ones(count, dtype=np.float32), seed, offset, p)
    for implementation in ("cpu", "reference"):
        if implementation == "cpu" and native.kernels is None:
            continue
        with anychip.policy(pin={"dropout": implementation}):
            got = ops.dropout(torch.ones(count), torch.tensor([seed, offset]), p=p)
        assert got.numpy().tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dropout_in_16_bits_is_the_float32_result_rounded_once(
    dtype: torch.dtype, pin: str
) -> None:
    x = torch.linspace(-3, 3, 1000).to(dtype)
    rng = torch.tensor([5, 6])
    got = ops.dropout(x, rng, p=0.3)
    assert bits(got) == bits(ops.dropout(x.float(), rng, p=0.3).to(dtype))


def test_dropout_share_of_kept_elements_is_one_minus_p(pin: str) -> None:
    count = 1 << 16
    for p in (0.1, 0.5, 0.9):
        kept = int((ops.dropout(torch.ones(count), torch.tensor([7, 8]), p=p) != 0).sum())
        # Six standard deviations of a binomial; the stream is fixed, so this is not chance.
        assert abs(kept - count * (1 - p)) < 6 * (count * p * (1 - p)) ** 0.5


def test_dropout_mask_does_not_depend_on_layout_or_dtype(pin: str) -> None:
    rng = torch.tensor([3, 4])
    x = torch.rand(24, 40) + 1.0
    mask = ops.dropout(x, rng, p=0.4) != 0
    assert torch.equal(ops.dropout(x.t().contiguous().t(), rng, p=0.4) != 0, mask)
    assert torch.equal(ops.dropout(x.view(2, 12, 40), rng, p=0.4).view(24, 40) != 0, mask)
    assert torch.equal(ops.dropout(torch.cat([x, x])[24:], rng, p=0.4) != 0, mask)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(ops.dropout(x.to(dtype), rng, p=0.4) != 0, mask)


def test_dropout_streams_at_following_offsets_are_one_stream(pin: str) -> None:
    whole = ops.dropout(torch.ones(64), torch.tensor([9, 100]), p=0.5)
    second = ops.dropout(torch.ones(32), torch.tensor([9, 108]), p=0.5)
    assert torch.equal(whole[32:], second)


def test_dropout_drops_what_is_not_finite_to_zero(pin: str) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0] * 50)
    rng = torch.tensor([1, 2])
    mask = ops.dropout(torch.ones(200), rng, p=0.5) != 0
    got = ops.dropout(x, rng, p=0.5)
    assert bits(got[~mask]) == bits(torch.zeros(int((~mask).sum())))
    assert bits(got[mask]) == bits(x[mask] * 2.0)
    assert bits(ops.dropout(x, rng, p=1.0)) == bits(torch.zeros(200))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_backward_has_the_same_mask_and_scale(dtype: torch.dtype, pin: str) -> None:
    x = torch.randn(7, 33).to(dtype).requires_grad_()
    grad, rng = torch.randn(7, 33).to(dtype), torch.tensor([-5, 2**33])
    (got,) = torch.autograd.grad(ops.dropout(x, rng, p=0.3), x, grad)
    assert bits(got) == bits(ops.dropout(grad, rng, p=0.3))


def test_dropout_leaves_rng_as_it_was(pin: str) -> None:
    rng = torch.tensor([1, 2])
    ops.dropout(torch.ones(5), rng)
    assert rng.tolist() == [1, 2]
    assert rng._version == 0


INT64 = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=60)
@given(
    numbers=st.lists(st.integers(-9, 99) | INT64, min_size=1, max_size=5),
    columns=st.integers(0, 70), column=st.integers(0, 70), more=st.integers(0, 9), offset=INT64,
)  # fmt: skip
def test_dropout_of_numbered_rows_has_the_words_of_the_whole(
    numbers: list[int], columns: int, column: int, more: int, offset: int
) -> None:
    width = column + columns + more
    index = [n * width + column + j for n in numbers for j in range(columns)]
    index = [(i + 2**63) % 2**64 - 2**63 for i in index]  # as int64 wraps; // below rounds down
    ones = np.ones((len(numbers), columns), dtype=np.float32)
    want = dropped_by_numpy(ones, 3, offset, 0.4, np.array(index, dtype=np.int64))
    args = (torch.from_numpy(ones), torch.tensor([3, offset]), torch.tensor(numbers))
    for implementation in ("cpu", "reference"):
        if implementation == "cpu" and native.kernels is None:
            continue
        with anychip.policy(pin={"dropout": implementation}):
            got = ops.dropout(*args, p=0.4, width=width, column=column)
        assert got.numpy().tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_dropout_have_the_bits_of_the_whole(dtype: torch.dtype, pin: str) -> None:
    # So large that the native row has several threads, whose ranges begin within rows.
    x, rng = torch.randn(90, 1001).to(dtype).requires_grad_(), torch.tensor([6, 2**32 - 7])
    whole = ops.dropout(x, rng, p=0.3)
    (grad,) = torch.autograd.grad(whole, x, x.detach())
    numbers = torch.randperm(90)
    for rows in (numbers[:80], numbers[80:], numbers.reshape(9, 10)):
        for first, last in ((0, 1001), (0, 1000), (3, 4), (5, 900)):
            part, where = x.detach()[rows][..., first:last].requires_grad_(), {"width": 1001}
            y = ops.dropout(part, rng, rows, p=0.3, column=first, **where)
            (dx,) = torch.autograd.grad(y, part, part.detach())
            assert bits(y) == bits(whole[rows][..., first:last])
            assert bits(dx) == bits(grad[rows][..., first:last])
