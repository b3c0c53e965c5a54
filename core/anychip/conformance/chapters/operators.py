"""Does every operator compute what its specification says, and only that?

Values: a design, and every fixed call, against the oracle's number and bound; outputs are fresh,
the same bits come twice and by both doors, residuals are canonical. Rules: outputs are fully
written, in-place operators write what they declare, autograd hears of it.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

import anychip.ops  # noqa: F401 - defines our operators
from anychip.conformance import calling_rules, designs, first_calls, index_rules
from anychip.conformance.arithmetic import Rounded
from anychip.conformance.calls import Call, PlacedCall
from anychip.conformance.case import Case, Context, check, check_same_bits
from anychip.conformance.formats import FORMATS
from anychip.conformance.many_times import can_repeat, large_calls, small_trial
from anychip.conformance.oracles import oracle_of
from anychip.conformance.trial import (
    Rule,
    Subject,
    Trial,
    each_trial,
    may_vary,
    rule_cases,
    samples_rule,
)
from anychip.dispatch.operator import registered


def cases(context: Context) -> Iterator[Case]:
    """Per operator its first calls, a design, and by dtype a case per call and per rule."""
    yield from first_calls.cases("operators", context, Trial, results_of, judge)
    yield from designs.cases("operators", context, check_row)
    for name, operator in registered().items():
        oracle = oracle_of(operator.spec)
        for dtype, represented in context.dtypes_of(operator.spec).items():
            where = f"operators/{name}/{FORMATS[dtype].name}"
            of = Subject(operator, oracle, dtype)
            for call in oracle.calls:
                run = partial(check_values, of=of, call=call)
                full = oracle.is_full(call, dtype)
                yield Case(id=f"{where}/{call.label}", run=run, full=full)
            rules = (*RULES, *calling_rules.RULES, *index_rules.RULES)
            yield from rule_cases(where, of, context, rules, represented=represented)


def results_of(context: Context, trial: Trial) -> Sequence[Tensor]:
    """Results of a call on arguments of its own, of which it writes no more than it may."""
    placed = trial.place(context)
    results = trial.run(placed)
    trial.check_untouched(placed)
    return results


def judge(context: Context, of: Subject, trial: Trial, results: Sequence[Tensor]) -> None:
    """Compares results with the oracle's."""
    trial.compare(context, results, trial.expected(of.oracle))


def check_row(context: Context, of: Subject, row: designs.DesignedCall) -> None:
    """The results of one call of a design, and what it leaves for the backward row.

    It is made, then mostly with other numbers, and both again, through ``torch.ops``: what the
    first one gave stays, and what the last ones give is not that of the call before.
    """
    trial = of.trial(row.call, context)
    wanted = trial.expected(of.oracle)
    placed = trial.place(context)
    other = designs.with_other_numbers(trial, context, row)
    beside = designs.OtherCall()
    if other is not None:
        beside = designs.between(other.run, placed, other, context, row)
    run_other = beside.run
    last = trial.place(context) if trial.written else placed
    with designs.stream_of(context, row.caller):
        # Before too: what it leaves behind would show in what is compared.
        before = [r.clone() for r in run_other()] if row.between == "in the same memory" else []
        results = trial.run(placed)
        kept = [result.clone() for result in results]
        others = [result.clone() for result in run_other()]
        left = [result.clone() for result in results]
        again = row.again(partial(trial.run_by_torch, last))
        others_again = others if trial.written else [*before, *run_other()]
    check_results(context, trial, placed, results, wanted)
    beside.check()
    if trial.written:
        trial.check_untouched(last, ", called again")
    count = len(others)
    repeated = (again, others, others_again[:count], others_again[count:])
    for found in () if trial.written else filter(None, repeated):
        check_form(context, trial, found)
    check_same_bits(trial.names(), left, kept, ", after another call")
    calling_rules.same_answer(context, of, trial, again, kept, ", called again")
    for found in filter(None, repeated[2:] if of.is_bitwise else ()):
        check_same_bits(trial.names(), found, others, ", of another call, made again")
    if trial.operator.spec.residuals and row.call.gradient:
        # Not of the calls above: what leaves residuals may be another row, with bits of its own.
        check_residuals(context, trial, trial.run_with_residuals(trial.place(context)), wanted)


