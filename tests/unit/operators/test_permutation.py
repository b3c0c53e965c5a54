"""permute and unpermute: the order, the way back, a mixture of experts from both, and refusals."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import anychip
from anychip import ops
from anychip.conformance.oracles.reference import InFloat64
from tests.unit.dispatch.calls import DTYPES, SPECS, bits


@pytest.fixture(params=["cpu", "reference"])
def pin(request: pytest.FixtureRequest) -> Iterator[str]:
    with anychip.policy(pin={"permute": request.param, "unpermute": request.param}):
        yield request.param


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpermute_of_permute_with_halves_is_the_tensor(dtype: torch.dtype, pin: str) -> None:
    x, indices = routed(33, 4, 5)
    x = x.to(dtype)
    y, row_map, _ = ops.permute(x, indices, num_experts=5)
    assert bits(ops.unpermute(y, row_map, torch.full((33, 4), 0.25))) == bits(x)


def test_terms_are_added_in_the_order_of_the_choices(pin: str) -> None:
    x = torch.tensor([[1e8], [-1e8], [1.0], [1.0]])
    forth = ops.unpermute(x, torch.tensor([[0, 1, 2, 3]]))
    back = ops.unpermute(x, torch.tensor([[3, 2, 0, 1]]))
    assert (forth.item(), back.item()) == (2.0, 0.0)


def test_dropped_choices_add_nothing_behind_a_grouped_product(pin: str) -> None:
    x, indices = routed(20, 2, 3)
    weight, scores = torch.randn(3, 5, 6), torch.rand(20, 2)
    rows, row_map, offsets = ops.permute(x, indices, num_experts=3)
    y = ops.unpermute(ops.grouped_linear(rows, weight, offsets), row_map, scores)
    want = torch.zeros(20, 5)
    for token in range(20):
        for choice, expert in enumerate(indices[token].tolist()):
            if 0 <= expert < 3:
                want[token] += scores[token, choice] * (weight[expert] @ x[token])
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_mixture_are_those_of_plain_torch(pin: str) -> None:
    x, indices = routed(11, 2, 4)
    indices = indices.clamp(0, 3)
    weight, scores = torch.randn(4, 6, 6), torch.rand(11, 2)
    leaves = [t.clone().requires_grad_() for t in (x, weight, scores)]
    rows, row_map, offsets = ops.permute(leaves[0], indices, num_experts=4)
    y = ops.unpermute(ops.grouped_linear(rows, leaves[1], offsets), row_map, leaves[2])
    exact = [t.double().requires_grad_() for t in (x, weight, scores)]
    want = torch.einsum("tk,tkoi,ti->to", exact[2], exact[1][indices], exact[0])
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    slope = torch.randn(y.shape)
    found = torch.autograd.grad(y, leaves, slope)
    expected = torch.autograd.grad(want, exact, slope.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_indices_of_32_bits_give_the_bits_of_64(pin: str) -> None:
    x, indices = routed(40, 3, 6)
    assert bits(ops.permute(x, indices.int(), num_experts=6)) == bits(
        ops.permute(x, indices, num_experts=6)
    )


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


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
def test_reference_backward_is_the_derivative_of_the_forward_and_so_is_its_own(
    weighted: bool,
) -> None:
    spec, row_map = SPECS["unpermute"], torch.tensor([[3, 0], [1, 5], [4, 2]])
    torch.manual_seed(0)
    x, scores = torch.randn(6, 3).double(), torch.randn(3, 2).double()
    leaves = [x.requires_grad_(), *([scores.requires_grad_()] if weighted else [])]
    slope = torch.randn(3, 3).double()

    def forward(*given: Tensor) -> Tensor:
        with InFloat64():
            y: Tensor = spec.forward(given[0], row_map, given[1] if weighted else None)
        return y

    def gradients(*given: Tensor) -> tuple[Tensor, ...]:
        assert spec.backward is not None
        with InFloat64():
            weights = given[1] if weighted else None
            found = spec.backward(slope, given[0], row_map, weights, needs=(True, weighted))
        return tuple(g for g in found if g is not None)

    want = torch.autograd.grad(forward(*leaves), leaves, slope)
    torch.testing.assert_close(gradients(*leaves), want, rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradcheck(forward, leaves)
    if weighted:
        assert torch.autograd.gradcheck(gradients, leaves)
