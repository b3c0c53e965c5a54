"""Does a backend do what the contract says? The suite, installed with the package.

Three fronts on one engine (:mod:`.runner`): ``anychip conformance --backend X``, pytest with
``-p anychip.conformance.plugin --pyargs anychip.conformance --backend X``, and::

    from anychip import conformance
    assert conformance.run("acme", level="quick").passed

``chapters`` ask, ``oracles`` know the answers, ``arithmetic`` and ``bounds`` say how exact an
answer has to be, ``expectations`` holds what a backend says about itself, ``report`` what was
found; ``statement`` says what a report proves. docs/conformance.md is the guide.
"""

from collections.abc import Iterable
from pathlib import Path

from anychip.conformance.asking import activate
from anychip.conformance.case import LEVELS, Case, CheckFailedError, Context, Level
from anychip.conformance.chapters import CHAPTERS
from anychip.conformance.planning import SuitePlan, plan
from anychip.conformance.report import Report, Result
from anychip.conformance.runner import OnResult, run_plan
from anychip.conformance.statement import Statement, verify
from anychip.contract import Backend


def run(
    backend: str | Backend | None = None,
    *,
    level: Level = "quick",
    chapters: Iterable[str] = (),
    select: str = "",
    seed: int = 0,
    expectations: str | Path | None = None,
    isolate: bool = False,
    limit_s: float = 300.0,
    on_result: OnResult | None = None,
) -> Report:
    """Runs the suite on a backend, which serves its device type in this process from then on.

    Args:
        backend: a name, as for ``anychip.use``; or a backend itself.
        level: ``quick`` (one to three minutes of two cores of a host) or ``full``.
        chapters: names; none: all.
        select: an expression of words of case ids, as for pytest's ``-k``.
        seed: of all random inputs.
        expectations: a list to use in place of the one in the backend's package.
        isolate: cases run in child processes; a crash or a hang is then one failed case.
        limit_s: seconds that a case may take in a child process.
        on_result: called with each result as it comes.

    Returns:
        The report; ``report.passed`` is the answer.

    Raises:
        BackendUnavailableError: the backend cannot run here; that is no verdict about it.
        UnknownBackendError, ValueError: wrong use, with what to write instead.
    """
    chosen = plan(
        activate(backend),
        level=level,
        chapters=chapters,
        select=select,
        seed=seed,
        expectations_file=None if expectations is None else Path(expectations),
    )
    return run_plan(chosen, isolate=isolate, limit_s=limit_s, on_result=on_result)


__all__ = [
    "CHAPTERS",
    "LEVELS",
    "Case",
    "CheckFailedError",
    "Context",
    "Level",
    "Report",
    "Result",
    "Statement",
    "SuitePlan",
    "activate",
    "plan",
    "run",
    "run_plan",
    "verify",
]  # fmt: skip
