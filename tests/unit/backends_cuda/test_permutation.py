"""permute and unpermute of the CUDA kernels: the sort by expert, and rows of any width."""

import pytest
import torch
from torch import Tensor

from anychip import operators
from tests.unit.backends_cuda.conftest import Chip
from tests.unit.dispatch.calls import bits
from tests.unit.operators.exactness import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _permute(chip: Chip, x: Tensor, indices: Tensor, num_experts: int) -> list[Tensor]:
    return list(chip.call("permute", "forward", x, indices, num_experts=num_experts))


def _want(x: Tensor, indices: Tensor, num_experts: int) -> list[Tensor]:
    return list(operators.permute.forward(x, indices, num_experts=num_experts))


def _routed(
    tokens: int, choices: int, experts: int, hidden: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + experts)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    return x, torch.randint(-1, experts + 1, (tokens, choices), generator=generator)


def _mapped(tokens: int, choices: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(hidden)
    row_map = torch.randperm(tokens * choices, generator=generator).view(tokens, choices)
    x = torch.randn(tokens * choices, hidden, generator=generator).to(dtype)
    return x, row_map, torch.randn(tokens, choices, generator=generator)


# A warp sorts 128 choices, a block 1,024; a block adds up the chunks of 256 blocks in a round.
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 128, 129, 1023, 1024, 1025, 2500])
@pytest.mark.parametrize("experts", [1, 4, 255, 256, 1024])
def test_choices_are_sorted_by_expert_and_in_their_order(
    chip: Chip, tokens: int, experts: int
) -> None:
    x, indices = _routed(tokens, 1, experts, 2)
    assert bits(_permute(chip, x, indices, experts)) == bits(_want(x, indices, experts))


def test_sort_of_more_chunks_than_a_round_takes_is_the_same(chip: Chip) -> None:
    x, indices = _routed(257 * 1024 // 8 + 5, 8, 3, 1)
    assert bits(_permute(chip, x, indices, 3)) == bits(_want(x, indices, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 7, 8, 24, 1000, 1024, 1032, 2055])
def test_rows_of_any_width_are_copied(chip: Chip, hidden: int, dtype: torch.dtype) -> None:
    x, indices = _routed(9, 3, 4, hidden, dtype)
    assert bits(_permute(chip, x, indices, 4)) == bits(_want(x, indices, 4))


@pytest.mark.parametrize("choices", [1, 2, 4, 5, 8, 9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 24, 255, 256, 264])
def test_rows_are_added_with_their_weights_in_the_order_of_choices(
    chip: Chip, hidden: int, dtype: torch.dtype, choices: int
) -> None:
    x, row_map, weights = _mapped(10, choices, hidden, dtype)
    for given in (weights, weights.to(torch.bfloat16), weights.half(), None):
        got = chip.call("unpermute", "forward", x, row_map, given)
        want = x[row_map].double() * (1.0 if given is None else given.double()[..., None])
        assert_close(got, want.sum(1), 3.0 * choices)


def test_terms_are_added_in_the_order_of_the_choices(chip: Chip) -> None:
    (row,) = chip.table.rows("unpermute", "forward")
    x = torch.tensor([[1e8], [-1e8], [1.0], [1.0], [3e8], [-3e8]]).to(chip.device)
    for order, want in (
        ([0, 1, 2, 3, 4, 5], 0.0), ([4, 5, 0, 1, 2, 3], 2.0), ([2, 3, 0, 1, 4, 5], 0.0),
    ):  # fmt: skip
        assert row.function(x, torch.tensor([order]).to(chip.device), None).item() == want


@pytest.mark.parametrize("hidden", [1, 24, 255, 512, 520, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
def test_gradients_of_unpermute_are_those_of_float64(
    chip: Chip, weighted: bool, dtype: torch.dtype, hidden: int
) -> None:
    x, row_map, scores = _mapped(6, 3, hidden, dtype)
    weights = scores if weighted else None
    grad = torch.randn(6, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    (row,) = chip.table.rows("unpermute", "backward")
    args = [None if t is None else t.to(chip.device) for t in (grad, x, row_map, weights)]
    leaves = [x.double().requires_grad_(), scores.double().requires_grad_()]
    y = (leaves[0][row_map] * (leaves[1][..., None] if weighted else 1.0)).sum(1)
    dx, dweights = torch.autograd.grad(y, leaves, grad.double(), allow_unused=True)
    both = row.function(*args, needs=(True, weighted))
    assert_close(both[0].cpu(), dx, 2)
    assert both[1] is None or dweights is not None
    if weighted:
        assert_close(both[1].cpu(), dweights, hidden + 1)
        alone = [row.function(*args, needs=needs) for needs in ((True, False), (False, True))]
        assert alone[0][1] is None
        assert alone[1][0] is None
        assert bits([alone[0][0].cpu(), alone[1][1].cpu()]) == bits([t.cpu() for t in both])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_indices_outside_of_the_experts_stand_behind_all(chip: Chip, dtype: torch.dtype) -> None:
    x = torch.arange(6.0)[:, None]
    far = 2**40 if dtype == torch.int64 else 2**31 - 1
    indices = torch.tensor([[1], [-1], [far], [0], [3], [2]], dtype=dtype)
    y, row_map, offsets = _permute(chip, x, indices, 3)
    assert y[:, 0].tolist() == [3.0, 0.0, 5.0, 1.0, 2.0, 4.0]
    assert row_map[:, 0].tolist() == [1, 3, 4, 0, 5, 2]
    assert offsets.tolist() == [1, 2, 3]


def test_no_tokens_give_offsets_of_zero(chip: Chip) -> None:
    y, row_map, offsets = _permute(
        chip, torch.ones(0, 3), torch.zeros(0, 2, dtype=torch.int64), 300
    )
    assert y.shape == (0, 3)
    assert row_map.shape == (0, 2)
    assert offsets.tolist() == [0] * 300
    (row,) = chip.table.rows("permute", "forward")
    assert row.accepts is not None
    assert row.accepts(y, row_map, num_experts=1024)
    assert not row.accepts(y, row_map, num_experts=1025)
    assert not row.accepts(y, torch.empty(2**16, 2**15, device="meta"), num_experts=4)


def test_scratch_of_huge_sizes_is_counted_in_64_bits(chip: Chip) -> None:
    assert chip.kernels.native.permutation_scratch(2**31 - 1, 1024) == 1025 * (2 + 2**21)
