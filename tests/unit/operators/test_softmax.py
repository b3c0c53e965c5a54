"""softmax: known values, what hides a key, rows that see nothing, and the equal of torch's."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import anychip
from anychip import ops
from tests.unit.dispatch.calls import bits
from tests.unit.operators.exactness import U, assert_close

INF, NAN = math.inf, math.nan


@pytest.fixture(params=["cpu", "reference"], autouse=True)
def pin(request: pytest.FixtureRequest) -> Iterator[str]:
    with anychip.policy(pin={"softmax": request.param}):
        yield request.param


def weights(*rows: list[float]) -> Tensor:
    """Scores whose weights are the given numbers over their sum, 0 for a hidden key."""
    return torch.tensor(rows).log()


def test_known_weights() -> None:
    got = ops.softmax(weights([1, 3], [2, 2]))
    torch.testing.assert_close(got, torch.tensor([[0.25, 0.75], [0.5, 0.5]]))


def test_scale_multiplies_the_scores_and_not_the_bias() -> None:
    x, bias = weights([1, 2, 4]), weights([3, 1, 1])
    torch.testing.assert_close(ops.softmax(x, scale=2.0), torch.tensor([[1, 4, 16]]) / 21.0)
    got = ops.softmax(x, None, bias, scale=2.0)
    torch.testing.assert_close(got, torch.tensor([[3, 4, 16]]) / 23.0)


@pytest.mark.parametrize(
    ("queries", "keys", "seen"),
    [
        (3, 3, [1, 2, 3]),
        (2, 5, [4, 5]),
        (1, 4, [4]),
        (4, 2, [0, 0, 1, 2]),
        (3, 1, [0, 0, 1]),
    ],
    ids=["square", "more keys", "one query", "more queries", "one key"],
)
def test_causal_query_sees_keys_up_to_its_distance_from_the_last(
    queries: int, keys: int, seen: list[int]
) -> None:
    got = ops.softmax(torch.zeros(2, queries, keys), causal=True)
    want = torch.tensor([[1 / s if k < s else 0.0 for k in range(keys)] for s in seen])
    torch.testing.assert_close(got, want.expand(2, -1, -1))


def test_mask_is_true_where_a_key_is_visible_and_broadcasts() -> None:
    x = torch.randn(2, 3, 4, 5)
    mask = torch.tensor([True, False, True, True, False])
    got = ops.softmax(x, mask)
    assert_close(got[..., mask], torch.softmax(x[..., mask].double(), -1), 12)
    assert not got[..., ~mask].any()
    per_query = torch.tensor([[True], [False], [True], [True]])
    assert not ops.softmax(x, per_query)[:, :, 1].any()


def test_mask_bias_and_causal_all_hide() -> None:
    mask = torch.tensor([False, True, True, True])
    bias = torch.tensor([0.0, -INF, 0.0, 0.0])
    got = ops.softmax(torch.zeros(4, 4), mask, bias, causal=True)
    assert got.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0.5, 0.5]]


HIDDEN = {
    "mask": lambda x: (x, torch.zeros(3, 1, dtype=torch.bool), None),
    "bias": lambda x: (x, None, torch.full((5,), -INF)),
    "scores": lambda x: (torch.full_like(x, -INF), None, None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("by", HIDDEN)
def test_row_without_a_visible_key_is_zero_with_zero_gradient(by: str, dtype: torch.dtype) -> None:
    x, mask, bias = HIDDEN[by](torch.randn(3, 5, dtype=dtype))
    x.requires_grad_()
    y = ops.softmax(x, mask, bias)
    assert bits(y) == bits(torch.zeros(3, 5, dtype=dtype))
    (first,) = torch.autograd.grad(y, x, torch.randn(3, 5).to(dtype), create_graph=True)
    assert not first.any()
    (second,) = torch.autograd.grad(first.sum(), x, allow_unused=True, materialize_grads=True)
    assert not second.any()


def test_function_transforms_of_a_hidden_row_give_no_nan(pin: str) -> None:
    x, mask = torch.randn(2, 3), torch.tensor([[True], [False]])
    loss = lambda a: ops.softmax(a, mask)[:, 0].sum()  # noqa: E731
    gradient = torch.func.grad(loss)(x)
    assert bool(torch.isfinite(gradient).all())
    assert gradient[0].any()
    assert not gradient[1].any()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_hidden_score_does_not_count_whatever_it_is(value: float) -> None:
    mask = torch.tensor([True, True, False, True])
    clean = torch.randn(3, 4)
    dirty = clean.clone()
    dirty[:, 2] = value
    want = bits(ops.softmax(clean, mask, scale=0.5))
    assert bits(ops.softmax(dirty, mask, scale=0.5)) == want


def test_visible_nan_makes_its_row_nan_and_no_other() -> None:
    x = torch.zeros(3, 4)
    x[1, 2] = NAN
    got = ops.softmax(x)
    assert got.isnan().tolist() == [[False] * 4, [True] * 4, [False] * 4]


@pytest.mark.parametrize("shape", [(1,), (7, 33), (2, 3, 5, 64), (0, 4), (3, 0)], ids=str)
def test_plain_call_is_torchs_softmax(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) * 5.0
    mine, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    got, want = ops.softmax(mine), torch.softmax(theirs, -1)
    count = 12.0 + x.shape[-1]
    assert_close(got.detach(), want.detach(), count)
    grad = torch.randn(shape)
    (dx,) = torch.autograd.grad(got, mine, grad)
    (exact,) = torch.autograd.grad(want, theirs, grad.double())
    assert_close(dx, exact, 2 * count)


def test_scores_far_beyond_the_range_of_exp_give_their_weights() -> None:
    x = torch.tensor([[1e4, 1e4, -1e4], [-3e38, -3e38, -3e38], [3e38, 0.0, -3e38]])
    want = torch.tensor([[0.5, 0.5, 0.0], [1 / 3] * 3, [1.0, 0.0, 0.0]])
    torch.testing.assert_close(ops.softmax(x), want, rtol=8 * U, atol=0.0)


def test_second_derivative_equals_plain_torch_with_a_mask() -> None:
    x, mask = torch.randn(3, 4, 6, dtype=torch.float32), torch.rand(3, 1, 6) < 0.7
    mask[..., 0] = True
    found = []
    for function in (
        lambda a: ops.softmax(a, mask, scale=0.7),
        lambda a: torch.softmax((a * 0.7).masked_fill(~mask, -INF), -1),
    ):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(leaf).square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.pow(3).sum(), leaf)[0])
    assert found[0].abs().max() > 1e-3
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


WRONG = {
    "causal needs two dims": ((torch.zeros(4),), {"causal": True}, r"\(\.\.\., queries, keys\)"),
    "0-dim": ((torch.zeros(()),), {}, r"x must be \(\.\.\., keys\)"),
    "mask too large": (
        (torch.zeros(2, 3), torch.ones(2, 2, 3, dtype=torch.bool)),
        {},
        r"mask must be broadcastable to x \(2, 3\), got \(2, 2, 3\)",
    ),
    "bias of another size": ((torch.zeros(2, 3), None, torch.zeros(2)), {}, "bias must be broad"),
    "mask that is no bool": ((torch.zeros(2, 3), torch.zeros(3)), {}, "mask must be bool"),
}


@pytest.mark.parametrize("label", WRONG)
def test_wrong_arguments_are_refused_with_what_was_expected(label: str) -> None:
    args, attrs, message = WRONG[label]
    with pytest.raises(ValueError, match=message):
        ops.softmax(*args, **attrs)


def test_bias_that_wants_a_gradient_is_refused_by_name() -> None:
    x, bias = torch.randn(2, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"softmax has no gradient for bias.*bias\.detach\(\)"):
        ops.softmax(x, None, bias).sum().backward()
