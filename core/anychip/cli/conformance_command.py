"""``anychip conformance``: does a backend do what the contract says?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from anychip.cli.exit_codes import DONE, FAILED

if TYPE_CHECKING:
    from anychip.conformance import Plan, Report, Result


@click.command("conformance")
@click.option("--backend", metavar="NAME", help="The backend under test; none: as for a training.")
@click.option("--chapter", "chapters", multiple=True, metavar="NAME", help="Only this; repeatable.")
@click.option("-k", "select", default="", metavar="EXPR", help="Cases by words of their ids.")
@click.option("--level", type=click.Choice(["quick", "full"]), default="quick", show_default=True)
@click.option("--isolate", is_flag=True, help="In child processes: a crash is one failed case.")
@click.option(
    "--limit", "limit_s", type=click.FloatRange(min=0, min_open=True), default=300.0,
    show_default=True, help="Seconds for a case, with --isolate.",
)  # fmt: skip
@click.option(
    "--expectations", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A list in place of the one in the backend's package.",
)  # fmt: skip
@click.option("--list", "list_only", is_flag=True, help="Print the ids of the cases; run nothing.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write the report; docs/conformance.md has the schema.",
)  # fmt: skip
@click.option("--html", "html_file", type=click.Path(path_type=Path), help="Not in this version.")
def command(
    backend: str | None,
    chapters: tuple[str, ...],
    select: str,
    level: str,
    isolate: bool,
    limit_s: float,
    expectations: Path | None,
    list_only: bool,
    json_file: Path | None,
    html_file: Path | None,
) -> int:
    """Check that a backend computes what the contract says, as exactly as it says.

    Every result is compared with an independent float64 oracle and a derived error bound. Exit code
    0: passed; 1: a case failed; 2: wrong use; 3: the backend cannot run here.

    \b
    anychip conformance --backend cpu
    anychip conformance --backend acme --chapter operators -k "rms_norm and bf16"
    """
    if html_file is not None:
        raise click.UsageError(
            "--html comes with a later version; --json FILE has everything that the page would show"
        )
    if json_file is not None and not json_file.parent.is_dir():
        raise click.UsageError(f"--json {json_file}: there is no folder {json_file.parent}")

    from anychip import conformance

    plan = conformance.plan(
        conformance.activate(backend),
        level="full" if level == "full" else "quick",
        chapters=chapters,
        select=select,
        expectations_file=expectations,
    )
    if list_only:
        click.echo("\n".join(case.id for case in plan.cases))
        return DONE
    report = _run(plan, isolate=isolate, limit_s=limit_s)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=1), encoding="utf-8")
    return DONE if report.passed else FAILED


def _run(plan: Plan, *, isolate: bool, limit_s: float) -> Report:
    """Runs a plan under the eyes of a person."""
    from anychip.conformance import run_plan, terminal
    from anychip.conformance.runner import empty_report

    console, frame = terminal.make_console(), empty_report(plan)
    shown: set[str] = set()
    with terminal.Display(plan, console) as display:

        def show(result: Result) -> None:
            shown.add(result.case)
            display.show(result, frame.explain(result))

        report = run_plan(plan, isolate=isolate, limit_s=limit_s, on_result=show)
    terminal.print_summary(report, console, shown=shown)
    return report
