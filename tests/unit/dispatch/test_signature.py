"""What a user sees of an operator, and the answers to calls that cannot be right."""

import inspect
import pydoc
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
        "(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-06) -> torch.Tensor"
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


o: Any = ops  # whose stubs would refuse these calls
CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: o.rms_norm(X, W, esp=1.0),
     r"rms_norm\(\) got an unknown argument 'esp'; did you mean 'eps'\?"),
    (lambda: o.rms_norm(X, W, zzz=1.0), "unknown argument 'zzz'; it takes x, weight, eps"),
    (lambda: o.rms_norm(X, W, 1e-5),
     r"takes 2 positional arguments \(x, weight\), got 3; the others are keyword-only"),
    (lambda: o.rms_norm(X), "is missing 'weight'"),
    (lambda: o.rms_norm(), "is missing 'x', 'weight'"),
    (lambda: o.rms_norm(X, W, x=X), "got 'x' twice"),
    (lambda: o.rms_norm(X, None), "weight must be a tensor, got NoneType"),
    (lambda: o.rms_norm(X, 1.0), "weight must be a tensor, got float"),
    (lambda: o.gelu(X.numpy()), r"gelu\(\): x must be a tensor, got ndarray"),
    (lambda: o.gelu([X]), r"gelu\(\): x must be a tensor, got list"),
    (lambda: o.l2_norm(X), "tensors must be a list of tensors, got Tensor"),
    (lambda: o.l2_norm([X, None]), r"tensors\[1\] must be a tensor, got None"),
    (lambda: o.l2_norm([X, 1.0]), r"tensors\[1\] must be a tensor, got float"),
    (lambda: o.l2_norm(None), "must be a list of tensors, got NoneType"),
    (lambda: o.rms_norm(X, W, eps="1e-6"), r"rms_norm\(\): eps must be a float, got '1e-6'"),
    (lambda: o.softmax(X, scale=torch.tensor(2.0)),
     r"softmax\(\): scale must be a float, got tensor\(2\.\) \(Tensor\)"),
    (lambda: o.rms_norm(X, W, eps=True), r"eps must be a float, got True \(bool\)"),
    (lambda: o.rms_norm(X, W, eps=None), r"eps must be a float, got None \(NoneType\)"),
    (lambda: o.top_k(X, k=2.0), r"top_k\(\): k must be an int, got 2\.0 \(float\)"),
    (lambda: o.hadamard(X, block=4.0), r"block must be an int or None, got 4\.0 \(float\)"),
    (lambda: o.softmax(X, causal=1), r"causal must be a bool, got 1 \(int\)"),
    (lambda: o.gelu(X, approximate=0), r"gelu\(\): approximate must be a str, got 0 \(int\)"),
    (lambda: o.conv2d(Q, Q, padding="same"),
     r"conv2d\(\): padding must be an int or 2 of them, got 'same' \(str\)"),
    (lambda: o.dequantize(X.char(), X[0], shape=["0"]),
     r"dequantize\(\): shape must be a list of int, got \['0'\] \(list\)"),
    (lambda: o.dequantize(X.char(), X[0], shape=0), r"must be a list of int, got 0 \(int\)"),
    (lambda: o.linear(X, X, out_dtype="float32"), "a torch.dtype or None, got 'float32'"),
    (lambda: o.grouped_linear(X, Q, W, out_dtype=1), "must be a torch.dtype or None, got 1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_call_that_does_not_fit_the_signature_is_a_type_error(
    call: Callable[[], Any], message: str
) -> None:
    ops.l2_norm([X, X])  # a right call with the same tensors must not make the wrong one pass
    ops.gelu(X)
    with pytest.raises(TypeError, match=message):
        call()
    with torch.autocast("cpu"), pytest.raises(TypeError, match=message):
        call()


def test_attribute_of_a_type_that_stands_for_the_right_one_is_taken() -> None:
    want = ops.hadamard(ops.rms_norm(X, W, eps=1.0), block=4)
    for eps, block in ((1, 4), (np.float32(1.0), np.int64(4)), (np.float64(1.0), np.int32(4))):
        assert torch.equal(ops.hadamard(ops.rms_norm(X, W, eps=eps), block=block), want)
    assert torch.equal(ops.hadamard(X, block=None), ops.hadamard(X, block=8))


def test_attribute_of_a_wrong_type_is_refused_by_the_library_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"rms_norm\(\) Expected.*'float' for argument 'eps'"):
        torch.ops.anychip.rms_norm(X, W, eps="1e-6")


# operators of a third party


@pytest.mark.parametrize(("register", "message"), [
    (lambda: anychip.register(SPECS["rms_norm"]), "operator 'rms_norm' exists already"),
    (lambda: anychip.operator(SPECS["rms_norm"]), "operator 'rms_norm' exists already"),
    (lambda: polynomial("numbers", signature="(Tensor x, float p) -> Tensor"),
     "'numbers': p is float; what is no tensor must be keyword-only"),
    (lambda: polynomial("lopsided", differentiable=()),
     "a backward needs differentiable arguments"),
    (lambda: polynomial("hasty", deferrable=("weight",)), r"no gradient: self\.deferrable="),
    (lambda: polynomial("unsaved", saved=("nothing",)),
     r"saved names \['nothing'\] are not in the spec"),
], ids=["register", "stub", "number", "lopsided", "deferrable", "saved"])  # fmt: skip
def test_registration_of_what_cannot_be_is_refused(
    register: Callable[[], object], message: str
) -> None:
    with pytest.raises((ContractError, ValueError), match=message):
        register()