def check_values(context: Context, of: Subject, *, call: Call) -> None:
    """The results of one call.

    Of a large one the same bits twice: where a sum is split, its parts may come in any order.
    """
    trial = of.trial(call, context)
    wanted = trial.expected(of.oracle)
    placed = trial.place(context)
    results = trial.run(placed)
    check_results(context, trial, placed, results, wanted)
    if may_vary(trial):
        again = trial.run(trial.place(context))
        check_same_bits(trial.names(), again, results, ", run again")


def check_results(
    context: Context, trial: Trial, placed: PlacedCall, results: Sequence[Tensor],
    wanted: Sequence[Rounded],
) -> None:  # fmt: skip
    """Of one call: form, values, and that nothing else was written.

    What is wanted was made before the call: a result that comes late is not waited for by chance.
    """
    if not trial.written:
        check_form(context, trial, results)
        placed.check_apart(trial.names(), results)
    trial.compare(context, results, wanted, statistical=trial.call.statistical)
    trial.check_untouched(placed)


def check_form(context: Context, trial: Trial, results: Sequence[Tensor]) -> None:
    """Shape, dtype, device and contiguity of every output."""
    check(
        len(results) == trial.signature.num_outputs,
        f"{trial.signature.num_outputs} outputs expected, got {len(results)}",
    )
    device = torch.empty(0, device=context.device).device
    for name, got, want in zip(trial.names(), results, trial.form, strict=False):
        check(got.dtype == want.dtype, f"{name}: {want.dtype} expected, got {got.dtype}")
        check(
            got.shape == want.shape,
            f"{name}: shape {tuple(want.shape)} expected, got {tuple(got.shape)}",
        )
        check(got.device == device, f"{name}: on {device} expected, got {got.device}")
        check(got.is_contiguous(), f"{name} must be contiguous, its strides are {got.stride()}")


# Rules


def check_residuals(
    context: Context, trial: Trial, found: Sequence[Tensor], wanted: Sequence[Rounded]
) -> None:
    """found, wanted: outputs, then residuals."""
    count = trial.signature.num_outputs
    trial.compare(context, found, wanted[:count], " beside residuals")
    for residual, got, want, form in zip(
        trial.operator.spec.residuals, found[count:], wanted[count:], trial.form[count:],
        strict=True,
    ):  # fmt: skip
        check(got.dtype == form.dtype, f"{residual.name}: {form.dtype}, got {got.dtype}")
        check(got.is_contiguous(), f"{residual.name} must be contiguous")
        settled = trial.settled(got, want)
        context.compare(residual.name, settled, want, statistical=trial.call.statistical)


def rule_versions(context: Context, of: Subject) -> None:
    """autograd hears of every write, and of no other."""
    for trial in each_trial(context, of):
        placed = trial.place(context)
        before = [(index, name, p.tensor, p.tensor._version) for index, name, p in placed.placed]
        trial.run(placed)
        for index, name, tensor, version in before:
            if index in trial.written:
                check(tensor._version > version, f"{name} was written, its version is as before")
            else:
                check(tensor._version == version, f"the version of {name} changed; it is read only")


def rule_many_times(context: Context, of: Subject) -> None:
    """The results of a large call are those of the small one that it repeats."""
    trial = small_trial(of, context)
    small, wanted = trial.run(trial.place(context)), trial.expected(of.oracle)
    for large in large_calls(trial, context):
        asked = of.trial(large.call, context)
        results = asked.run(asked.place(context))
        if of.returns:
            check_form(context, asked, results)
        places = zip(trial.names(), large.outputs, strict=False)
        for (name, along), got, one, want in zip(places, results, small, wanted, strict=False):
            large.compare(context, name, got, one, want, along)


RULES = (
    Rule("versions", rule_versions, lambda of, _: not of.returns, of_no_type=True),
    Rule("many-times", rule_many_times, can_repeat, of_no_type=True),
    samples_rule(check_values),
)
