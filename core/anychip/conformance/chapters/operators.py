"""Does every operator compute what its specification says, and only that?

Values: every call of the oracle, in every dtype, against the oracle's number and bound. Rules:
outputs are fresh and fully written, the same bits come twice and by both doors, residuals are
canonical, in-place operators write what they declare, autograd hears of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import anychip.ops  # noqa: F401 - defines our operators
from anychip.conformance.arithmetic import Rounded
from anychip.conformance.calls import (
    Arguments,
    Call,
    PlacedCall,
    describe_call,
    place_call,
    tensors_of,
)
from anychip.conformance.case import Case, Context, check, check_equal_bits, expect_error
from anychip.conformance.formats import FORMATS
from anychip.conformance.oracles import Oracle, oracle_of
from anychip.conformance.oracles.oracle import numbers
from anychip.dispatch.library import door
from anychip.dispatch.operator import Operator, registered

AnyOperator = Operator[..., Any]
RULE_CALLS = 5
"""Calls that a rule is checked on: it does not depend on the values, only on what is called."""


class Trial:
    """One call of one operator in one dtype, as the cases of two chapters need it."""

    def __init__(self, operator: AnyOperator, call: Call, dtype: torch.dtype) -> None:
        self.operator, self.call, self.dtype = operator, call, dtype
        self.signature = operator.signature
        args, attrs = call.arguments(operator.spec.name, dtype)
        self.arguments: Arguments = self.signature.bind(args, attrs)
        self.written = self.signature.written

    def place(self, context: Context) -> PlacedCall:
        """The arguments on the device, anew; and the call's description for a failure."""
        name, (args, attrs) = self.operator.spec.name, self.arguments
        context.call = describe_call(name, self.arguments)
        if self.call.layout != "contiguous":
            context.call += f", {self.call.layout} in memory"
        placed = place_call(
            self.signature.positional, (args, attrs), context.device, self.call.layout
        )
        lines = self.operator.explain(*placed.args, **attrs).lines
        taken = [f"{line.provider}: {line.implementation}" for line in lines if line.taken]
        context.served_by = ", ".join(taken) or None
        return placed

    def run(self, placed: PlacedCall) -> list[Tensor]:
        """Outputs; for an in-place operator every written tensor."""
        return self.results(self.operator(*placed.args, **placed.attrs), placed)

    def results(self, returned: Any, placed: PlacedCall) -> list[Tensor]:
        """What there is to compare after a call."""
        if self.written:
            return list(tensors_of([placed.args[i] for i in self.written]))
        return list(self.signature.results(returned))

    def names(self) -> list[str]:
        """Names of what ``results`` gives."""
        if self.written:
            found = []
            for index in self.written:
                name, arg = self.signature.positional[index], self.arguments[0][index]
                if isinstance(arg, (list, tuple)):
                    found += [f"{name}[{entry}]" for entry in range(len(arg))]
                elif arg is not None:
                    found.append(name)
            return found
        count = self.signature.num_outputs
        return ["y"] if count == 1 else [f"y{i}" for i in range(count)]

    def expected(self, oracle: Oracle) -> Sequence[Rounded]:
        """The oracle's outputs, then residuals; or every written tensor."""
        args, attrs = self.arguments
        with np.errstate(all="ignore"):
            return oracle.forward(*(numbers(arg) for arg in args), **attrs)

    def fake(self) -> list[Tensor]:
        """Shapes and dtypes that outputs and residuals must have, by the specification."""
        args = [_meta(arg) for arg in self.arguments[0]]
        return list(self.signature.results(self.operator.spec.fake(*args, **self.arguments[1])))


