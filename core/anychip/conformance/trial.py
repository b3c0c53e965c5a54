"""One call of one operator in one dtype, as the cases of two chapters need it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anychip.conformance.arithmetic import Rounded, joined
from anychip.conformance.calls import (
    Arguments,
    Call,
    PlacedCall,
    describe_call,
    place_call,
    tensors_of,
    with_equal_numbers,
)
from anychip.conformance.case import Case, CheckFailedError, Context, check
from anychip.conformance.oracles import Oracle
from anychip.conformance.oracles.oracle import numbers
from anychip.conformance.oracles.reference import samples_of
from anychip.dispatch.library import door
from anychip.dispatch.operator import Operator

AnyOperator = Operator[..., Any]
LARGE = 4096
"""Elements from which on a call is made twice, to compare the bits."""


class Subject(NamedTuple):
    """What a case asks about: an operator, what it has to compute, and in which dtype."""

    operator: AnyOperator
    oracle: Oracle
    dtype: torch.dtype

    @property
    def returns(self) -> bool:
        """Its results are new tensors."""
        return not self.operator.signature.written

    @property
    def is_bitwise(self) -> bool:
        """The same arguments have to give the same bits."""
        return self.operator.spec.determinism == "bitwise"

    def trial(self, call: Call, context: Context) -> Trial:
        """One call of it."""
        return Trial(self.operator, call, self.dtype, context.seed)


class Rule(NamedTuple):
    """A question that does not depend on the values, only on what is called.

    Attributes:
        check: ``check(context, of=...)``.
        applies: to which subjects of a backend.
        of_no_type: about who calls, and how often: at level quick asked in one type, float32 as a
            rule.
        of_each_type: asked too where another type of the same width stands for it.
    """

    name: str
    check: Callable[..., None]
    applies: Callable[[Subject, Context], object] = lambda of, context: True
    of_no_type: bool = False
    of_each_type: bool = False


def samples_rule(check: Callable[..., None]) -> Rule:
    """Asks for every sample of a specification. Without an oracle they are asked for anyway."""

    def check_samples(context: Context, of: Subject) -> None:
        for call in samples_of(of.operator.spec):
            check(context, of, call=call)

    return Rule("samples", check_samples, lambda of, _: of.oracle.independent, of_no_type=True)


def rule_cases(
    where: str, of: Subject, context: Context, rules: Sequence[Rule], *, represented: bool
) -> Iterator[Case]:
    """A case per rule that applies. represented: another type of the same width stands for this."""
    is_first = of.dtype == next(iter(context.dtypes_of(of.operator.spec)))
    for rule in rules:
        if rule.applies(of, context):
            full = (represented and not rule.of_each_type) or (rule.of_no_type and not is_first)
            yield Case(id=f"{where}/rule:{rule.name}", run=partial(rule.check, of=of), full=full)


class Trial:
    """The arguments of a call on the host and, when it is placed, on the device; its results."""

    def __init__(
        self, operator: AnyOperator, call: Call, dtype: torch.dtype, seed: int = 0
    ) -> None:
        self.operator, self.call, self.dtype = operator, call, dtype
        self.signature = operator.signature
        args, attrs = self.signature.bind(*call.arguments(operator.spec.name, dtype, seed))
        args = with_equal_numbers(self.signature.positional, (args, attrs), call.layout)
        self.arguments: Arguments = args, attrs
        self.written = self.signature.written

    def place(self, context: Context) -> PlacedCall:
        """The arguments on the device, anew; and the call's description for a failure."""
        name, (args, attrs) = self.operator.spec.name, self.arguments
        context.call = partial(describe_call, name, self.arguments, self.call.layout)
        placed = place_call(
            self.signature.positional, (args, attrs), context.device, self.call.layout
        )
        context.served_by = partial(self.served_by, placed)
        return placed

    def served_by(self, placed: PlacedCall) -> str | None:
        """What serves a placed call, for the report."""
        lines = self.operator.explain(*placed.args, **placed.attrs).lines
        return ", ".join(f"{at.provider}: {at.implementation}" for at in lines if at.taken) or None

    def run(self, placed: PlacedCall) -> list[Tensor]:
        """Outputs; for an in-place operator every written tensor."""
        return self.results(self.operator(*placed.args, **placed.attrs), placed)

    def run_by_torch(self, placed: PlacedCall) -> list[Tensor]:
        """What ``run`` gives, by the operator's other door: ``torch.ops``."""
        with torch.no_grad():
            return self.results(door(self.operator.spec)(*placed.args, **placed.attrs), placed)

    def run_with_residuals(self, placed: PlacedCall) -> list[Tensor]:
        """What ``run`` gives, and what the forward row leaves for the backward one."""
        if not self.operator.spec.residuals:
            return self.run(placed)
        ordered = [placed.attrs[name] for name in self.signature.attr_names]
        with torch.no_grad():
            returned = door(self.operator.spec, "_forward")(*placed.args, *ordered)
        return self.results(returned, placed)

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
            return oracle.forward(*(numbers(arg, self.call) for arg in args), **attrs)

    def settled(self, got: Tensor, want: Rounded) -> Tensor:
        """A result on the host, NaN where the call leaves open what it is."""
        host = got.detach().cpu()
        if not self.call.leaves_open or not host.is_floating_point():
            return host
        return host.masked_fill(torch.as_tensor(np.isnan(want.value)), torch.nan)

    def compare(
        self, context: Context, results: Sequence[Tensor], wanted: Sequence[Rounded],
        note: str = "", *, statistical: bool = False,
    ) -> None:  # fmt: skip
        """Compares results with the oracle's, as far as there are results; of a list all at once.

        Raises:
            CheckFailedError: of the first result alone that is outside the bound.
        """
        lists = defaultdict[Any, list[Any]](list)
        for name, result, want in zip(self.names(), results, wanted, strict=False):
            got = self.settled(result, want)
            lists[name.partition("[")[0], got.dtype].append((f"{name}{note}", got, want))
        for (name, _), found in lists.items():
            if len(found) > 1 and all(tuple(got.shape) == want.shape for _, got, want in found):
                got = torch.cat([got.reshape(-1) for _, got, _ in found])
                found += [(f"{name}[:]{note}", got, joined([want for _, _, want in found]))]
                with suppress(CheckFailedError):  # of which one, the others tell
                    context.compare(*found[-1], statistical=statistical)
                    continue
            for one in found:
                context.compare(*one, statistical=statistical)

    def check_untouched(self, placed: PlacedCall, note: str = "") -> None:
        """Nothing was written but what the schema declares."""
        problem = placed.touched(self.written)
        check(problem is None, f"an argument that may not be written: {problem}{note}")

    @cached_property
    def form(self) -> list[Tensor]:
        """Shapes and dtypes that outputs and residuals must have, by the specification."""
        args = [_meta(arg) for arg in self.arguments[0]]
        return list(self.signature.results(self.operator.spec.fake(*args, **self.arguments[1])))


def _meta(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return arg.to("meta")
    return [t.to("meta") for t in arg] if isinstance(arg, (list, tuple)) else arg


def may_vary(trial: Trial) -> bool:
    """Whether a call is large enough for sums that are split, and added in the order they end in,
    and its operator declares the same bits all the same.
    """
    largest = max((t.numel() for t in tensors_of(trial.arguments[0])), default=0)
    return trial.operator.spec.determinism == "bitwise" and largest >= LARGE


def each_trial(context: Context, of: Subject) -> Iterator[Trial]:
    for call in of.oracle.plain:
        yield of.trial(call, context)
