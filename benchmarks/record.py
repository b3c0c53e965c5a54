"""Runs the benchmarks of a backend and writes each result to ``results/`` as a dated page.

``python -m benchmarks.record [SUBJECT ...] [--backend NAME] [--note TEXT]``: all subjects when none
is named. Each page has a table, a picture beside it (.png), and the figures (.json). Rounds and
windows are chosen so that all of it takes less than twelve minutes on two quiet cores. Training
and update rules, whose peers are other trainers, are measured here only.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch

import anychip
import anychip.ops
from anychip.bench import collectives, device, dispatch, operators
from anychip.bench.plot import plot
from anychip.bench.report import Report
from benchmarks import optimizers, pictures, training  # noqa: F401 - pictures draws the others
from benchmarks.trainees import LATE_MS, Sizes

RESULTS = Path(__file__).parent / "results"

SMALL_BATCH = Sizes(batch=4, microbatches=4)
"""Communication weighs four times as much: it does not shrink with the batch."""

FEW_TOKENS = Sizes(batch=2, context=64, microbatches=2)
"""A third of a step of DDP is communication there, or more."""
SHARDED = ("ZeRO-2", "ZeRO-3", "torch DDP", "torch FSDP2")

LATE = ("ZeRO-3", f"ZeRO-3, {LATE_MS} ms late")
"""Of a step so long that two delays are less than 3 % of it."""

Subject = tuple[int, Callable[..., Report]]
SUBJECTS: dict[str, Subject] = {
    "train": (9, training.run),
    "train-small-batch": (9, partial(training.run, sizes=SMALL_BATCH)),
    "train-late": (9, partial(training.run, sizes=Sizes(layers=12), names=LATE)),
    "train-few-tokens": (15, partial(training.run, sizes=FEW_TOKENS, names=SHARDED)),
    "collectives": (7, collectives.run),
    "optim": (7, partial(optimizers.run, window=0.05)),
    "device": (9, device.run),
    "dispatch": (401, dispatch.run),
    "ops-float32": (5, partial(operators.run, window=0.03)),
    "ops-bfloat16": (5, partial(operators.run, window=0.03, dtype=torch.bfloat16)),
}
"""Rounds, and what is run; those that are disturbed most come first."""


@click.command()
@click.argument("subjects", nargs=-1, type=click.Choice(list(SUBJECTS)))
@click.option("--backend", metavar="NAME", help="The backend to measure.")
@click.option("--rounds", type=click.IntRange(min=3), help="Of each subject.")
@click.option("--steps", type=click.IntRange(min=1), help="Of a round (train).  [default: 1]")
@click.option("--params", type=click.IntRange(min=1), help="Parameters (optim).")
@click.option("--note", default="", help="What else is to be known of the machine.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), default=RESULTS)
def main(
    subjects: tuple[str, ...],
    backend: str | None,
    rounds: int | None,
    steps: int | None,
    params: int | None,
    note: str,
    folder: Path,
) -> None:
    """Measure, then write one page per subject into the folder."""
    chip = anychip.use(backend)
    options = {name: {"steps": steps} for name in SUBJECTS if name.startswith("train")}
    options["optim"] = {"num_params": params}
    for subject in subjects or SUBJECTS:
        begin = time.monotonic()
        usual, run = SUBJECTS[subject]
        load = f"Load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
        given = {k: value for k, value in options.get(subject, {}).items() if value is not None}
        report = run(chip, rounds=rounds or usual, progress=lambda _: None, **given)
        page = write(subject, report, rounds or usual, f"{load} {note}".strip(), folder)
        click.echo(f"{page} ({time.monotonic() - begin:.0f} s)")


def write(subject: str, report: Report, rounds: int, note: str, folder: Path) -> Path:
    """Writes one report with its picture and figures, and returns the page."""
    facts = report.to_json()
    date = facts["date"][:10]
    device = re.sub(r"[^a-z0-9]+", "-", report.device.lower()).strip("-")
    headings, rows = report.cells()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{subject}_{device}_{date}.md"
    picture, figures = file.with_suffix(".png"), file.with_suffix(".json")
    plot(report, picture)
    figures.write_text(json.dumps(facts, indent=2) + "\n")
    lines = [
        f"# {report.subject} on {report.backend}, {report.device}, {date}",
        "",
        f"torch {facts['torch']}, Python {facts['python']}, {facts['host']}, {report.threads} "
        f"thread(s), {rounds} interleaved rounds, medians. {note}".strip(),
        "",
        f"| {' | '.join(headings)} |",
        f"|---|{'---:|' * (len(headings) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        *(f"- {line}" for line in report.notes),
        "",
        f"![{report.subject}]({picture.name}) Figures: [{figures.name}]({figures.name}).",
        "",
    ]
    file.write_text("\n".join(lines))
    return file


if __name__ == "__main__":
    main()