def _meta(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return arg.to("meta")
    return [t.to("meta") for t in arg] if isinstance(arg, (list, tuple)) else arg


def cases(context: Context) -> Iterator[Case]:
    """Per operator and dtype: a case per call, and a case per rule."""
    for name, operator in registered().items():
        oracle = oracle_of(operator.spec)
        for dtype in context.dtypes:
            where = f"operators/{name}/{FORMATS[dtype].name}"
            for call in oracle.calls():
                run = partial(
                    check_values, operator=operator, oracle=oracle, call=call, dtype=dtype
                )
                yield Case(id=f"{where}/{call.label}", run=run, full=call.full)
            for rule, applies, check_rule in RULES:
                if applies(operator, context):
                    bound = partial(check_rule, operator=operator, oracle=oracle, dtype=dtype)
                    yield Case(id=f"{where}/rule:{rule}", run=bound)


def check_values(
    context: Context, *, operator: AnyOperator, oracle: Oracle, call: Call, dtype: torch.dtype
) -> None:
    """The results of one call: form, values, and that nothing else was written."""
    trial = Trial(operator, call, dtype)
    placed = trial.place(context)
    results = trial.run(placed)
    if not trial.written:
        check_form(context, trial, results)
        check_apart(trial, placed, results)
    for name, got, want in zip(trial.names(), results, trial.expected(oracle), strict=False):
        context.compare(name, got, want, statistical=call.statistical)
    problem = placed.touched(trial.written)
    check(problem is None, f"an argument that may not be written: {problem}")


def check_form(context: Context, trial: Trial, results: Sequence[Tensor]) -> None:
    """Shape, dtype, device and contiguity of every output."""
    check(
        len(results) == trial.signature.num_outputs,
        f"{trial.signature.num_outputs} outputs expected, got {len(results)}",
    )
    for name, got, want in zip(trial.names(), results, trial.fake(), strict=False):
        check(got.dtype == want.dtype, f"{name}: {want.dtype} expected, got {got.dtype}")
        check(
            got.shape == want.shape,
            f"{name}: shape {tuple(want.shape)} expected, got {tuple(got.shape)}",
        )
        device = torch.empty(0, device=context.device).device
        check(got.device == device, f"{name}: on {device} expected, got {got.device}")
        check(got.is_contiguous(), f"{name} must be contiguous, its strides are {got.stride()}")


def check_apart(trial: Trial, placed: PlacedCall, results: Sequence[Tensor]) -> None:
    """No output shares memory with an argument or with another output."""
    taken = {p.buffer.untyped_storage().data_ptr(): name for _, name, p in placed.placed}
    for name, y in zip(trial.names(), results, strict=True):
        other = taken.setdefault(y.untyped_storage().data_ptr(), name) if y.numel() else name
        check(other == name, f"{name} shares memory with {other}")


# Rules


def rule_calls(oracle: Oracle) -> list[Call]:
    """A few calls of an operator, small ones, one of every layout among them; no special values."""
    usable = [c for c in oracle.calls() if not c.full and c.gradient]
    plain = [c for c in usable if c.layout == "contiguous"][2 : 2 + RULE_CALLS]
    return plain + [c for c in usable if c.layout != "contiguous"]


def each_trial(operator: AnyOperator, oracle: Oracle, dtype: torch.dtype) -> Iterator[Trial]:
    for call in rule_calls(oracle):
        yield Trial(operator, call, dtype)


def rule_fresh(
    context: Context, *, operator: AnyOperator, oracle: Oracle, dtype: torch.dtype
) -> None:
    """Two calls give two tensors: the first one is not overwritten by the second."""
    for trial in each_trial(operator, oracle, dtype):
        placed = trial.place(context)
        first = trial.run(placed)
        second = trial.run(placed)
        for name, early, late in zip(trial.names(), first, second, strict=True):
            same = early.untyped_storage().data_ptr() == late.untyped_storage().data_ptr()
            check(not (same and early.numel()), f"{name} of two calls is one tensor")


def rule_written(
    context: Context, *, operator: AnyOperator, oracle: Oracle, dtype: torch.dtype
) -> None:
    """Every element of an output is written: what lay in the memory before does not show."""
    for trial in each_trial(operator, oracle, dtype):
        placed = trial.place(context)
        sizes = [y.nbytes for y in trial.run(placed)]
        wanted = trial.expected(oracle)
        for pattern in (0xFF, 0x7B):  # NaN in every format; large numbers
            fill_free_blocks(context, sizes, pattern)
            for name, got, want in zip(trial.names(), trial.run(placed), wanted, strict=False):
                context.compare(f"{name}, with 0x{pattern:X} in free memory", got, want)
        with torch_fills_empty():
            results = trial.run(placed)
        for name, got, want in zip(trial.names(), results, wanted, strict=False):
            context.compare(f"{name}, where torch.empty gives NaN", got, want)


def fill_free_blocks(context: Context, sizes: Sequence[int], pattern: int) -> None:
    """Writes a pattern into blocks of these sizes and frees them."""
    blocks = [
        torch.empty(size, dtype=torch.uint8, device=context.device).fill_(pattern)
        for size in sizes
        for _ in range(8)
    ]
    context.backend.synchronize()
    del blocks


@contextmanager
def torch_fills_empty() -> Iterator[None]:
    """torch's deterministic mode, in which ``torch.empty`` is filled with NaN.

    A row that is not deterministic is not taken in it, so this does not stand alone.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def rule_deterministic(
    context: Context, *, operator: AnyOperator, oracle: Oracle, dtype: torch.dtype
) -> None:
    """The same arguments give the same bits, in every run."""
    repeats = 10 if context.level == "full" else 3
    for trial in each_trial(operator, oracle, dtype):
        first = trial.run(trial.place(context))
        for _ in range(repeats - 1):
            again = trial.run(trial.place(context))
            for name, got, want in zip(trial.names(), again, first, strict=True):
                check_equal_bits(f"{name}, run again", got, want)


def rule_doors(
    context: Context, *, operator: AnyOperator, oracle: Oracle, dtype: torch.dtype
) -> None:
    """``torch.ops`` and ``anychip.ops`` give the same bits."""
    for trial in each_trial(operator, oracle, dtype):
        short_cut = trial.run(trial.place(context))
        placed = trial.place(context)
        with torch.no_grad():
            returned = door(operator.spec)(*placed.args, **placed.attrs)
        for name, got, want in zip(
            trial.names(), trial.results(returned, placed), short_cut, strict=True
        ):
            check_equal_bits(f"{name} of torch.ops.{operator.spec.namespace}", got, want)


def rule_residuals(
    context: Context, *, operator: AnyOperator, oracle: Oracle, dtype: torch.dtype
) -> None:
    """What a forward row leaves for the backward one is what the specification says."""
    count = operator.signature.num_outputs
    for trial in each_trial(operator, oracle, dtype):
        placed = trial.place(context)
        ordered = [placed.attrs[name] for name in trial.signature.attr_names]
        with torch.no_grad():
            found = operator.signature.results(
                door(operator.spec, "_forward")(*placed.args, *ordered)
            )
        wanted, formed = trial.expected(oracle)[count:], trial.fake()[count:]
        for residual, got, want, form in zip(
            operator.spec.residuals, found[count:], wanted, formed, strict=True
        ):
            check(got.dtype == form.dtype, f"{residual.name}: {form.dtype}, got {got.dtype}")
            context.compare(residual.name, got, want, statistical=trial.call.statistical)


def rule_versions(
    context: Context, *, operator: AnyOperator, oracle: Oracle, dtype: torch.dtype
) -> None:
    """autograd hears of every write, and of no other."""
    for trial in each_trial(operator, oracle, dtype):
        placed = trial.place(context)
        before = [(index, name, p.tensor, p.tensor._version) for index, name, p in placed.placed]
        trial.run(placed)
        for index, name, tensor, version in before:
            if index in trial.written:
                check(tensor._version > version, f"{name} was written, its version is as before")
            else:
                check(tensor._version == version, f"the version of {name} changed; it is read only")


def rule_range(
    context: Context, *, operator: AnyOperator, oracle: Oracle, dtype: torch.dtype
) -> None:
    """On a host an index outside of its range is an error."""
    argument = {"cross_entropy": 1, "embedding": 0}[operator.spec.name]
    trial = next(t for t in each_trial(operator, oracle, dtype) if t.call.layout == "contiguous")
    limit = trial.arguments[0][1 - argument].shape[-1 if argument else 0]
    for wrong in (limit, limit + 1000, -1):
        placed = trial.place(context)
        placed.args[argument].view(-1)[-1] = wrong
        expect_error(
            (IndexError, ValueError),
            f"{trial.signature.positional[argument]} = {wrong}",
            operator,
            *placed.args,
            **placed.attrs,
        )


def _returns(operator: AnyOperator, _: Context) -> bool:
    return not operator.signature.written


def _writes(operator: AnyOperator, _: Context) -> bool:
    return bool(operator.signature.written)


def _is_bitwise(operator: AnyOperator, _: Context) -> bool:
    return operator.spec.determinism == "bitwise"


def _has_residuals(operator: AnyOperator, _: Context) -> bool:
    return bool(operator.spec.residuals)


def _takes_indices_on_host(operator: AnyOperator, context: Context) -> bool:
    # A device cannot look at an index without making the host wait for it.
    ours = operator.spec.name in ("cross_entropy", "embedding")
    return ours and context.backend.device_type == "cpu"


Rule = Callable[..., None]
RULES: tuple[tuple[str, Callable[[AnyOperator, Context], bool], Rule], ...] = (
    ("fresh", _returns, rule_fresh),
    ("written", _returns, rule_written),
    ("deterministic", _is_bitwise, rule_deterministic),
    ("doors", _is_bitwise, rule_doors),
    ("residuals", _has_residuals, rule_residuals),
    ("versions", _writes, rule_versions),
    ("range", _takes_indices_on_host, rule_range),
)
