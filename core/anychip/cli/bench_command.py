"""``anychip bench SUBJECT``: what something costs on a backend, next to its peers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import Progress

from anychip.cli.files import ResultFile

if TYPE_CHECKING:
    from anychip.bench.report import Report

_DTYPES = ("float32", "bfloat16", "float16")
_SUBJECTS = ("device", "dispatch", "ops", "collectives", "chip")
_OPTIONS = {
    "names": ("ops", "--op"),
    "dtype": ("ops", "--dtype"),
    "compiled": ("ops", "--no-compile"),
}
"""Argument to the subject that takes it."""


@click.command("bench")
@click.argument("subject", type=click.Choice(_SUBJECTS))
@click.option("--backend", metavar="NAME", help="The backend to measure; chosen when not given.")
@click.option("--op", "names", multiple=True, metavar="OP", help="Only this operator (ops).")
@click.option("--dtype", type=click.Choice(_DTYPES), help="For ops.  [default: float32]")
@click.option("--no-compile", is_flag=True, help="Without torch.compile as a peer (ops).")
@click.option("--rounds", type=click.IntRange(min=3), default=11, show_default=True)
@click.option("--json", "json_file", type=ResultFile(), help="Write JSON here.")
@click.option(
    "--plot", "plot_file", type=ResultFile(".png", ".svg", ".pdf"),
    help="Draw the result; .png, .svg or .pdf.",
)  # fmt: skip
def command(
    subject: str,
    backend: str | None,
    rounds: int,
    json_file: Path | None,
    plot_file: Path | None,
    no_compile: bool,
    **given: Any,
) -> None:
    """Measure SUBJECT on a backend, next to named peers in the same run.

    \b
    device       what it reaches: bytes/s of a copy, flop/s of matrix products
    dispatch     what a call costs before any work is done
    ops          the operators, next to torch, torch.compile and the bound
    collectives  calls between two processes, next to torch.distributed and the bound
    chip         a chip's C library: where a training step's time goes, and what to write next

    Training and update rules next to those of torch and DeepSpeed: python -m benchmarks.record, in
    the source tree.
    """
    import anychip

    options = _checked(subject, {**given, "compiled": False if no_compile else None})
    chip = anychip.use(backend)
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(str(chip.decision), highlight=False)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"bench {subject}", total=None)
        report = _run(subject, rounds, lambda _: bar.advance(task), options)
    console.print(report.table())
    for note in report.notes:
        console.print(note, highlight=False, markup=False)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    if plot_file is not None:
        from anychip.bench.plot import plot

        plot(report, plot_file)


def _checked(subject: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options that were given; one of another subject would have no effect."""
    options = {name: value for name, value in given.items() if value not in (None, ())}
    for name in options:
        owner, flag = _OPTIONS[name]
        if owner != subject:
            raise click.UsageError(f"{flag} is for bench {owner}, and this is bench {subject}")
    return options


def _run(
    subject: str, rounds: int, progress: Callable[[int], None], options: dict[str, Any]
) -> Report:
    import torch

    import anychip
    import anychip.ops
    from anychip.bench import chip, collectives, device, dispatch, operators

    backend = anychip.backend()
    if "dtype" in options:
        options["dtype"] = getattr(torch, options["dtype"])
    run: dict[str, Callable[..., Report]] = {
        "chip": chip.run, "device": device.run, "dispatch": dispatch.run, "ops": operators.run,
        "collectives": collectives.run,
    }  # fmt: skip
    return run[subject](backend, rounds=rounds, progress=progress, **options)
