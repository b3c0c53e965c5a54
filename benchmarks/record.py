"""Runs the benchmarks of a backend and writes each result to ``results/`` as a dated page.

``python benchmarks/record.py [SUBJECT ...] [--backend NAME] [--note TEXT]``: all subjects when none
is named. Each page has a table, a picture beside it (.png), and the figures (.json). Rounds and
windows are chosen so that all of it takes less than twelve minutes on two quiet cores.
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
from anychip.bench import collectives, device, dispatch, operators, optimizers, training
from anychip.bench.plot import plot
from anychip.bench.report import Report
from anychip.contract import Backend

RESULTS = Path(__file__).parent / "results"

Subject = tuple[int, Callable[..., Report]]
SUBJECTS: dict[str, Subject] = {
    "train": (9, training.run),
    "collectives": (7, collectives.run),
    "optim": (7, partial(optimizers.run, window=0.05)),
    "device": (9, device.run),
    "dispatch": (21, dispatch.run),
    "ops-float32": (5, partial(operators.run, window=0.03)),
    "ops-bfloat16": (5, partial(operators.run, window=0.03, dtype=torch.bfloat16)),
}
"""Rounds, and what is run; those that are disturbed most come first."""


@click.command()
@click.argument("subjects", nargs=-1, type=click.Choice(list(SUBJECTS)))
@click.option("--backend", metavar="NAME", help="The backend to measure.")
@click.option("--rounds", type=click.IntRange(min=3), help="Of each subject.")
@click.option("--note", default="", help="What else is to be known of the machine.")
def main(subjects: tuple[str, ...], backend: str | None, rounds: int | None, note: str) -> None:
    """Measure, then write one page per subject."""
    chip = anychip.use(backend)
    for subject in subjects or SUBJECTS:
        begin = time.monotonic()
        page = record(subject, chip, rounds, note)
        click.echo(f"{page} ({time.monotonic() - begin:.0f} s)")


def record(subject: str, chip: Backend, rounds: int | None, note: str) -> Path:
    """Measures one subject and writes its page."""
    usual, run = SUBJECTS[subject]
    rounds = rounds or usual
    load = f"Load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
    report = run(chip, rounds=rounds, progress=lambda _: None)
    return write(subject, report, rounds, f"{load} {note}".strip())


def write(subject: str, report: Report, rounds: int, note: str) -> Path:
    """Writes one report with its picture and figures, and returns the page."""
    facts = report.to_json()
    date = facts["date"][:10]
    device = re.sub(r"[^a-z0-9]+", "-", report.device.lower()).strip("-")
    headings, rows = report.cells()
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{subject}_{device}_{date}.md"
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
