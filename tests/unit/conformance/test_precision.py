"""Do the limits separate the precision that is demanded from the next lower one?

The references pass with room. The same references one precision class lower fail, at every length
that an oracle lists for it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anychip.conformance.arithmetic import Rounded
from anychip.conformance.bounds import Measurement, measure
from anychip.conformance.calls import Call, tensors_of
from anychip.conformance.formats import FORMATS
from anychip.conformance.oracles import ORACLES
from anychip.conformance.oracles.oracle import numbers
from anychip.contract import OperatorSpec
from anychip.dispatch.signature import Signature
from anychip.operators import all_specs
from tests.unit.conformance.lower_precision import (
    FastFunctions,
    Recursive,
    lower_arithmetic,
    lower_inputs,
    tf32,
)

SPECS = {spec.name: spec for spec in all_specs()}
ROOM = 0.95
"""Largest error of a reference's float32 result, in units of its bound. A 16-bit result is rounded
once, and half an ULP of it is nearly the whole bound: somewhere that half is always reached."""
ONE_ROUNDING = {
    (name, dtype) for name in ("unscale_and_check", "top_k", "relu", "relu2", "sums_of_squares")
    for dtype in (torch.bfloat16, torch.float16)
}  # fmt: skip
"""One operation, rounded once, or whole numbers: there is nothing to do in a lower precision."""


class Run:
    """One call of a reference, forward and backward, and the oracle's answer to it."""

    def __init__(self, spec: OperatorSpec, call: Call, dtype: torch.dtype) -> None:
        self.spec, self.call, self.dtype = spec, call, dtype
        self.signature, self.oracle = Signature.parse(spec), ORACLES[spec.name]
        args, attrs = call.arguments(spec.name, dtype)
        self.args, self.attrs = self.signature.bind(args, attrs)

    def measurements(self, *, lower: bool) -> list[Measurement]:
        """Forward results and gradients against the oracle."""
        args, attrs = self.signature.bind(*self.call.arguments(self.spec.name, self.dtype))
        if lower:
            args = tuple(lower_inputs(args, self.dtype, self.signature.written))
        results = self.forward(args, attrs, lower=lower)
        with np.errstate(all="ignore"):
            wanted = self.oracle.forward(*map(numbers, self.args), **self.attrs)
        pairs = list(zip(results, wanted, self.forms(), strict=True))
        if not self.signature.written:
            pairs = pairs[: self.signature.num_outputs]
        found = [self.compare(got.to(form), want) for got, want, form in pairs]
        if self.oracle.backward is not None and self.call.gradient:
            found += self.gradients(args, attrs, results, lower=lower)
        return found

    def forward(self, args: Sequence[Any], attrs: dict[str, Any], *, lower: bool) -> list[Tensor]:
        if not lower:
            returned = self.spec.forward(*args, **attrs)
        else:
            with lower_arithmetic(self.dtype):
                returned = self.spec.forward(*args, **attrs)
        if self.signature.written:
            return list(tensors_of([args[i] for i in self.signature.written]))
        return list(self.signature.results(returned))

    def forms(self) -> list[torch.dtype]:
        """The dtypes that results must have."""
        if self.signature.written:
            return [t.dtype for t in tensors_of([self.args[i] for i in self.signature.written])]
        meta = [_meta(arg) for arg in self.args]
        return [t.dtype for t in self.signature.results(self.spec.fake(*meta, **self.attrs))]

    def gradients(
        self, args: Sequence[Any], attrs: dict[str, Any], results: Sequence[Tensor], *, lower: bool
    ) -> list[Measurement]:
        assert self.oracle.backward is not None
        assert self.spec.backward is not None
        count = self.signature.num_outputs
        generator = torch.Generator().manual_seed(9)
        grads = [
            torch.randn(y.shape, generator=generator).to(form)
            for y, form in zip(results[:count], self.forms(), strict=False)
        ]
        outputs = ["y"] if count == 1 else [f"y{i}" for i in range(count)]
        named = dict(zip(self.signature.positional, args, strict=True))
        named |= dict(zip(outputs, results, strict=False))
        named |= {r.name: t for r, t in zip(self.spec.residuals, results[count:], strict=True)}
        saved = [named[name] for name in self.spec.saved]
        needs = tuple(named[name] is not None for name in self.spec.differentiable)
        given = lower_inputs(grads, self.dtype) if lower else grads
        if lower:
            with lower_arithmetic(self.dtype):
                found = self.spec.backward(*given, *saved, **attrs, needs=needs)
        else:
            found = self.spec.backward(*given, *saved, **attrs, needs=needs)
        with np.errstate(all="ignore"):
            wanted = self.oracle.backward(
                tuple(map(numbers, grads)), *map(numbers, self.args), **self.attrs
            )
        return [
            self.compare(got.to(named[name].dtype), want)
            for name, got, want in zip(self.spec.differentiable, found, wanted, strict=True)
            if got is not None and want is not None
        ]

    def compare(self, got: Tensor, want: Rounded) -> Measurement:
        with np.errstate(all="ignore"):
            return measure("result", got, want, statistical=self.call.statistical)


