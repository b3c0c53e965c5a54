"""A run as a person sees it: progress, every failure as it happens, a summary by chapter.

On a terminal there is a bar; elsewhere plain lines, one per chapter and per failure.
"""

from __future__ import annotations

import sys
from collections import Counter

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from anychip.conformance.formats import FP32
from anychip.conformance.planning import SuitePlan
from anychip.conformance.report import OUTCOMES, Outcome, Report, Result
from anychip.conformance.runner import identity
from anychip.dispatch.tally import torch_summary

STYLES = {
    "passed": "green",
    "unsupported": "dim",
    "expected failure": "yellow",
    "failed": "bold red",
    "unexpected pass": "bold red",
    "stale entry": "bold red",
}
WIDE = 400
"""Columns of output that is not a terminal: nothing is wrapped, so that it can be searched."""


def make_console() -> Console:
    """Standard output, not wrapped unless it is a terminal."""
    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, soft_wrap=True)


class Display:
    """Shows a run while it goes on. A context manager; ``show`` takes each result."""

    def __init__(self, plan: SuitePlan, console: Console) -> None:
        self.plan, self.console = plan, console
        self.count, self.failed, self.chapter = 0, 0, ""
        self.sizes = Counter(case.chapter for case in plan.cases)
        self.seconds = 0.0
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("starting", total=len(plan.cases))

    def __enter__(self) -> Display:
        known = identity(self.plan.backend)
        seed = f", seed {self.plan.seed}" if self.plan.seed else ""
        self.console.print(
            f"anychip conformance {known.suite}, level {self.plan.level}{seed}: backend "
            f"{known.backend} ({known.distribution} {known.version}) on {known.device}, torch "
            f"{known.torch}",
            markup=False,
        )
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def show(self, result: Result, explanation: str) -> None:
        """One more result; ``explanation`` is printed if it is not good, unless it is empty."""
        if result.chapter != self.chapter:
            self._finish_chapter()
            self.chapter, self.count, self.failed = result.chapter, 0, 0
            self.seconds = 0.0
        self.count += 1
        self.seconds += result.seconds  # of the cases: a second process may have asked some
        if not result.ok:
            self.failed += 1
            if explanation:
                self.console.print(Text(explanation, style="red"))
        note = f", {self.failed} failed" if self.failed else ""
        self.progress.update(self.task, advance=1, description=f"{result.chapter}{note}")
        if self.count == self.sizes[self.chapter]:
            self._finish_chapter()

    def _finish_chapter(self) -> None:
        if self.chapter and self.count and not self.console.is_terminal:
            self.console.print(
                f"{self.chapter}: {self.count} cases, {self.failed} failed, {self.seconds:.1f} s"
            )
        self.count = 0


def print_summary(report: Report, console: Console, *, shown: set[str]) -> None:
    """The end of a run.

    Args:
        shown: ids of failures that were printed already.
    """
    said: set[str] = set()  # the passes of one entry have one reason
    for result in report.failures:
        if result.case not in shown and result.reason not in said:
            console.print(Text(report.explain(result), style="red"))
        if result.outcome == "unexpected pass":
            said.add(result.reason)
    console.print()
    console.print(_table(report))
    _print_reasons(report, console)
    _print_provenance(report, console)
    if report.references:
        console.print(f"compared with their own references only: {', '.join(report.references)}")
    _print_next(report, console)
    verdict = "passed" if report.passed else "FAILED"
    partial = " (a selection of cases)" if report.select else ""
    console.print(
        Text(f"backend {report.identity.backend}: {verdict}{partial}",
             style="green" if report.passed else "bold red")
    )  # fmt: skip


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("chapter")
    used: list[Outcome] = [
        outcome for outcome in OUTCOMES if report.counts()[outcome] or outcome == "passed"
    ]
    for heading in (*used, "worst fp32 error"):
        table.add_column(heading, justify="right")
    chapters = [c for c in report.chapters if sum(report.counts(c).values())]
    for chapter in (*chapters, None):
        counts = report.counts(chapter)
        cells = [Text(str(counts[o]), style=STYLES[o] if counts[o] else "dim") for o in used]
        table.add_row(chapter or "all", *cells, _worst(report, chapter))
    return table


def _worst(report: Report, chapter: str | None) -> str:
    """Largest error of the chapter in units of its bound, failures left out.

    A 16-bit result is rounded once at its end, and half an ULP of it is nearly the whole bound.
    """
    errors = [
        m.max
        for r in report.results
        if r.ok and chapter in (None, r.chapter)
        for m in r.measurements
        if m.format == FP32.name
    ]
    return f"{max(errors):.3f} of the bound" if errors else "-"


def _print_reasons(report: Report, console: Console) -> None:
    reasons = Counter(
        (r.outcome, r.reason) for r in report.results if r.ok and r.outcome != "passed"
    )
    for (outcome, reason), count in sorted(reasons.items()):
        console.print(f"{outcome}: {count} case{'s' if count > 1 else ''}: {reason}", markup=False)


def _print_next(report: Report, console: Console) -> None:
    """What a training step would gain most from."""
    for number, item in enumerate(report.next_to_fix, 1):
        plural = "s" if item.calls > 1 else ""
        calls = f"{item.calls} call{plural} in a step of {item.model}, " if item.calls else ""
        console.print(
            f"next to fix, {number}: {item.subject} ({calls}{len(item.cases)} failed), first "
            f"{item.cases[0]}",
            markup=False,
        )


def _print_provenance(report: Report, console: Console) -> None:
    if report.provenance is None:
        return
    rows = report.provenance["operators"]
    for line in torch_summary(report.provenance.get("torch", ())):
        console.print(line, markup=False)
    mine = {row["operator"] for row in rows if row["kind"] != "reference" and row["calls"]}
    only = sorted({row["operator"] for row in rows} - mine)
    if only:
        console.print(f"served by the reference alone: {', '.join(only)}", markup=False)
    for row in rows:
        if not row["calls"]:
            why = [f"refused {calls}: {reason}" for reason, calls in report.refusals(row)]
            console.print(
                f"served no call: {row['operator']} {row['direction']} of {row['provider']}, "
                f"{row['implementation']}: {'; '.join(why) or 'it was not asked'}",
                style=STYLES["expected failure"],
                markup=False,
            )
