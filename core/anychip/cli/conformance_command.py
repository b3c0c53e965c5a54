"""``anychip conformance``: does a backend do what the contract says? And ``... verify FILE``."""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from anychip.cli.exit_codes import DONE, FAILED
from anychip.cli.files import ResultFile

if TYPE_CHECKING:
    from anychip.conformance import Report, Result, SuitePlan

_FILE = ResultFile()


@click.group("conformance", invoke_without_command=True)
@click.option("--backend", metavar="NAME", help="The backend under test; none: as for a training.")
@click.option("--chapter", "chapters", multiple=True, metavar="NAME", help="Only this; repeatable.")
@click.option("-k", "select", default="", metavar="EXPR", help="Cases by words of their ids.")
@click.option("--level", type=click.Choice(["quick", "full"]), default="quick", show_default=True)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True,
    help="Of all random inputs.",
)  # fmt: skip
@click.option("--isolate", is_flag=True, help="In child processes: a crash is one failed case.")
@click.option(
    "--jobs", type=click.IntRange(1, 2), help="With 2, a second process asks a half; "
    "2 where there are two cores. Not with --isolate.",
)  # fmt: skip
@click.option(
    "--limit", "limit_s", type=click.FloatRange(min=0, min_open=True), default=300.0,
    show_default=True, help="Seconds for a case, with --isolate.",
)  # fmt: skip
@click.option(
    "--expectations", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A list in place of the one in the backend's package.",
)  # fmt: skip
@click.option(
    "--write-expectations", "first_list", type=_FILE,
    help="Write a first list: every case that fails today.",
)  # fmt: skip
@click.option("--list", "list_only", is_flag=True, help="Print the ids of the cases; run nothing.")
@click.option("--json", "json_file", type=_FILE, help="Write the report, to be verified.")
@click.option("--html", "html_file", type=_FILE, help="Write the report as a page for people.")
@click.option("--junit", "junit_file", type=_FILE, help="Write the report as JUnit XML.")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int | None:
    """Check that a backend computes what the contract says, as exactly as it says.

    Every result is compared with an independent float64 oracle and a derived error bound. Exit code
    0: passed; 1: a case failed; 2: wrong use; 3: the backend cannot run here.

    \b
    anychip conformance --backend cpu
    anychip conformance --backend acme --chapter operators -k "rms_norm and bf16"
    anychip conformance --backend acme --level full --json report.json --html report.html
    anychip conformance verify report.json
    """
    if ctx.invoked_subcommand is None:
        return _check(**options)
    given = [
        param.opts[-1]
        for param in ctx.command.params
        if param.name and ctx.get_parameter_source(param.name) is _COMMANDLINE
    ]
    if given:
        raise click.UsageError(
            f"{ctx.invoked_subcommand} reads a report and runs nothing: {', '.join(given)} has no "
            "effect there"
        )
    return None


_COMMANDLINE = click.core.ParameterSource.COMMANDLINE


@command.command("verify")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def verify_command(file: Path) -> int:
    """Say whether a report, FILE, proves that its backend passed a level of the suite.

    The must-pass list is made again from what the backend declares, and compared with the results;
    the chip need not be here, nor the file with the details, which is compared with its hash if it
    is. Exit code 0: the statement holds; 1: it does not, with every reason;
    2: FILE is not a report.
    """
    from anychip.conformance import archive, statement

    document = archive.read_document(file)
    found = statement.verify(document)
    if changed := archive.unlike_details(document, file.parent):
        found = found._replace(objections=(*found.objections, changed))
    click.echo(found.text)
    for objection in found.objections:
        click.echo(f"- {objection}")
    click.echo("the statement holds" if found.holds else "the statement DOES NOT HOLD")
    return DONE if found.holds else FAILED


def _check(
    *, backend: str | None, isolate: bool, jobs: int | None, limit_s: float,
    expectations: Path | None, list_only: bool, json_file: Path | None, html_file: Path | None,
    junit_file: Path | None, first_list: Path | None, **asked: Any,
) -> int:  # fmt: skip
    """Runs the suite, and writes what was asked for."""
    if first_list is not None and first_list.exists():
        raise click.UsageError(
            f"--write-expectations {first_list}: it exists, and has reasons in it"
        )
    # Before torch is imported. Threads that spin while they wait take the cores from the processes
    # next to them: a loaded machine was three times slower by it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with _uncollected():
        from anychip import conformance
        from anychip.conformance import expectations as listing
        from anychip.conformance.asking import settle

        active = conformance.activate(backend)
        plan = conformance.plan(active, expectations_file=expectations, **asked)
        settle()
    if list_only:
        click.echo("\n".join(case.id for case in plan.cases))
        return DONE
    report = _run(plan, isolate=isolate, jobs=jobs or min(2, os.cpu_count() or 1), limit_s=limit_s)
    if json_file is not None:
        from anychip.conformance.archive import write_report

        write_report(report, json_file)
    if html_file is not None:
        from anychip.conformance.page import to_html

        html_file.write_text(to_html(report), encoding="utf-8")
    if junit_file is not None:
        from anychip.conformance.junit import to_junit

        junit_file.write_text(to_junit(report), encoding="utf-8")
    if first_list is not None:
        listed = listing.first_list(report.results, plan.expected, datetime.date.today())
        first_list.write_text(listed, encoding="utf-8")
    return DONE if report.passed else FAILED


@contextmanager
def _uncollected() -> Iterator[None]:
    """For what makes a million objects that stay: none is garbage, now or later."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _run(plan: SuitePlan, *, isolate: bool, jobs: int, limit_s: float) -> Report:
    """Runs a plan under the eyes of a person."""
    from anychip.conformance import run_plan, terminal
    from anychip.conformance.runner import empty_report

    console, frame = terminal.make_console(), empty_report(plan, limit_s)
    shown: set[str] = set()
    with terminal.Display(plan, console) as display:

        def show(result: Result) -> None:
            streamed = (
                result.outcome != "unexpected pass"
            )  # what to do about it is known at the end
            if streamed:
                shown.add(result.case)
            display.show(result, frame.explain(result) if streamed else "")

        report = run_plan(plan, isolate=isolate, jobs=jobs, limit_s=limit_s, on_result=show)
    terminal.print_summary(report, console, shown=shown)
    return report
