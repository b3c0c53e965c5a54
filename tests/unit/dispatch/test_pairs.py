"""Paired rows: residuals of their own, chosen for both directions or for neither."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

import anychip
from anychip import FallbackError, OperatorTable, ops
from tests.unit.dispatch.calls import SPECS, bits, tensors
from tests.unit.dispatch.tables import Function, Install

SPEC = SPECS["rms_norm"]


class Pair:
    """A paired row of rms_norm with two residuals; counts its calls, insists on plain tensors."""

    def __init__(self, **conditions: Any) -> None:
        self.table, self.log = OperatorTable(), []
        self.table.pair(
            "rms_norm", forward=self.forward, backward=self.backward, num_residuals=2,
            fake_residuals=lambda x, weight, *, eps: (
                x.new_empty(x.shape[:-1]), torch.empty_like(x),
            ),
            **conditions,
        )  # fmt: skip

    def look(self, word: str, *args: Any) -> None:
        for tensor in tensors(list(args)):
            assert type(tensor) in (Tensor, Parameter), type(tensor)
            assert tensor.data_ptr() or not tensor.numel()
        self.log.append(word)

    def forward(self, x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, ...]:
        self.look("forward", x, weight)
        y, rstd = SPEC.forward(x, weight, eps=eps)
        return y, rstd * 2, x.clone()

    def backward(self, grad: Tensor, *saved: Tensor, eps: float, needs: Any) -> Any:
        self.look("backward", grad, *saved)
        _, weight, twice, copy = saved
        assert SPEC.backward is not None
        return SPEC.backward(grad, copy, weight, twice / 2, eps=eps, needs=needs)


def _step(rms_norm: Function, x: Tensor, w: Tensor) -> Any:
    leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
    y = rms_norm(*leaves)
    return bits([y, *torch.autograd.grad(y.square().sum(), leaves)])


def _split(x: Tensor, w: Tensor) -> Any:
    with anychip.policy(pin={"rms_norm": "reference"}):
        return _step(ops.rms_norm, x, w)


@pytest.fixture
def pair(install: Install) -> Pair:
    """A paired row that serves."""
    made = Pair()
    install(made.table)
    return made


X, W = torch.randn(3, 8), torch.randn(8)


def test_pair_serves_both_directions(pair: Pair, rms_norm: Function) -> None:
    want = _split(X, W)
    assert _step(rms_norm, X, W) == want
    assert pair.log == ["forward", "backward"]


def test_pair_that_refuses_the_call_serves_neither_direction(
    install: Install, rms_norm: Function
) -> None:
    pair = Pair(limits={"rows": {3}})
    install(pair.table)
    for rows in (3, 4, 3):
        x = torch.randn(rows, 8)
        want = _split(x, W)
        del pair.log[:]
        got = _step(rms_norm, x, W)
        assert pair.log == (["forward", "backward"] if rows == 3 else [])
        assert rows != 3 or got == want


def test_pair_is_not_used_by_the_operator_with_canonical_residuals(pair: Pair) -> None:
    y, rstd = torch.ops.anychip.rms_norm_forward(X, W, 1e-6)
    assert not pair.log
    assert rstd.shape == (3,)
    torch.testing.assert_close(y, SPEC.forward(X, W, eps=1e-6)[0], rtol=1e-6, atol=1e-6)


def test_pair_runs_its_backward_after_the_policy_has_changed(pair: Pair) -> None:
    """Its residuals are its own, so that what was chosen forward is chosen backward."""
    want = _split(X, W)
    leaves = [X.clone().requires_grad_(), W.clone().requires_grad_()]
    y = ops.rms_norm(*leaves)
    with anychip.policy(pin={"rms_norm": "reference"}):
        got = bits([y, *torch.autograd.grad(y.square().sum(), leaves)])
    assert got == want
    assert pair.log == ["forward", "backward"]


def test_pair_is_never_shown_a_tensor_without_data(pair: Pair) -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(X).requires_grad_()
        y = ops.rms_norm(x, mode.from_tensor(W))
        (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.shape == x.shape
    assert not pair.log
    x = X.to("meta").requires_grad_()
    ops.rms_norm(x, W.to("meta")).sum().backward()
    assert not pair.log


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_pair_under_compile_serves_both_directions(backend: str, pair: Pair) -> None:
    want = _split(X, W)
    torch._dynamo.reset()
    assert _step(torch.compile(ops.rms_norm, backend=backend, fullgraph=True), X, W) == want
    assert pair.log == ["forward", "backward"]


def test_pair_under_compile_gets_the_alignment_it_was_traced_with(install: Install) -> None:
    pair = Pair(alignment=64, contiguous=True)
    install(pair.table)
    torch._dynamo.reset()
    compiled = torch.compile(ops.rms_norm, backend="aot_eager", fullgraph=True)
    odd = torch.cat([torch.zeros(1), X.reshape(-1)])[1:].view(X.shape)
    assert odd.data_ptr() % 64
    for x in (X, odd):
        del pair.log[:]
        assert _step(compiled, x, W) == _split(x, W)
        assert pair.log == ["forward", "backward"]


def test_pair_under_strict_policy_counts_as_an_implementation(
    install: Install, rms_norm: Function
) -> None:
    pair = Pair()
    install(pair.table, alone=True)
    with anychip.policy(fallback="strict"):
        _step(rms_norm, X, W)
        with pytest.raises(FallbackError):
            torch.ops.anychip.rms_norm_forward(X, W, 1e-6)


@pytest.mark.parametrize("needs_x", [True, False])
def test_pair_computes_only_what_is_needed(needs_x: bool, pair: Pair, rms_norm: Function) -> None:
    x, w = X.clone().requires_grad_(needs_x), W.clone().requires_grad_(not needs_x)
    rms_norm(x, w).sum().backward()
    assert (x.grad is not None, w.grad is not None) == (needs_x, not needs_x)
