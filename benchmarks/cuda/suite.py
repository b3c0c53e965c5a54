"""The conformance suite, level quick, in several processes side by side.

One process takes longer than the ten minutes of h200.sh: it waits for the host, which has cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import click

from anychip import operators
from anychip.conformance.chapters import CHAPTERS
from anychip.conformance.report import Report
from benchmarks.cuda.stage import Stage, main, stage

BY_OPERATOR = ("operators", "gradients")
"""The chapters that take longest."""


@stage(seconds=180.0)
@click.option("--jobs", type=click.IntRange(1), help="Processes; half of the cores, at most 8.")
def command(stage: Stage, jobs: int | None) -> None:
    """Ask every case of level quick."""
    jobs = jobs or max(1, min(8, (os.cpu_count() or 2) // 2))
    asked = [["--chapter", "device"]] if stage.tiny else list(parts(jobs))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(asked)) as pool:
        files = [Path(folder, f"{number}.json") for number in range(len(asked))]
        list(pool.map(partial(ask, stage), asked, files))


def parts(jobs: int) -> Iterator[list[str]]:
    """What ``anychip conformance`` is told: some operators each, and at last all other chapters."""
    names = [spec.name for spec in operators.all_specs()]
    for own in (names[first::jobs] for first in range(jobs)):
        words = " or ".join(f"/{name}/" for name in own)
        yield [*(word for chapter in BY_OPERATOR for word in ("--chapter", chapter)), "-k", words]
    yield [w for name in CHAPTERS if name not in BY_OPERATOR for w in ("--chapter", name)]


def ask(stage: Stage, words: list[str], file: Path) -> None:
    """One process; each of its cases is a check."""
    command = [sys.executable, "-m", "anychip", "conformance", "--backend", stage.chip.name]
    limit = max(1.0, stage.deadline - time.monotonic())
    try:
        done = subprocess.run(
            [*command, "--jobs", "1", "--json", str(file), *words],
            capture_output=True, text=True, timeout=limit,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        said = (done.stdout + done.stderr).strip().splitlines()[-1:]
    except subprocess.TimeoutExpired:
        said = [f"ended after {limit:.0f} s"]
    if not file.is_file():
        stage.check(" ".join(words), False, *said)
        return
    for result in Report.from_json(json.loads(file.read_text())).results:
        stage.check(result.case, result.ok, "".join(result.reason.splitlines()[:1]))


if __name__ == "__main__":
    main(command)
