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


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(-2, 5), min_size=3, max_size=3), max_size=9))
def test_permute_is_a_stable_sort_by_expert(listed: list[list[int]]) -> None:
    indices = torch.tensor(listed, dtype=torch.int64).view(-1, 3)
    x = torch.arange(2.0 * len(listed)).view(-1, 2)
    entries = [
        (e if 0 <= e < 4 else 4, t, j) for t, row in enumerate(listed) for j, e in enumerate(row)
    ]
    for implementation in ("cpu", "reference"):
        with anychip.policy(pin={"permute": implementation}):
            y, row_map, offsets = ops.permute(x, indices, num_experts=4)
        for row, (_, token, choice) in enumerate(sorted(entries)):
            assert torch.equal(y[row], x[token])
            assert row_map[token, choice] == row
        assert offsets.tolist() == [sum(e <= g for e, _, _ in entries) for g in range(4)]


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
