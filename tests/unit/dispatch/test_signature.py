"""What a user sees of an operator, and the answers to calls that cannot be right."""

import inspect
import pydoc
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import anychip
from anychip import ContractError, ops
from tests.unit.dispatch.calls import SPECS
from tests.unit.dispatch.specs import polynomial

X, W = torch.ones(2, 8), torch.ones(8)
Q = torch.ones(1, 3, 4, 8)


@pytest.mark.parametrize("name", SPECS)
def test_signature_of_every_operator_agrees_with_its_schema(name: str) -> None:
    shown = inspect.signature(getattr(ops, name))
    schema = torch._C.parse_schema(f"x::y{SPECS[name].signature}")
    assert list(shown.parameters) == [a.name for a in schema.arguments]
    for parameter, argument in zip(shown.parameters.values(), schema.arguments, strict=True):
        assert (parameter.kind is parameter.KEYWORD_ONLY) == argument.kwarg_only
        has = parameter.default is not parameter.empty
        assert has == argument.has_default_value()
        default = parameter.default
        if argument.N and isinstance(default, int):
            default = [default] * argument.N  # one number stands for all
        assert not has or default == argument.default_value


def test_signature_is_the_typed_one() -> None:
    assert str(inspect.signature(ops.rms_norm)) == (
        "(x: 'Tensor', weight: 'Tensor', *, eps: 'float' = 1e-06) -> 'Tensor'"
    )


@pytest.mark.parametrize("name", SPECS)
def test_help_shows_the_operators_own_text(name: str) -> None:
    operator = getattr(ops, name)
    text = pydoc.render_doc(operator, renderer=pydoc.plaintext)  # type: ignore[attr-defined]
    first = str(operator.__doc__).splitlines()[0]
    assert len(first) > 20
    assert first in text
    assert operator.__name__ == name
    assert operator.__module__.startswith("anychip.ops.")
    assert f"anychip::{name}(" in repr(operator)


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown keyword": (
        lambda: ops.rms_norm(X, W, esp=1.0),  # type: ignore[call-arg]
        r"rms_norm\(\) got an unknown argument 'esp'; did you mean 'eps'\?",
    ),
    "unknown keyword, nothing near": (
        lambda: ops.rms_norm(X, W, zzz=1.0),  # type: ignore[call-arg]
        r"unknown argument 'zzz'; it takes x, weight, eps",
    ),
    "too many": (
        lambda: ops.rms_norm(X, W, 1e-5),  # type: ignore[call-arg]
        r"takes 2 positional arguments \(x, weight\), got 3; the others are keyword-only",
    ),
    "missing": (lambda: ops.rms_norm(X), r"is missing 'weight'"),  # type: ignore[call-arg]
    "all missing": (lambda: ops.rms_norm(), r"is missing 'x', 'weight'"),  # type: ignore[call-arg]
    "twice": (lambda: ops.rms_norm(X, W, x=X), r"got 'x' twice"),  # type: ignore[misc]
    "None": (lambda: ops.rms_norm(X, None), r"weight must be a tensor, got NoneType"),
    "number": (lambda: ops.rms_norm(X, 1.0), r"weight must be a tensor, got float"),
    "array": (lambda: ops.gelu(X.numpy()), r"gelu\(\): x must be a tensor, got ndarray"),
    "list for a tensor": (lambda: ops.gelu([X]), r"gelu\(\): x must be a tensor, got list"),
    "tensor for a list": (lambda: ops.l2_norm(X), r"tensors must be a list of tensors, got Tensor"),
    "None in a list": (lambda: ops.l2_norm([X, None]), r"tensors\[1\] must be a tensor, got None"),
    "number in a list": (
        lambda: ops.l2_norm([X, 1.0]),
        r"tensors\[1\] must be a tensor, got float",
    ),
    "None for a list": (lambda: ops.l2_norm(None), r"must be a list of tensors, got NoneType"),
    "text for a float": (
        lambda: ops.rms_norm(X, W, eps="1e-6"),  # type: ignore[arg-type]
        r"rms_norm\(\): eps must be a float, got '1e-6' \(str\)",
    ),
    "tensor for a float": (
        lambda: ops.softmax(X, scale=torch.tensor(2.0)),  # type: ignore[arg-type]
        r"softmax\(\): scale must be a float, got tensor\(2\.\) \(Tensor\)",
    ),
    "bool for a float": (
        lambda: ops.rms_norm(X, W, eps=True),
        r"eps must be a float, got True \(bool\)",
    ),
    "text for a dtype": (
        lambda: ops.linear(X, X, out_dtype="float32"),  # type: ignore[arg-type]
        "out_dtype must be a torch.dtype or None, got 'float32'",
    ),
    "int for a dtype": (
        lambda: ops.grouped_linear(X, Q, W, out_dtype=1),  # type: ignore[arg-type]
        "out_dtype must be a torch.dtype or None, got 1",
    ),
    "None for a float": (
        lambda: ops.rms_norm(X, W, eps=None),  # type: ignore[arg-type]
        r"eps must be a float, got None \(NoneType\)",
    ),
    "float for an int": (
        lambda: ops.top_k(X, k=2.0),  # type: ignore[arg-type]
        r"top_k\(\): k must be an int, got 2\.0 \(float\)",
    ),
    "float for an int that may be None": (
        lambda: ops.hadamard(X, block=4.0),  # type: ignore[arg-type]
        r"block must be an int or None, got 4\.0 \(float\)",
    ),
    "int for a bool": (lambda: ops.softmax(X, causal=1), r"causal must be a bool, got 1 \(int\)"),
    "number for text": (
        lambda: ops.gelu(X, approximate=0),  # type: ignore[arg-type]
        r"gelu\(\): approximate must be a str, got 0 \(int\)",
    ),
    "text for a pair of ints": (
        lambda: ops.conv2d(Q, Q, padding="same"),  # type: ignore[arg-type]
        r"conv2d\(\): padding must be an int or 2 of them, got 'same' \(str\)",
    ),
    "text in a list of ints": (
        lambda: ops.dequantize(X.char(), X[0], shape=["0"]),  # type: ignore[list-item]
        r"dequantize\(\): shape must be a list of int, got \['0'\] \(list\)",
    ),
    "int for a list of ints": (
        lambda: ops.dequantize(X.char(), X[0], shape=0),  # type: ignore[arg-type]
        r"shape must be a list of int, got 0 \(int\)",
    ),
}