def _meta(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return [t.to("meta") for t in arg]
    return arg.to("meta") if isinstance(arg, Tensor) else arg


def quick_calls(name: str) -> list[Call]:
    """What is large says nothing about precision, and takes long."""
    oracle = ORACLES[name]
    return [*oracle.plain, *(c for c in oracle.calls if not (c.full or c.full_in_16_bits))]


@pytest.mark.grid
@pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: FORMATS[d].name)
@pytest.mark.parametrize("name", ORACLES)
def test_reference_passes_with_room(name: str, dtype: torch.dtype) -> None:
    for call in quick_calls(name):
        for found in Run(SPECS[name], call, dtype).measurements(lower=False):
            assert found.failure is None, f"{call.label}: {found.failure}"
            assert found.max <= (ROOM if found.format == "fp32" else 1.0), call.label
            assert found.rms is None or found.rms <= 0.8, call.label


@pytest.mark.grid
@pytest.mark.parametrize("name", ORACLES)
def test_reference_with_term_by_term_float32_sums_passes(name: str) -> None:
    for dtype in FORMATS:
        for call in quick_calls(name):
            run = Run(SPECS[name], call, dtype)
            if sum(t.numel() for t in tensors_of(run.args)) > 30_000:
                continue  # a Python loop over so many terms
            with Recursive():
                found = run.measurements(lower=False)
            assert [m.failure for m in found if m.failure is not None] == [], call.label


LOWER = [
    (name, call.label, dtype) for name, oracle in ORACLES.items() for call in oracle.calls
    if call.telling for dtype in FORMATS if (name, dtype) not in ONE_ROUNDING
]  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "label", "dtype"), LOWER, ids=[f"{n}-{c}-{FORMATS[d].name}" for n, c, d in LOWER]
)
def test_reference_one_precision_lower_fails(name: str, label: str, dtype: torch.dtype) -> None:
    call = next(c for c in ORACLES[name].calls if c.label == label)
    run = Run(SPECS[name], call, dtype)
    assert all(found.failure is None for found in run.measurements(lower=False))
    assert any(found.failure is not None for found in run.measurements(lower=True))


FAST = {
    "rms_norm": "5x64", "layer_norm": "5x64", "add_rms_norm": "5x64", "add_layer_norm": "5x64",
    "dropout_add_rms_norm": "5x64", "dropout_add_layer_norm": "5x64",
    "group_norm": "2x24x72",
    "silu": "1025", "sigmoid": "1025", "tanh": "1025", "softplus": "1025",
    "gelu": "1025.tanh", "bias_gelu": "1025.none", "swiglu": "1025", "geglu": "1025.tanh",
    "softmax": "3x1x1000", "attention": "1x65x1x3x40.full",
    "attention_dropout": "1x65x1x3x40", "attention_varlen": "15+17+33",
    "cross_entropy": "6x11.none", "linear_cross_entropy": "5x13x24x130.none", "l2_norm": "17",
    "adamw": "plain", "lamb": "plain", "lamb_sums_of_squares": "plain",
}  # fmt: skip
"""Operators of functions; the others add, multiply, divide and select."""


@pytest.mark.parametrize("name", FAST)
def test_reference_with_fast_functions_fails(name: str) -> None:
    call = next(c for c in ORACLES[name].calls if c.label == FAST[name])
    with FastFunctions():
        found = Run(SPECS[name], call, torch.float32).measurements(lower=False)
    assert any(m.failure is not None for m in found)


def test_every_oracle_lists_calls_at_which_lower_precision_fails() -> None:
    for name, oracle in ORACLES.items():
        assert any(call.telling for call in oracle.calls), name


@pytest.mark.parametrize("length", [16, 64, 256, 1024, 4096])
def test_product_of_tf32_factors_fails_statistically_at_every_length(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(16, length, generator=generator)
    weight = torch.randn(16, length, generator=generator)
    (want,) = ORACLES["linear"].forward(numbers(x), numbers(weight), None)
    good, bad = (measure("y", a @ b.T, want) for a, b in ((x, weight), (tf32(x), tf32(weight))))
    assert good.failure is None
    assert good.rms is not None
    assert bad.rms is not None
    assert good.rms < 0.5
    assert bad.rms > 10.0
    assert bad.failure is not None


def test_rounding_to_tf32_keeps_ten_bits() -> None:
    x = torch.tensor([1.0, 1.0 + 2.0**-10, 1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11, -3.14159, 1e-30])
    assert tf32(x)[:4].tolist() == [1.0, 1.0 + 2.0**-10, 1.0, 1.0 + 2.0**-9]
    assert ((tf32(x) - x).abs() <= x.abs() * 2.0**-11).all()
