"""Is every backward formula of a reference the derivative of its forward, in float64?

A backend computes in float32 and less, where ``gradcheck`` cannot see; the suite compares its
gradients with the oracles' instead. The formulas themselves are checked here, on the host.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from anychip.conformance.calls import tensors_of
from anychip.conformance.oracles import ORACLES
from anychip.conformance.oracles.reference import InFloat64
from anychip.contract import OperatorSpec
from anychip.dispatch.signature import Signature
from anychip.operators import all_specs

SPECS = {spec.name: spec for spec in all_specs() if spec.backward is not None}


class Formula(torch.autograd.Function):
    """A reference's forward and backward as autograd sees them."""

    @staticmethod
    def forward(ctx: Any, spec: OperatorSpec, attrs: dict[str, Any], *args: Any) -> Any:
        signature = Signature.parse(spec)
        with InFloat64():
            results = list(signature.results(spec.forward(*args, **attrs)))
        ctx.call, ctx.results = (spec, signature, attrs, args), results
        outputs = results[: signature.num_outputs]
        ctx.mark_non_differentiable(*(y for y in outputs if not y.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        spec, signature, attrs, args = ctx.call
        count = signature.num_outputs
        outputs = ["y"] if count == 1 else [f"y{i}" for i in range(count)]
        named = dict(zip(signature.positional, args, strict=True))
        named |= dict(zip(outputs, ctx.results, strict=False))
        named |= {r.name: t for r, t in zip(spec.residuals, ctx.results[count:], strict=True)}
        needs = tuple(named[name] is not None for name in spec.differentiable)
        with InFloat64():
            found = spec.backward(
                *grads, *(named[name] for name in spec.saved), **attrs, needs=needs
            )
        by_name = dict(zip(spec.differentiable, found, strict=True))
        return None, None, *(by_name.get(name) for name in signature.positional)


def double(arg: Any) -> Any:
    return arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg


def outputs_of(spec: OperatorSpec, args: list[Any], attrs: dict[str, Any], *_: Tensor) -> Any:
    """The outputs that have gradients; the leaves stand among the arguments already."""
    outputs = Formula.apply(spec, attrs, *args)  # type: ignore[no-untyped-call]
    return tuple(y for y in outputs if y.is_floating_point())


@pytest.mark.grid
@pytest.mark.parametrize("name", SPECS)
def test_backward_of_reference_is_the_derivative_of_its_forward(name: str) -> None:
    spec, checked = SPECS[name], 0
    signature = Signature.parse(spec)
    for call in ORACLES[name].plain:
        if checked >= 2:
            break
        args, attrs = signature.bind(*call.arguments(name, torch.float32))
        size = sum(t.numel() for t in tensors_of(args))
        finite = all(bool(t.isfinite().all()) for t in tensors_of(args))
        if not 8 <= size <= 520 or not finite:
            continue
        wide = [double(arg) for arg in args]
        places = [signature.positional.index(n) for n in spec.differentiable]
        leaves = [wide[i].requires_grad_() for i in places if wide[i] is not None]
        apply = partial(outputs_of, spec, wide, attrs)
        if not all(bool(y.isfinite().all()) for y in apply()):
            continue  # the mean over no targets
        assert torch.autograd.gradcheck(apply, leaves), call.label
        checked += 1 if size <= 150 else 2  # a large one takes long
    assert checked