@pytest.mark.parametrize("label", CALLS)
def test_call_that_does_not_fit_the_signature_is_a_type_error(label: str) -> None:
    function, message = CALLS[label]
    ops.l2_norm([X, X])  # a right call with the same tensors must not make the wrong one pass
    ops.gelu(X)
    with pytest.raises(TypeError, match=message):
        function()
    with torch.autocast("cpu"), pytest.raises(TypeError, match=message):
        function()


def test_attribute_of_a_type_that_stands_for_the_right_one_is_taken() -> None:
    want = ops.hadamard(ops.rms_norm(X, W, eps=1.0), block=4)
    for eps, block in ((1, 4), (np.float32(1.0), np.int64(4)), (np.float64(1.0), np.int32(4))):
        got = ops.hadamard(ops.rms_norm(X, W, eps=eps), block=block)
        assert torch.equal(got, want)
    assert torch.equal(ops.hadamard(X, block=None), ops.hadamard(X, block=8))


def test_attribute_of_a_wrong_type_is_refused_by_the_library_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"rms_norm\(\) Expected.*'float' for argument 'eps'"):
        torch.ops.anychip.rms_norm(X, W, eps="1e-6")


# operators of a third party


def test_register_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ContractError, match="operator 'rms_norm' exists already"):
        anychip.register(SPECS["rms_norm"])


def test_stub_of_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ContractError, match="operator 'rms_norm' exists already"):
        anychip.operator(SPECS["rms_norm"])


def test_register_a_number_among_the_tensors_is_refused() -> None:
    message = "'numbers': p is float; what is no tensor must be keyword-only"
    with pytest.raises(ContractError, match=re.escape(message)):
        polynomial("numbers", signature="(Tensor x, float p) -> Tensor")


def test_register_a_backward_without_differentiable_arguments_is_refused() -> None:
    with pytest.raises(ContractError, match="a backward needs differentiable arguments"):
        polynomial("lopsided", differentiable=())


def test_register_what_is_deferrable_must_have_a_gradient() -> None:
    with pytest.raises(ContractError, match=r"no gradient: self\.deferrable="):
        polynomial("hasty", deferrable=("weight",))


def test_register_what_is_saved_must_be_in_the_spec() -> None:
    with pytest.raises(ValueError, match=r"saved names \['nothing'\] are not in the spec"):
        polynomial("unsaved", saved=("nothing",))
