"""hadamard and top_k: ties, threads, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anychip
from anychip import ops
from tests.unit.dispatch.calls import bits


@pytest.mark.parametrize(("shape", "block", "message"), [
    ((3, 6), None, "the last dim of x must be a power of two, got 6"),
    ((3, 0), None, "the last dim of x must be a power of two, got 0"),
    ((3, 6), 3, "block must be a power of two, got 3"),
    ((3, 6), 4, r"block must divide the last dim of x \(6\), got 4"),
    ((), None, "at least one dim"),
], ids=["six", "none", "three", "no-divisor", "scalar"])  # fmt: skip
def test_hadamard_of_a_wrong_length_is_refused(
    shape: tuple[int, ...], block: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ops.hadamard(torch.ones(shape), block=block)


@settings(max_examples=60)
@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=40), data=st.data())
def test_top_k_takes_the_largest_and_of_ties_the_first(
    values: list[int], data: st.DataObject
) -> None:
    k = data.draw(st.integers(0, len(values)))
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))[:k]
    for pinned in ("cpu", "reference"):
        with anychip.policy(pin={"top_k": pinned}):
            got, indices = ops.top_k(torch.tensor(values).float(), k=k)
        assert indices.tolist() == order
        assert got.tolist() == [values[i] for i in order]


@pytest.mark.parametrize("k", [-1, 4])
def test_top_k_of_more_than_there_is_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=rf"k must be from 0 to the last dim of x \(3\), got {k}"):
        ops.top_k(torch.ones(2, 3), k=k)


def test_top_k_has_the_same_bits_for_any_number_of_threads() -> None:
    x = torch.randn(40, 4096, generator=torch.Generator().manual_seed(9))
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(bits([ops.top_k(x, k=100), ops.top_k(x.flatten(), k=5000)]))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]
