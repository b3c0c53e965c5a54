"""permute and unpermute: the order, the same bits by any threads, one graph, and refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import anychip
from anychip import ops
from tests.unit.dispatch.calls import bits

NAMES = ("permute", "unpermute")


def routed(tokens: int, choices: int, experts: int, hidden: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator)
    return x, torch.randint(-1, experts + 1, (tokens, choices), generator=generator)


_TOKENS = st.lists(
    st.tuples(st.lists(st.integers(-2, 5), min_size=3, max_size=3), st.integers(-2, 2)), max_size=9
)


@settings(max_examples=40, deadline=None)
@given(_TOKENS, st.booleans(), st.none() | st.integers(-1, 10))
def test_permute_is_a_stable_sort_by_expert_and_key(
    listed: list[tuple[list[int], int]], keyed: bool, count: int | None
) -> None:
    indices = torch.tensor([e for e, _ in listed], dtype=torch.int64).view(-1, 3)
    key = torch.tensor([k for _, k in listed], dtype=torch.int64) if keyed else None
    num_tokens = None if count is None else torch.tensor(count)
    x = torch.arange(2.0 * len(listed)).view(-1, 2)
    tokens = len(listed) if count is None else count
    entries = [
        (e if 0 <= e < 4 and t < tokens else 4, k * keyed, t, j)
        for t, (row, k) in enumerate(listed) for j, e in enumerate(row)
    ]  # fmt: skip
    for implementation in ("cpu", "reference"):
        with anychip.policy(pin={"permute": implementation}):
            y, row_map, offsets = ops.permute(x, indices, key, num_tokens, num_experts=4)
        for row, (*_, token, choice) in enumerate(sorted(entries)):
            assert torch.equal(y[row], x[token])
            assert row_map[token, choice] == row
        assert offsets.tolist() == [sum(e <= g for e, *_ in entries) for g in range(4)]


def test_rows_of_an_expert_are_in_one_order_however_tokens_were_spread(pin: str) -> None:
    """Two exchanges' worth: rows of all ranks, in the order in which each rank had them."""
    x, indices = routed(40, 2, 5)
    whole, _, ends = ops.permute(x, indices, num_experts=5)
    token = torch.arange(40)
    for ranks in (2, 3):
        own = [token[rank::ranks] for rank in range(ranks)]
        parts = [ops.permute(x[t], indices[t], num_experts=5) for t in own]
        received = torch.cat([y for y, *_ in parts])
        expert, key = (torch.full((80,), -1) for _ in range(2))
        for start, t, (y, row_map, offsets) in zip(
            [0, *torch.tensor([len(y) for y, *_ in parts]).cumsum(0)], own, parts, strict=False
        ):
            key[start + row_map] = t[:, None].expand_as(row_map)
            number = torch.bucketize(torch.arange(len(y)), offsets, right=True)
            expert[start : start + len(y)] = torch.where(number < 5, number, -1)
        # Room for rows that did not come, and how many did, on the device.
        room = torch.nn.functional.pad(received, (0, 0, 0, 7), value=torch.nan)
        expert, key = (torch.nn.functional.pad(t, (0, 7)) for t in (expert, key))
        got, _, offsets = ops.permute(room, expert[:, None], key, torch.tensor(80), num_experts=5)
        inside = int(ends[-1])
        assert bits(offsets) == bits(ends)
        assert bits(got[:inside]) == bits(whole[:inside])


def test_results_have_the_same_bits_for_every_number_of_threads(pin: str) -> None:
    x, indices = routed(700, 4, 9, hidden=130)
    found, before = [], torch.get_num_threads()
    for number in (1, 2):
        torch.set_num_threads(number)
        leaf = x.clone().requires_grad_()
        y, row_map, offsets = ops.permute(leaf, indices, num_experts=9)
        found.append(bits([y, row_map, offsets, torch.autograd.grad(y.square().sum(), leaf)]))
    torch.set_num_threads(before)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("listed", "words"),
    [([[0, 1], [2, 4]], "from 0 to 3, got 0 to 4"), ([[0, -1], [2, 3]], "got -1 to 3"),
     ([[0, 1], [1, 3]], "each of the 4 rows once")],
    ids=["beyond", "negative", "twice"],
)  # fmt: skip
def test_map_that_is_no_permutation_is_refused(
    listed: list[list[int]], words: str, pin: str
) -> None:
    with pytest.raises(ValueError, match=f"unpermute: row_map must .*{words}"):
        ops.unpermute(torch.ones(4, 3), torch.tensor(listed))


def test_shapes_that_do_not_fit_are_refused_with_both() -> None:
    x, indices = torch.ones(4, 3), torch.zeros(4, 2, dtype=torch.int64)
    for call, words in (
        (lambda: ops.permute(x[0], indices, num_experts=2), r"x must be \(T, H\), got \(3,\)"),
        (lambda: ops.permute(x, indices[:3], num_experts=2), r"indices must be \(4, K\).*\(3, 2\)"),
        (lambda: ops.permute(x, indices[:, :0], num_experts=2), r"K at least 1.*\(4, 0\)"),
        (lambda: ops.permute(x, indices, num_experts=0), "num_experts must be at least 1, got 0"),
        (lambda: ops.unpermute(x, indices), r"T \* K = 4, the rows of x; got \(4, 2\)"),
        (lambda: ops.unpermute(x, indices[:2], x[:2]), r"weights must be \(2, 2\).*got \(2, 3\)"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_compiled_call_does_not_look_at_the_indices() -> None:
    """One graph serves every routing: the experts' numbers of rows are values, not shapes."""

    def both(x: Tensor, indices: Tensor) -> Tensor:
        y, row_map, _ = ops.permute(x, indices, num_experts=3)
        return ops.unpermute(y, row_map)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    with anychip.policy(pin={"permute": "reference", "unpermute": "reference"}):
        for seed in range(3):
            x, indices = routed(8, 2, 3)
            indices = indices.roll(seed, 0)
            torch.testing.assert_close(compiled(x, indices), 2 * x)
