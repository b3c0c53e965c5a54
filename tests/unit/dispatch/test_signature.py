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


RNG = torch.tensor([1, 2])

SHAPES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rms_norm weight": (lambda o: o.rms_norm(X, torch.ones(7)), r"\(8,\).*\(2, 8\).*got \(7,\)"),
    "rms_norm weight 2-dim": (lambda o: o.rms_norm(X, torch.ones(1, 8)), r"got \(1, 8\)"),
    "rms_norm 0-dim": (lambda o: o.rms_norm(torch.ones(()), W), r"last dim of x \(\)"),
    "layer_norm bias": (lambda o: o.layer_norm(X, W, torch.ones(9)), r"bias.*got \(9,\)"),
    "dropout rng": (lambda o: o.dropout(X, torch.tensor([1])), r"rng.*got shape \(1,\)"),
    "dropout rng dtype": (lambda o: o.dropout(X, torch.tensor([1.0, 2.0])), "rng must be int64"),
    "dropout p": (lambda o: o.dropout(X, torch.tensor([1, 2]), p=1.5), r"p must be.*got 1\.5"),
    "dropout p nan": (lambda o: o.dropout(X, torch.tensor([1, 2]), p=float("nan")), "got nan"),
    "dropout rows": (
        lambda o: o.dropout(X, RNG, RNG[:1], width=8), r"of shape \(2,\); got \(1,\)",
    ),
    "dropout rows of 0-dim": (
        lambda o: o.dropout(torch.ones(()), RNG, RNG[0], width=8), r"each row of x \(\)",
    ),
    "dropout rows dtype": (lambda o: o.dropout(X, RNG, RNG.int(), width=8), "rows must be int64"),
    "dropout width": (
        lambda o: o.dropout(X, RNG, RNG, width=8, column=1), "of x; got width=8, column=1",
    ),
    "dropout column": (lambda o: o.dropout(X, RNG, RNG, width=8, column=-1), "got .*column=-1"),
    "dropout width alone": (lambda o: o.dropout(X, RNG, width=8), "got width=8 .* without rows"),
    "dropout column alone": (lambda o: o.dropout(X, RNG, column=1), "column=1 without rows"),
    "gelu mode": (lambda o: o.gelu(X, approximate="tan"), "approximate.*got 'tan'"),
    "softplus beta": (lambda o: o.softplus(X, beta=-1.0), r"beta must be above 0, got -1\.0"),
    "group_norm groups": (
        lambda o: o.group_norm(X, W, num_groups=3), r"multiple of num_groups 3; got \(2, 8\)",
    ),
    "group_norm 1-dim": (lambda o: o.group_norm(W, W, num_groups=1), r"\(N, C, \.\.\.\).*\(8,\)"),
    "group_norm bias": (
        lambda o: o.group_norm(X, W, W[:7], num_groups=2), r"bias must have shape \(8,\).*\(7,\)",
    ),
    "conv1d kernel": (
        lambda o: o.conv1d(Q[0], torch.ones(3, 2)), r"\(C, K\); got \(3, 4, 8\) and \(3, 2\)",
    ),
    "conv1d bias": (lambda o: o.conv1d(Q[0], torch.ones(4, 2), W), r"bias must be \(4,\), got"),
    "conv2d groups": (
        lambda o: o.conv2d(Q, torch.ones(4, 3, 1, 1), groups=3), r"\(4, 3, 1, 1\) with groups=3",
    ),
    "conv2d outputs": (
        lambda o: o.conv2d(Q, torch.ones(4, 1, 1, 1), groups=3), "a multiple of 3 outputs, got 4",
    ),
    "conv2d stride": (
        lambda o: o.conv2d(Q, torch.ones(4, 3, 1, 1), stride=[1, 0]), r"stride .*, got \[1, 0",
    ),
    "conv2d padding": (
        lambda o: o.conv2d(Q, torch.ones(4, 3, 1, 1), padding=[1, 1, 1]), "one or two numbers",
    ),
    "conv2d kernel too large": (
        lambda o: o.conv2d(Q, torch.ones(4, 3, 5, 1)), "the kernel must .* fit into x",
    ),
    "conv2d dtypes": (
        lambda o: o.conv2d(Q, torch.ones(4, 3, 1, 1).half()), "one dtype, got torch.float32, ",
    ),
    "swiglu": (lambda o: o.swiglu(X, W), r"got \(2, 8\) and \(8,\)"),
    "rope table": (lambda o: o.rope(Q, Q, W, W), r"cos and sin.*\(3, 4\)"),
    "rope odd": (
        lambda o: o.rope(Q[..., :7], Q[..., :7], torch.ones(3, 3), torch.ones(3, 3)),
        "head_dim must be even, got 7",
    ),
    "attention heads": (
        lambda o: o.attention(Q, Q[:, :, :3], Q[:, :, :3]), "multiple of the heads",
    ),
    "attention no heads": (lambda o: o.attention(Q, Q[:, :, :0], Q[:, :, :0]), "multiple of"),
    "rope table too wide": (
        lambda o: o.rope(Q, Q, torch.ones(3, 5), torch.ones(3, 5)),
        r"\(3, 4\), or narrower.*got \(3, 5\)",
    ),
    "attention keys and values": (lambda o: o.attention(Q, Q[:, :2], Q), r"k \(1, 2, 4, 8\)"),
    "attention batch": (
        lambda o: o.attention(Q.expand(2, -1, -1, -1), Q, Q),
        r"agree in batch; got q \(2, 3, 4, 8\)",
    ),
    "attention_dropout rng": (lambda o: o.attention_dropout(Q, Q, Q, RNG[:1]), r"shape \(1,\)"),
    "attention_dropout p": (lambda o: o.attention_dropout(Q, Q, Q, RNG, p=1.5), r"got 1\.5"),
    "attention_dropout index": (
        lambda o: o.attention_dropout(Q, Q, Q, RNG, None, RNG, heads=4),
        r"head_index must be int64\[4\], .* of q; got shape \(2,\)",
    ),
    "attention_dropout size": (
        lambda o: o.attention_dropout(Q, Q, Q, RNG, None, None, None, torch.arange(3), keys=2),
        "key_index goes with .* at least 3; got 2 with key_index",
    ),
    "attention_dropout no size": (
        lambda o: o.attention_dropout(Q, Q, Q, RNG, None, None, torch.arange(3)),
        "query_index goes with .* got 0 with query_index",
    ),
    "attention_dropout size alone": (
        lambda o: o.attention_dropout(Q, Q, Q, RNG, heads=8), "got 8 without head_index",
    ),
    "attention out_dtype": (
        lambda o: o.attention(Q, Q, Q, out_dtype=torch.float16),
        "out_dtype must be torch.float32, which the operands have, or float32; got torch.float16",
    ),
    "attention_varlen out_dtype": (
        lambda o: o.attention_varlen(Q[0], Q[0], Q[0], RNG, RNG, out_dtype=torch.int8),
        "out_dtype must be torch.float32",
    ),
    "attention_varlen 4-dim": (
        lambda o: o.attention_varlen(Q, Q, Q, RNG, RNG),
        r"\(tokens, heads, head_dim\); got q \(1, 3, 4, 8\)",
    ),
    "attention_varlen values": (
        lambda o: o.attention_varlen(Q[0], Q[0], Q[0, :2], RNG, RNG),
        r"one shape .*; got q \(3, 4, 8\), k \(3, 4, 8\), v \(2, 4, 8\)",
    ),
    "attention_varlen entries": (
        lambda o: o.attention_varlen(Q[0], Q[0], Q[0], RNG, RNG[:1]),
        r"\(sequences \+ 1,\).*got shapes \(2,\) and \(1,\)",
    ),
    "attention_varlen no entries": (
        lambda o: o.attention_varlen(Q[0], Q[0], Q[0], RNG[:0], RNG[:0]),
        r"\(sequences \+ 1,\).*got shapes \(0,\) and \(0,\)",
    ),
    "grouped_linear": (
        lambda o: o.grouped_linear(X, torch.ones(2, 3, 7), RNG),
        r"x must be \(T, K\) and weight \(G, N, K\); got \(2, 8\) and \(2, 3, 7\)",
    ),
    "grouped_linear offsets": (
        lambda o: o.grouped_linear(X, torch.ones(3, 3, 8), RNG),
        r"offsets must be \(3,\), the ends of the groups; got \(2,\)",
    ),
    "grouped_linear dtypes": (
        lambda o: o.grouped_linear(X, torch.ones(2, 3, 8).half(), RNG),
        "one dtype, got torch.float32 and torch.float16",
    ),
    "grouped_linear int16": (
        lambda o: o.grouped_linear(X, torch.ones(2, 3, 8), RNG.short()),
        "offsets must be int64 or int32, got int16",
    ),
    "attention_varlen float": (
        lambda o: o.attention_varlen(Q[0], Q[0], Q[0], RNG, RNG.float()),
        "cu_seqlens_k must be int64 or int32, got float32",
    ),
    "embedding int32": (lambda o: o.embedding(RNG.int(), X), "indices must be int64, got int32"),
    "attention 3-dim": (lambda o: o.attention(Q[0], Q[0], Q[0]), r"q \(3, 4, 8\)"),
    "attention head_dim 0": (lambda o: o.attention(*[Q[..., :0]] * 3), "head_dim must be at least"),
    "linear": (lambda o: o.linear(X, torch.ones(3, 7)), r"got \(2, 8\) and \(3, 7\)"),
    "linear bias": (lambda o: o.linear(X, torch.ones(3, 8), W), r"bias must be \(3,\), got \(8,\)"),
    "linear dtypes": (
        lambda o: o.linear(X, torch.ones(3, 8).half()),
        "one dtype, got torch.float32, torch.float16",
    ),
    "embedding weight": (lambda o: o.embedding(torch.tensor([0]), W), r"got \(8,\)"),
    "embedding indices": (lambda o: o.embedding(torch.tensor([0.5]), X), "indices must be int64"),
    "cross_entropy": (lambda o: o.cross_entropy(X, torch.tensor([1])), r"\(2, 8\) and \(1,\)"),
    "cross_entropy no classes": (
        lambda o: o.cross_entropy(X[:, :0], torch.tensor([1, 1])), "V > 0",
    ),
    "cross_entropy reduction": (
        lambda o: o.cross_entropy(X, torch.tensor([1, 1]), reduction="max"), "reduction.*got 'max'",
    ),
    "cross_entropy smoothing": (
        lambda o: o.cross_entropy(X, torch.tensor([1, 1]), label_smoothing=-0.1),
        r"label_smoothing.*got -0\.1",
    ),
    "linear_cross_entropy": (
        lambda o: o.linear_cross_entropy(X, torch.ones(3, 7), RNG),
        r"x must be \(\.\.\., K\) and weight \(V, K\) with V > 0; got \(2, 8\) and \(3, 7\)",
    ),
    "linear_cross_entropy no classes": (
        lambda o: o.linear_cross_entropy(X, torch.ones(0, 8), RNG), "V > 0",
    ),
    "linear_cross_entropy target": (
        lambda o: o.linear_cross_entropy(X, torch.ones(3, 8), RNG[:1]),
        r"target must be \(2,\).*got \(1,\)",
    ),
    "linear_cross_entropy bias": (
        lambda o: o.linear_cross_entropy(X, torch.ones(3, 8), RNG, W),
        r"bias must be \(3,\), got \(8,\)",
    ),
    "linear_cross_entropy dtypes": (
        lambda o: o.linear_cross_entropy(X, torch.ones(3, 8).half(), RNG),
        "one dtype, got torch.float32, torch.float16",
    ),
    "linear_cross_entropy z_loss": (
        lambda o: o.linear_cross_entropy(X, torch.ones(3, 8), RNG, z_loss=-1.0),
        r"z_loss must be at least 0, got -1\.0",
    ),
    "l2_norm of nothing": (lambda o: o.l2_norm([]), "at least one tensor expected, got none"),
}  # fmt: skip


@pytest.mark.parametrize("home", [ops, torch.ops.anychip], ids=["short cut", "library"])
@pytest.mark.parametrize("label", SHAPES)
def test_values_that_do_not_fit_are_a_value_error_that_names_them(label: str, home: Any) -> None:
    function, message = SHAPES[label]
    with pytest.raises(ValueError, match=message):
        function(home)


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
