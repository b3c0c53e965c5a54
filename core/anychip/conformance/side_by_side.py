"""Runs cases in this process, while other processes are asked what they can be asked.

Those are the questions to several ranks, which are processes anyway, and, with two jobs, all that
follow the first operator, the last of which a child (:mod:`.isolation`) takes whenever it is free.
They begin with that operator: the chapters before look at what the whole device does, and would see
the other processes' part of it.
"""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread

from anychip import registry
from anychip.conformance import isolation
from anychip.conformance.asking import run_case
from anychip.conformance.case import Case
from anychip.conformance.planning import SuitePlan
from anychip.conformance.report import Result

BEGIN = "operators"
"""The chapter with whose first case the others begin."""
MANY = 200
"""So many cases are worth the seconds that a child takes to start."""

Answers = dict[str, Future[Result]]


def run_side_by_side(
    plan: SuitePlan, cases: Sequence[Case], jobs: int, limit_s: float, served: isolation.Served
) -> Iterator[Result]:
    """Results in the order of the cases.

    Args:
        jobs: processes that ask; 2 is the most that there is work for.
        limit_s: seconds that a case may take in a child.
        served: is told what served the operators of the cases that a child asked.
    """

    def asked(some: Sequence[Case]) -> Iterator[Result]:
        return (run_case(case, plan.backend, plan.level, plan.seed) for case in some)

    for begin in dict.fromkeys(case.start for case in cases if case.start is not None):
        begin()
    elsewhere = [case for case in cases if case.elsewhere]
    free = _free(plan, cases, jobs)
    answers: Answers | None = None
    for case in cases:
        if case.chapter == BEGIN and answers is None:
            answers = _answers(elsewhere, asked(elsewhere))
            isolated = isolation.run_isolated(plan, _taken(free), limit_s, served)
            answers |= _answers([*free.values()], isolated)
        if answers is not None and case.id in answers and free.pop(case.id, None) is None:
            yield answers[case.id].result()
        else:
            yield from asked([case])


def _free(plan: SuitePlan, cases: Sequence[Case], jobs: int) -> dict[str, Case]:
    """What a child may take: nothing if there is little of it, or no plugin to find."""
    behind = itertools.dropwhile(lambda case: case.chapter != BEGIN, cases)
    found = {case.id: case for case in behind if not case.elsewhere}
    is_installed = registry.provenance_of(plan.backend)[1] != "not installed"
    return found if jobs > 1 and len(found) >= MANY and is_installed else {}


def _taken(free: dict[str, Case]) -> Iterator[Case]:
    """The last of what nobody has taken."""
    with suppress(KeyError):  # none is left
        while True:
            yield free.popitem()[1]


def _answers(cases: Sequence[Case], results: Iterator[Result]) -> Answers:
    """What a thread of their own finds out about cases."""
    answers: Answers = {case.id: Future() for case in cases}

    def ask() -> None:
        try:
            for result in results:
                answers[result.case].set_result(result)
        except Exception as error:
            for answer in answers.values():
                if not answer.done():
                    answer.set_exception(error)

    if cases:
        # It waits for other processes, which end when nobody reads what they say.
        Thread(target=ask, daemon=True).start()
    return answers
