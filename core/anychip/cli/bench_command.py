"""``anychip bench SUBJECT``: what something costs on a backend, next to its peers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import Progress

if TYPE_CHECKING:
    from anychip.bench.report import Report

_DTYPES = ("float32", "bfloat16", "float16")


@click.command("bench")
@click.argument("subject", type=click.Choice(["dispatch", "ops"]))
@click.option("--backend", metavar="NAME", help="The backend to measure; chosen when not given.")
@click.option("--op", "names", multiple=True, metavar="OP", help="Only this operator (ops).")
@click.option("--dtype", type=click.Choice(_DTYPES), default="float32", help="For ops.")
@click.option("--rounds", type=click.IntRange(min=3), default=11, show_default=True)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write JSON here."
)
def command(
    subject: str,
    backend: str | None,
    names: tuple[str, ...],
    dtype: str,
    rounds: int,
    json_file: Path | None,
) -> None:
    """Measure SUBJECT (dispatch or ops) on a backend, next to named peers in the same run."""
    import anychip

    chip = anychip.use(backend)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(str(chip.decision), highlight=False)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"bench {subject}", total=None)
        report = _run(subject, names, dtype, rounds, lambda _: bar.advance(task))
    console.print(report.table())
    for note in report.notes:
        console.print(note, highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=2) + "\n")


def _run(
    subject: str,
    names: tuple[str, ...],
    dtype: str,
    rounds: int,
    progress: Callable[[int], None],
) -> Report:
    import torch

    import anychip
    import anychip.ops
    from anychip.bench import dispatch, operators

    chip = anychip.backend()
    if subject == "dispatch":
        return dispatch.run(chip, rounds=rounds, progress=progress)
    return operators.run(
        chip,
        rounds=rounds,
        progress=progress,
        names=names,
        dtype=getattr(torch, dtype),
    )
