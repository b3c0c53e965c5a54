"""A backward that is called by hand takes only tensors of one forward call."""

from typing import Any

import pytest
import torch
from torch import Tensor

from anychip.contract import ContractError
from anychip.dispatch.signature import Signature
from anychip.operators import all_specs
from tests.unit.dispatch.calls import DIFFERENTIABLE, SPECS, Call, backward_arguments, call
from tests.unit.dispatch.specs import polynomial

# Given with nothing that says of its shape, a gradient may have any; an angle says a part of it.
ANY_SHAPE = {("dropout", "grad0"), ("bias_dropout_add", "grad0"), ("hadamard", "grad0")}
# x may have another dtype than the residual, and its gradient alone says which.
STREAMS = ("add_rms_norm", "add_layer_norm", "dropout_add_rms_norm", "dropout_add_layer_norm")
NORMS = {(name, "grad0") for name in STREAMS}
OTHERS = {("rope", "grad0"), ("rope", "grad1"), ("top_k", "grad1"), ("top_k", "y1")}
ANY_DTYPE = {*ANY_SHAPE, *NORMS, *OTHERS}


def unknown(name: str) -> set[str]:
    """Arguments of which the backward is told nothing."""
    spec, schema = SPECS[name], torch._C.parse_schema(f"x::y{SPECS[name].signature}")
    required = {a.name for a in schema.arguments if not a.kwarg_only and "Opt" not in str(a.type)}
    return required - {*spec.saved, *spec.shaped_like}


TOLD = [name for name in DIFFERENTIABLE if not unknown(name)]


def names(made: Call) -> list[str]:
    """Gradients, outputs and residuals among the tensors of the backward."""
    schema = torch._C.parse_schema(f"x::y{made.spec.signature}")
    positional = {a.name for a in schema.arguments}
    grads = [f"grad{i}" for i in range(len(schema.returns))]
    return [*grads, *(n for n in made.spec.saved if n not in positional)]


def places(name: str) -> dict[str, int]:
    """Where they are among its arguments."""
    made = call(name, grad=False)
    count = len(torch._C.parse_schema(f"x::y{made.spec.signature}").returns)
    order = [*(f"grad{i}" for i in range(count)), *made.spec.saved]
    return {n: order.index(n) for n in names(made)}


RESULTS = [(name, result) for name in TOLD for result in places(name)]


def changed(name: str, result: str, change: Any) -> tuple[Call, tuple[Any, ...]]:
    """The right arguments of a backward, one of them changed."""
    made = call(name, grad=False)
    listed = list(backward_arguments(made))
    place = places(name)[result]
    listed[place] = change(listed[place])
    return made, tuple(listed)


def larger(tensor: Tensor) -> Tensor:
    if not tensor.dim():
        return tensor.expand(2).contiguous()
    return torch.cat([tensor, tensor[:1]])


