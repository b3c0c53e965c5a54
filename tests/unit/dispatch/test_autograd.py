"""Second derivatives: backward rows are first-order, so the reference is differentiated.

Activation checkpointing, plain and selective.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import anychip
from anychip import OperatorTable, ops
from tests.unit.dispatch.calls import bits
from tests.unit.dispatch.specs import polynomial
from tests.unit.dispatch.tables import Install

KINDS = ["plain", "residual", "output"]


def _doors(operator: Any) -> dict[str, Callable[..., Any]]:
    library = getattr(torch.ops.polynomials, operator.spec.name)
    return {"short cut": operator, "library": library}


def _second(function: Callable[..., Any]) -> tuple[float, float]:
    x = torch.tensor(3.0, requires_grad=True)
    (first,) = torch.autograd.grad(function(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    return first.item(), second.item()


def _first_order(operator: Any, kind: str) -> OperatorTable:
    """Rows whose backward is right, and whose result nobody can differentiate."""
    table, spec = OperatorTable(), operator.spec
    table.forward(spec.name)(lambda *args: spec.forward(*args))

    @table.backward(spec.name)
    def backward(*args: Any, needs: tuple[bool]) -> tuple[Tensor]:
        return (spec.backward(*(a.detach() for a in args), needs=needs)[0].detach(),)

    return table


@pytest.mark.parametrize("door", ["short cut", "library"])
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivative_of_the_polynomial_at_3_is_20(kind: str, door: str) -> None:
    operator = polynomial(f"poly_{kind}", kind)  # type: ignore[arg-type]
    assert _second(_doors(operator)[door]) == (33.0, 20.0)


@pytest.mark.parametrize("door", ["short cut", "library"])
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivative_with_a_first_order_row_is_still_20(
    kind: str, door: str, install: Install
) -> None:
    operator = polynomial(f"poly_{kind}", kind)  # type: ignore[arg-type]
    install(_first_order(operator, kind))
    assert _second(_doors(operator)[door]) == (33.0, 20.0)
    rows = {(r.direction, r.kind): r for r in anychip.provenance().rows()}
    assert rows["forward", "native"].calls == 1
    assert "create_graph" in str(rows["backward", "reference"].fallback_reason)
    # Without create_graph the row itself is taken.
    anychip.provenance(reset=True)
    x = torch.tensor(3.0, requires_grad=True)
    _doors(operator)[door](x).backward()
    assert x.grad is not None
    assert x.grad.item() == 33.0
    assert {r.kind for r in anychip.provenance().rows()} == {"native"}


@pytest.mark.parametrize("door", ["short cut", "library"])
@pytest.mark.parametrize("kind", KINDS)
def test_paired_row_second_derivative_is_20(kind: str, door: str, install: Install) -> None:
    operator = polynomial(f"poly_{kind}", kind)  # type: ignore[arg-type]
    table = OperatorTable()
    table.pair(
        operator.spec.name, forward=lambda x: (x**2 + x**3, 7 * x),
        backward=lambda grad, *saved, needs: (
            (grad * (2 * saved[-1] / 7 + 3 * (saved[-1] / 7) ** 2)).detach(),
        ),
        num_residuals=1, fake_residuals=lambda x: torch.empty_like(x),
    )  # fmt: skip
    install(table)
    first, second = _second(_doors(operator)[door])
    assert (first, second) == (33.0, 20.0)


def test_double_backward_error_raises_through_both_doors() -> None:
    for function in _doors(polynomial("poly_once", double_backward="error")).values():
        x = torch.tensor(3.0, requires_grad=True)
        assert torch.autograd.grad(function(x), x)[0].item() == 33.0
        with pytest.raises(RuntimeError, match="poly_once: its gradient cannot be differentiated"):
            torch.autograd.grad(function(x), x, create_graph=True)


def test_create_graph_under_autocast_leaves_the_reference_exact() -> None:
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    y = ops.attention(q, q, q, causal=True)
    (want,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
    with torch.autocast("cpu"):
        (got,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
    assert bits(got) == bits(want)


def test_jacobian_vectorized_equals_the_loop() -> None:
    x, w = torch.randn(3, 4), torch.randn(4)
    jacobian = torch.autograd.functional.jacobian
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # vmap loops over what it cannot look into
        got = jacobian(lambda a: ops.rms_norm(a, w), x, vectorize=True)
    want = jacobian(lambda a: F.rms_norm(a, (4,), w, 1e-6), x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def _weights() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).requires_grad_() for shape in ((8, 16), (16,), (24, 16), (16, 12))]


def _block(x: Tensor, norm: Tensor, up: Tensor, down: Tensor, rng: Tensor) -> Tensor:
    y = ops.linear(ops.rms_norm(x, norm), up)
    return x + ops.dropout(ops.linear(ops.swiglu(*y.chunk(2, -1)), down), rng, p=0.3)


def _gradients(**options: Any) -> list[Any]:
    weights, rng = _weights(), torch.tensor([7, 1 << 33])
    if options:
        y = checkpoint(_block, *weights, rng, **options)
    else:
        y = _block(*weights, rng)
    y.square().sum().backward()  # torch.autograd.grad is not allowed when re-entrant
    return bits([w.grad for w in weights])


@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_checkpoint_gives_the_gradients_bit_for_bit(reentrant: bool) -> None:
    assert _gradients(use_reentrant=reentrant) == _gradients()


@pytest.mark.parametrize("choice", ["save all", "save linear", "recompute all"])
def test_selective_checkpoint_sees_the_operators_and_keeps_the_bits(choice: str) -> None:
    seen: list[tuple[bool, str]] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append((ctx.is_recompute, str(op)))
        save = choice == "save all" or (choice == "save linear" and "linear" in str(op))
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    context = partial(create_selective_checkpoint_contexts, policy)
    assert _gradients(use_reentrant=False, context_fn=context) == _gradients()
    first = [name for again, name in seen if not again and name.startswith("anychip")]
    assert first == [
        f"anychip.{name}_forward.default"
        for name in ("rms_norm", "linear", "swiglu", "linear", "dropout")
    ]


def test_checkpoint_recomputes_the_operator_once() -> None:
    _gradients(use_reentrant=False)
    calls = {(r.operator, r.direction): r.calls for r in anychip.provenance().rows()}
    assert calls["rms_norm", "forward"] == 2
    assert calls["rms_norm", "backward"] == 1
