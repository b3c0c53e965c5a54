"""Are the first twenty calls of an operator alike, which a chapter makes before any other?

What is compiled, tuned or recorded after so many calls gives the next ones to another kernel, and
a ring of workspaces comes round: a second call may be wrong where the first and the third are not.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from anychip.conformance.calls import Arguments, tensors_of
from anychip.conformance.case import Case, Context, check_same_bits
from anychip.conformance.formats import FORMATS
from anychip.conformance.many_times import can_repeat, large_calls
from anychip.conformance.oracles import oracle_of
from anychip.conformance.trial import Subject, Trial
from anychip.dispatch.operator import registered

TIMES = 20
ELEMENTS = 1 << 13
"""So many the largest argument has, of a call that can repeat a small one."""
LISTED = 4
"""So many times as long are lists."""
T = TypeVar("T", bound=Trial)


def cases(
    chapter: str, context: Context, made: type[T], run: Callable[[Context, T], Sequence[Tensor]],
    judge: Callable[[Context, Subject, T, Sequence[Tensor]], None],
) -> Iterator[Case]:  # fmt: skip
    """A case per operator of ours, in its first type.

    Args:
        made: what a call is made with.
        run: makes it, and gives what there is to compare.
        judge: raises unless that is what the operator has to compute.
    """
    for name, operator in registered().items():
        oracle, dtypes = oracle_of(operator.spec), context.dtypes_of(operator.spec)
        if dtypes and oracle.plain and (made is Trial or operator.spec.differentiable):
            of = Subject(operator, oracle, next(iter(dtypes)))
            ask = partial(_ask, of=of, made=made, run=run, judge=judge)
            yield Case(id=f"{chapter}/{name}/{FORMATS[of.dtype].name}/rule:first-calls", run=ask)


def _ask(context: Context, of: Subject, made: Any, run: Any, judge: Any) -> None:
    """Two calls with other numbers take turns: neither gives what the other one has to."""
    trials = [_trial(context, of, made, context.seed + turn) for turn in range(2)]
    found, copies = list[Sequence[Tensor]](), list[Sequence[Tensor]]()
    for number in range(TIMES):
        found.append(run(context, trials[number % 2]))
        copies.append([result.clone() for result in found[-1]])
    for number, results in enumerate(copies[:2] if of.is_bitwise else copies):
        judge(context, of, trials[number % 2], results)
    names = [f"result {place}" for place in range(len(found[0]))]
    for number, results in enumerate((*copies, *found)):
        note = f" of call {number % TIMES + 1}, {'at once' if number < TIMES else 'after all'}"
        check_same_bits(names, results, copies[number % (2 if of.is_bitwise else TIMES)], note)


def _trial(context: Context, of: Subject, made: Any, seed: int) -> Any:
    """A plain call that fills no vectors, repeated where it can be, or with longer lists."""

    def size(trial: Trial) -> tuple[bool, int]:
        given = [some for arg in trial.arguments[0] if (some := [*tensors_of([arg])])]
        sizes = [(max(map(Tensor.numel, some)), any(sum(t.shape[-1:]) % 2 for t in some))
                 for some in given]  # fmt: skip
        numel, is_odd = max(sizes, default=(0, False))
        return is_odd, numel

    def longer(_: object) -> Arguments:
        args, attrs = largest.arguments
        return tuple([t.clone() for t in arg * LISTED] if isinstance(arg, list) else arg
                     for arg in args), attrs  # fmt: skip

    plain = (made(of.operator, call, of.dtype, seed) for call in of.oracle.plain)
    largest = max(plain, key=size)
    if not of.returns or not can_repeat(of, context):
        return made(of.operator, replace(largest.call, make=longer), of.dtype, seed)
    large = (one.call for one in large_calls(largest, context, ELEMENTS))
    return made(of.operator, next(large, largest.call), of.dtype, seed)
