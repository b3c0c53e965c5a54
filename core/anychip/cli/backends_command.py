"""``anychip backends``: the table of what is installed, what can run, and what would be chosen."""

import json
import sys
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from anychip import registry
from anychip.cli.exit_codes import ending
from anychip.contract import AnychipError, Decision

SCHEMA = 1
STYLES = {"ready": "green", "unavailable": "yellow", "incompatible": "red", "broken": "red"}
WIDE = 400
"""Columns of output that is not a terminal: nothing is wrapped, so that it can be searched."""


@click.command("backends")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; docs/cli.md has the schema.")
@click.option("--no-cache", is_flag=True, help="Probe every plugin anew.")
def command(as_json: bool, no_cache: bool) -> None:
    """List the backends that are installed, which can run here, and which one is chosen.

    Plugins are asked in processes of their own; their code does not run in this one.
    """
    records = registry.backends(use_cache=not no_cache)
    decision: Decision | None = None
    problem: str | None = None
    try:
        decision = registry.forecast(records)
    except AnychipError as error:
        problem = ending(error)[1]
    if as_json:
        click.echo(json.dumps(_to_json(records, decision, problem), indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)
    console.print(_table(records))
    console.print()
    console.print(Text(str(decision) if decision else f"nothing is chosen: {problem}"))
    if any(record.age_s is not None for record in records):
        console.print("a choice does not go by earlier answers: it asks anew, as --no-cache does")
    for record in records:
        if record.fix and record.status != "ready":
            console.print(Text(f"to fix {record.name}: {record.fix}"))


def _to_json(
    records: list[registry.BackendRecord], decision: Decision | None, problem: str | None
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "backends": [record.to_json() for record in records],
        "decision": asdict(decision) if decision else None,
        "problem": problem,
    }


def _table(records: list[registry.BackendRecord]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("", "backend", "status", "kind", "plugin", "reason"):
        table.add_column(title)
    for record in records:
        age = "" if record.age_s is None else f" (answered {record.age_s:.0f} s ago)"
        table.add_row(
            "*" if record.chosen else "",
            record.name,
            Text(record.status, style=STYLES[record.status]),
            record.kind or "",
            Text(f"{record.distribution} {record.version}"),
            Text(record.reason + age),
        )
    return table
