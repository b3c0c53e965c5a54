"""Runs the benchmarks of a backend and writes each result to ``results/`` as a dated page.

``python benchmarks/record.py [--backend NAME] [--rounds N] [--note TEXT]``
"""

from __future__ import annotations

import re
from pathlib import Path

import click
import torch

import anychip
import anychip.ops
from anychip.bench import dispatch, operators
from anychip.bench.report import Report

RESULTS = Path(__file__).parent / "results"


@click.command()
@click.option("--backend", metavar="NAME", help="The backend to measure.")
@click.option("--rounds", type=click.IntRange(min=3), default=21, show_default=True)
@click.option("--note", default="", help="What else is to be known of the machine.")
def main(backend: str | None, rounds: int, note: str) -> None:
    """Measure, then write one page per subject."""
    chip = anychip.use(backend)
    reports = {"dispatch": dispatch.run(chip, rounds=rounds, progress=lambda _: None)}
    for dtype in (torch.float32, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        reports[f"ops-{short}"] = operators.run(
            chip, rounds=rounds, progress=lambda _: None, dtype=dtype
        )
    for subject, report in reports.items():
        click.echo(write(subject, report, rounds, note))


def write(subject: str, report: Report, rounds: int, note: str) -> Path:
    """Writes one report and returns its file."""
    facts = report.to_json()
    date = facts["date"][:10]
    device = re.sub(r"[^a-z0-9]+", "-", report.device.lower()).strip("-")
    headings = ["us", "best us", *dict.fromkeys(h for row in report.rows for h in row.facts)]
    lines = [
        f"# {report.subject} on {report.backend}, {report.device}, {date}",
        "",
        f"torch {facts['torch']}, Python {facts['python']}, {facts['host']}, {report.threads} "
        f"thread(s), {rounds} interleaved rounds, medians. {note}".strip(),
        "",
        f"| what | {' | '.join(headings)} |",
        f"|---|{'---:|' * len(headings)}",
    ]
    for row in report.rows:
        values = [row.microseconds, row.best_microseconds]
        values += [row.facts.get(heading, "") for heading in headings[2:]]
        lines.append(f"| {row.name} | {' | '.join(map(_text, values))} |")
    lines += ["", *report.notes, ""]
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{subject}_{device}_{date}.md"
    file.write_text("\n".join(lines))
    return file


def _text(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