def wider(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(0)


@pytest.mark.parametrize("change", [larger, wider], ids=["one row more", "one dim more"])
@pytest.mark.parametrize(
    ("name", "result"), [pytest.param(*r, id="-".join(r)) for r in RESULTS if r not in ANY_SHAPE]
)
def test_gradient_output_or_residual_of_another_shape_is_refused(
    name: str, result: str, change: Any
) -> None:
    made, arguments = changed(name, result, change)
    backward = made.door("_backward")
    backward(*backward_arguments(made))  # a right call does not make the wrong one pass
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{name}_backward: "):
            backward(*arguments)


@pytest.mark.parametrize(
    ("name", "result"), [pytest.param(*r, id="-".join(r)) for r in RESULTS if r not in ANY_DTYPE]
)
def test_gradient_output_or_residual_of_another_dtype_is_refused(name: str, result: str) -> None:
    made, arguments = changed(name, result, lambda t: t.half())
    with pytest.raises(ValueError, match=f"^{name}_backward: .* float16 "):
        made.door("_backward")(*arguments)


WRONG: dict[str, tuple[str, str, Any, str]] = {
    "weight": ("rms_norm", "weight", lambda t: t[1:], r"rms_norm_backward: weight must have shape"),
    "bias": (
        "softmax", "bias", lambda _: torch.ones(3), "softmax_backward: bias must be broadcast",
    ),
    "angles": ("rope", "cos", lambda t: t[1:], r"rope_backward: cos and sin must be"),
    "target": ("cross_entropy", "target", lambda t: t[1:], "cross_entropy_backward: logits must"),
    "rng": ("dropout", "rng", lambda t: t[:1], r"dropout_backward: rng .*got shape \(1,\)"),
}  # fmt: skip


@pytest.mark.parametrize("label", WRONG)
def test_saved_argument_that_does_not_fit_is_refused_as_in_the_forward(label: str) -> None:
    name, argument, change, message = WRONG[label]
    made = call(name, grad=False)
    listed = list(backward_arguments(made))
    grads = len(torch._C.parse_schema(f"x::y{made.spec.signature}").returns)
    place = grads + made.spec.saved.index(argument)
    listed[place] = change(listed[place])
    with pytest.raises(ValueError, match=message):
        made.door("_backward")(*listed)


def test_needs_of_another_length_names_the_arguments() -> None:
    *given, _ = backward_arguments(call("rms_norm", grad=False))
    with pytest.raises(ValueError, match="needs must have one entry for each of x, weight, got 1"):
        torch.ops.anychip.rms_norm_backward(*given, [True])


def test_refusal_names_form_expected_and_got() -> None:
    x, weight, rstd = torch.ones(3, 8), torch.ones(8), torch.ones(3)
    message = r"_backward: grad0 must be float32 \(3, 8\) for these arguments, got float32 \(3, 7\)"
    with pytest.raises(ValueError, match=message):
        torch.ops.anychip.rms_norm_backward(x[:, :7], x, weight, rstd, 1e-6, [True, True])


def test_operators_whose_backward_is_not_told_are_these() -> None:
    """The norms of a residual stream compare their sum with its gradient, permute its map."""
    assert {*DIFFERENTIABLE} - {*TOLD} <= {*STREAMS, "permute"}
    made = call("add_rms_norm", grad=False)
    grad, dtotal, *rest = backward_arguments(made)
    with pytest.raises(ValueError, match="add_rms_norm_backward: grad1 must be float32"):
        made.door("_backward")(grad, larger(dtotal), *rest)


def test_shaped_like_a_tensor_that_the_backward_is_not_given_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shaped_like names.*nothing.*is given grad0, x"):
        polynomial("poly_like", shaped_like={"x": "nothing"})


@pytest.mark.parametrize("indexes", [
    {"x": "other[0]"}, {"other": "x[0]"}, {"x": "x"}, {"x": "some of x[0]"}, {"x": "x[a]"},
], ids=str)  # fmt: skip
def test_indexes_of_nothing_are_refused(indexes: dict[str, str]) -> None:
    with pytest.raises(ContractError, match=r"indexes\[.*\] is .* an argument of x was expected"):
        polynomial("poly_indexed", indexes=indexes)


ANY_NUMBERS = {
    "batch_index", "head_index", "indices", "key", "key_index", "num_tokens", "query_index", "rng",
    "rows", "target",
}  # fmt: skip
"""Those that may be anything: places in a whole, keys, states, choices and classes of others."""


def test_integer_arguments_say_what_they_count_or_may_be_any_number() -> None:
    found = set()
    for spec in all_specs():
        signature = Signature.parse(spec)
        whole = [n for n in signature.positional if "int64" in str(spec.fixed_dtypes.get(n))]
        found |= {name for name in whole if name not in signature.indexes}
        assert {*signature.indexes} <= {*whole}
    assert found == ANY_NUMBERS


def test_operator_that_does_not_say_still_compares_output_and_gradient() -> None:
    made = polynomial(
        "poly_silent", "output", signature="(Tensor x, Tensor other) -> Tensor",
        forward=lambda x, other: x**2 + x**3, fake=lambda x, other: torch.empty_like(x), sizes=None,
    )  # fmt: skip
    backward = torch.ops.polynomials.poly_silent_backward
    assert made.gradient is not None
    x, y = torch.ones(3), torch.full((3,), 2.0)
    assert torch.equal(backward(torch.ones(3), x, y, [True]), torch.full((3,), 5.0))
    with pytest.raises(ValueError, match=r"poly_silent_backward: grad0 must be float32 \(3,\)"):
        backward(torch.ones(4), x, y, [True])
