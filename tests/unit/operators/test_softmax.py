"""softmax: known values, what hides a key, rows that see nothing, and the equal of torch's."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import anychip
from anychip import ops
from anychip.conformance.oracles.reference import InFloat64
from tests.unit.dispatch.calls import SPECS, bits
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
    [(3, 3, [1, 2, 3]), (2, 5, [4, 5]), (1, 4, [4]), (4, 2, [0, 0, 1, 2]), (3, 1, [0, 0, 1])],
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


# The gradient of the bias


def plainly(
    x: Tensor, mask: Tensor | None, bias: Tensor, *, scale: float, causal: bool = False
) -> Tensor:
    """torch's softmax of masked scores; every row of the cases below sees a key."""
    scores = x * scale + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -INF)
    if causal:
        later = torch.ones(x.shape[-2:], dtype=torch.bool).triu(x.shape[-1] - x.shape[-2] + 1)
        scores = scores.masked_fill(later, -INF)
    return torch.softmax(scores, -1)


BIASES = [(2, 3, 4, 6), (3, 4, 6), (2, 1, 4, 1), (1, 1, 6), (4, 6), (4, 1), (6,), (1,), ()]


@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_gradient_of_the_bias_is_summed_over_the_dims_it_is_broadcast_along(
    shape: tuple[int, ...],
) -> None:
    x, bias, slope = torch.randn(2, 3, 4, 6), torch.randn(shape), torch.randn(2, 3, 4, 6)
    mine = [t.clone().requires_grad_() for t in (x, bias)]
    exact = [t.double().requires_grad_() for t in (x, bias)]
    got = torch.autograd.grad(ops.softmax(mine[0], None, mine[1], scale=0.3), mine, slope)
    want = torch.autograd.grad(plainly(exact[0], None, exact[1], scale=0.3), exact, slope.double())
    assert got[1].shape == bias.shape
    for one, other in zip(got, want, strict=True):
        # Sums of up to 144 terms of size 1.
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=5e-6)


def test_gradient_of_the_bias_with_mask_and_causality() -> None:
    x, bias, slope = torch.randn(3, 4, 6), torch.randn(4, 6), torch.randn(3, 4, 6)
    mask = torch.rand(3, 1, 6) < 0.6
    mask[..., 0] = True
    bias[1, 2] = -INF
    mine, exact = bias.clone().requires_grad_(), bias.double().requires_grad_()
    options = {"scale": -0.7, "causal": True}
    (got,) = torch.autograd.grad(ops.softmax(x, mask, mine, **options), mine, slope)  # type: ignore[arg-type]
    y = plainly(x.double(), mask, exact, scale=-0.7, causal=True)
    (want,) = torch.autograd.grad(y, exact, slope.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=5e-6)
    assert got[1, 2] == 0.0
    assert not got.triu(3).any()  # what no query sees has exactly none


@pytest.mark.parametrize("needed", [(True, False), (False, True)], ids=["x", "bias"])
def test_gradient_of_one_argument_is_the_same_without_the_other(needed: tuple[bool, bool]) -> None:
    x, bias, slope = torch.randn(5, 7), torch.randn(7), torch.randn(5, 7)
    both = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
    want = torch.autograd.grad(ops.softmax(both[0], None, both[1], scale=2.0), both, slope)
    alone = [t.clone().requires_grad_(need) for t, need in zip((x, bias), needed, strict=True)]
    ops.softmax(alone[0], None, alone[1], scale=2.0).backward(slope)
    for leaf, need, other in zip(alone, needed, want, strict=True):
        assert (leaf.grad is not None) == need
        assert leaf.grad is None or bits(leaf.grad) == bits(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradient_of_the_bias_is_added_up_in_float32(dtype: torch.dtype) -> None:
    """Each row gives 1/4 and -1/4: a sum in bfloat16 stops at 64, one in float16 at 512."""
    x, bias = torch.zeros(3001, 2, dtype=dtype), torch.zeros(2, requires_grad=True)
    y = ops.softmax(x, None, bias)
    y.backward(torch.tensor([1.0, 0.0], dtype=dtype).expand(3001, 2))
    assert bias.grad is not None
    assert bias.grad.dtype == torch.float32
    assert bias.grad.tolist() == [750.25, -750.25]


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)], ids=str)
def test_gradient_of_the_bias_of_nothing_is_zero(shape: tuple[int, int]) -> None:
    bias = torch.zeros(shape[1], requires_grad=True)
    ops.softmax(torch.zeros(shape), None, bias).sum().backward()
    assert bits(bias.grad) == bits(torch.zeros(shape[1]))


def test_second_derivative_with_a_bias_equals_plain_torch() -> None:
    x, bias = torch.randn(3, 4, 6), torch.randn(4, 1, 6)[:, 0]
    found = []
    for function in (
        lambda a, b: ops.softmax(a, None, b, scale=0.7),
        lambda a, b: plainly(a, None, b, scale=0.7),
    ):
        leaves = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
        y = function(*leaves).square().sum()
        first = torch.autograd.grad(y, leaves, create_graph=True)
        total = first[0].pow(3).sum() + first[1].pow(3).sum()
        found.append(torch.autograd.grad(total, leaves))
    assert all(t.abs().max() > 1e-3 for t in found[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_reference_backward_is_the_derivative_of_the_forward_and_so_is_its_own() -> None:
    spec, mask = SPECS["softmax"], torch.tensor([[True], [False], [True], [True]])
    attrs = {"scale": 0.6, "causal": True}
    leaves = [torch.randn(2, 4, 3).double(), torch.randn(4, 1).double(), torch.randn(3).double()]
    for bias in leaves[1:]:
        pair = [leaves[0].requires_grad_(), bias.requires_grad_()]
        slope = torch.randn(2, 4, 3).double()

        def gradients(x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
            assert spec.backward is not None
            with InFloat64():
                y = spec.forward(x, mask, bias, **attrs)
                return tuple(spec.backward(slope, y, bias, **attrs, needs=(True, True)))  # noqa: B023

        with InFloat64():
            y = spec.forward(pair[0], mask, bias, **attrs)
        want = torch.autograd.grad(y, pair, slope)
        torch.testing.assert_close(gradients(*pair), want, rtol=1e-10, atol=1e-12)
        assert torch.autograd.gradcheck(gradients, pair)


def test_compiled_call_gives_the_bias_its_gradient() -> None:
    compiled = torch.compile(ops.softmax, backend="aot_eager", fullgraph=True)
    x, bias = torch.randn(3, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    found = [
        torch.autograd.grad(f(x, None, bias, scale=0.5).square().sum(), (x, bias))
        for f in (compiled, ops.softmax)
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
