"""Autocast: each rule, on the first call as on the last, and never inside of a reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

import anychip
from anychip import ops
from anychip.contract import OperatorSpec, Sample
from tests.unit.dispatch.calls import DIFFERENTIABLE, bits, call, gradients
from tests.unit.dispatch.specs import polynomial

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def _through(name: str, door: str) -> Any:
    return getattr(ops if door == "short cut" else torch.ops.anychip, name)


@pytest.fixture(params=["short cut", "library"])
def door(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_lower_casts_to_the_dtype_of_autocast(door: str) -> None:
    x, w, b = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    linear = _through("linear", door)
    for dtype in (BF16, F16):
        with torch.autocast("cpu", dtype=dtype):
            got = linear(x, w, b)
        assert bits(got) == bits(ops.linear(x.to(dtype), w.to(dtype), b.to(dtype)))
    with torch.autocast("cpu"):
        assert linear(x.to(F16), w, b).dtype == BF16
        assert linear(x, w).dtype == BF16
    assert linear(x, w, b).dtype == F32


def test_promote_casts_to_the_widest_dtype_among_the_arguments(door: str) -> None:
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    swiglu = _through("swiglu", door)
    with torch.autocast("cpu"):
        assert bits(swiglu(gate.to(BF16), up)) == bits(ops.swiglu(gate.to(BF16).float(), up))
        assert swiglu(gate.to(BF16), up.to(BF16)).dtype == BF16
        assert swiglu(gate.to(BF16), up.to(F16)).dtype == F32
        assert swiglu(gate, up).dtype == F32


def test_fp32_rule_widens_and_fixed_dtypes_stay(door: str) -> None:
    operator = _with_rule("cast_up", "fp32")
    function = operator if door == "short cut" else torch.ops.rules.cast_up
    x, index = torch.randn(4, dtype=BF16), torch.tensor([3])
    with torch.autocast("cpu"):
        got = function(x, index)
    assert got.dtype == F32
    assert bits(got) == bits(x.float() * 2)
    assert function(x, index).dtype == BF16


def _with_rule(name: str, rule: str) -> Any:
    def forward(x: Tensor, index: Tensor) -> Tensor:
        assert index.dtype == torch.int64
        return x * 2

    return polynomial(
        name, namespace="rules", signature="(Tensor x, Tensor index) -> Tensor", forward=forward,
        backward=lambda grad, *, needs: (grad * 2,), saved=(),
        fake=lambda x, index: torch.empty_like(x), fixed_dtypes={"index": "int64"}, autocast=rule,
        samples=lambda maker: [Sample((maker.normal(3), maker.integers(2, 1)), {}, "3")],
    )  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize("pin", ["cpu", "reference"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_rows_run_without_autocast_of_their_own(name: str, pin: str, door: str) -> None:
    """The bits are those of a call outside of autocast with arguments that are cast by hand."""
    made, by_hand = call(name, grad=True), call(name, grad=True)
    spec: OperatorSpec = made.spec
    lower = spec.autocast == "lower"
    cast = [
        a.to(BF16) if lower and isinstance(a, Tensor) and a.is_floating_point() else a
        for a in by_hand.args
    ]
    with anychip.policy(pin={name: pin}):
        with torch.autocast("cpu"):
            got = _through(name, door)(*made.args, **made.attrs)
        want = getattr(ops, name)(*cast, **by_hand.attrs)
        assert bits(got) == bits(want)
        got_grads, want_grads = gradients(got, made.leaves()), gradients(want, by_hand.leaves())
    assert bits(got_grads) == bits(want_grads)
    assert all(g.dtype == F32 for g in got_grads)


def test_backward_inside_autocast_gives_the_bits_of_outside() -> None:
    found = []
    for inside in (True, False):
        q = call("attention", grad=True)
        with anychip.policy(pin={"attention": "reference"}):
            y = q()
            with torch.autocast("cpu", enabled=inside):
                found.append(bits(torch.autograd.grad(y.square().sum(), q.leaves())))
    assert found[0] == found[1]


def test_nested_autocast_follows_the_innermost(door: str) -> None:
    x, w = torch.randn(3, 8), torch.randn(5, 8)
    linear = _through("linear", door)
    with torch.autocast("cpu"):
        assert linear(x, w).dtype == BF16
        with torch.autocast("cpu", enabled=False):
            assert bits(linear(x, w)) == bits(ops.linear(x, w))
            assert linear(x, w).dtype == F32
        with torch.autocast("cpu", dtype=F16):
            assert linear(x, w).dtype == F16
        assert linear(x, w).dtype == BF16


def test_autocast_keeps_working_after_an_error_in_a_row() -> None:
    x, w = torch.randn(3, 8), torch.randn(5, 8)
    with torch.autocast("cpu"):
        with pytest.raises(ValueError, match="weight"):
            ops.linear(x, w.t())
        assert ops.linear(x, w).dtype == BF16
        assert (x @ w.t()).dtype == BF16


def test_lists_that_are_written_are_not_cast() -> None:
    x = torch.ones(4)
    with torch.autocast("cpu"):
        ops.clip([x], torch.tensor(2.0), max_norm=1.0)
        assert ops.l2_norm([x]).dtype == F32
    assert torch.equal(x, torch.full((4,), 1.0 / (2.0 + 1e-6)))
