"""``anychip operators``: what a row for an operator is given and gives, and a stub of one."""

import json
import sys
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from anychip.cli.backends_command import WIDE

SCHEMA = 1


@click.command("operators")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; docs/cli.md has the schema.")
def command(name: str | None, as_json: bool) -> None:
    """List the operators, or show everything that a row for the operator NAME must know.

    That is its signature, the order of what its backward is given, the names of its sizes, dtypes,
    the error bound, and a stub to paste.
    """
    import anychip.ops  # noqa: F401 - defines our operators
    from anychip.dispatch.description import describe
    from anychip.dispatch.operator import check_names, registered

    check_names([] if name is None else [name])
    chosen = registered() if name is None else {name: registered()[name]}
    facts = [describe(operator.spec) for operator in chosen.values()]
    if as_json:
        click.echo(json.dumps({"schema": SCHEMA, "operators": facts}, indent=2))
    elif name is None:
        console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)
        console.print(_table(facts))
    else:
        click.echo(_text(facts[0]))


def _table(facts: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("operator", "rows", "signature"):
        table.add_column(title)
    for fact in facts:
        table.add_row(fact["name"], "2" if fact["backward"] else "1", Text(fact["signature"]))
    return table


def _text(fact: dict[str, Any]) -> str:
    lines = [f"  {name:<12} {_said(value)}" for name, value in fact.items() if name != "stub"]
    return "\n".join([*lines, "", fact["stub"]])


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_said(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_said, value)) or "none"
    return " ".join(str("none" if value is None else value).split())
