"""All stages on a device, each in a process of its own and within a limit of time; then one page.

    python -m benchmarks.cuda [--backend cuda] [--seconds 540] [--only STAGE ...] [--folder DIR]

A stage that fails, or is over its time, does not stop the others; the end says which. Figures go to
DIR/<stage>.json, what was printed to DIR/<stage>.txt, and a dated page with all tables, for
benchmarks/results, to DIR as well.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

ROOT = Path(__file__).parents[2]
GRACE_S = 20.0
"""Beyond its time a stage may finish what it has begun; then it is ended."""


class Work(NamedTuple):
    """A stage to be run.

    Attributes:
        name: of its files.
        command: without options that all stages have.
        seconds: of the whole ten minutes.
        own: a program of this folder, which takes ``--backend``, ``--tiny``, ``--seconds`` and
            ``--json``.
        env: besides the environment of all.
        missing: what is not here, so that the stage is left out.
    """

    name: str
    command: Sequence[str]
    seconds: float
    own: bool = True
    env: Mapping[str, str] = {}
    missing: str = ""


def module(name: str, *options: str) -> list[str]:
    """A program of this folder."""
    return [sys.executable, "-m", f"benchmarks.cuda.{name}", *options]


def anychip(*words: str) -> list[str]:
    """The command line of anychip."""
    return [sys.executable, "-m", "anychip", *words]


def stages(backend: str, against: str) -> list[Work]:
    """What is run, in this order: right before fast."""
    return [
        Work("doctor", anychip("doctor", backend), 20, own=False),
        Work("agreement", module("agreement", "--against", against), 50),
        Work("conformance", module("suite"), 150),
        Work("determinism", module("determinism"), 30),
        Work("edges", module("edges"), 60),
        *sanitizers(),
        Work("rates", module("rates"), 15),
        Work("host_cost", module("host_cost"), 15),
        Work("optimizer", module("optimizer"), 30),
        Work("bandwidth", module("bandwidth", "--no-compile"), 90),
        Work("training", module("training"), 100),
    ]


def sanitizers() -> list[Work]:
    """The memory and race checkers of the toolkit, over kernels of ours."""
    tool = "compute-sanitizer"
    missing = "" if shutil.which(tool) else f"no {tool} on PATH"
    call = [tool, "--error-exitcode", "9", "--kernel-regex", "kns=anychip", "--tool"]
    # One allocation per tensor: behind a tensor in a cached block lies memory of another one.
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    calls = module("determinism", "--tiny")
    return [
        Work(name, [*call, name, *calls], 40, env=env, missing=missing)
        for name in ("memcheck", "racecheck")
    ]


@click.command()
@click.option("--backend", default="cuda", show_default=True, metavar="NAME")
@click.option("--against", default="cuda-emulated", show_default=True, metavar="NAME")
@click.option("--tiny", is_flag=True, help="Sizes for a machine without a device.")
@click.option("--seconds", default=540.0, show_default=True, help="For all stages.")
@click.option("--only", multiple=True, metavar="STAGE", help="Repeatable; all when not given.")
@click.option(
    "--folder", type=click.Path(file_okay=False, path_type=Path), default=ROOT / "build" / "h200"
)
@click.option("--dry-run", is_flag=True, help="Print the commands; run nothing.")
def command(
    backend: str,
    against: str,
    tiny: bool,
    seconds: float,
    only: tuple[str, ...],
    folder: Path,
    dry_run: bool,
) -> int:
    """Run every stage and write one page."""
    folder = folder.resolve()
    known = stages(backend, against)
    unknown = set(only) - {work.name for work in known}
    if unknown:
        names = ", ".join(work.name for work in known)
        raise click.UsageError(f"no stage {', '.join(sorted(unknown))}; there are {names}")
    chosen = [work for work in known if not only or work.name in only]
    share = seconds / sum(work.seconds for work in known)
    if dry_run:
        for work in chosen:
            click.echo(f"{work.seconds * share:5.0f} s  {' '.join(line(work, backend, tiny, 0.0))}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    outcomes = [run(work, backend, tiny, folder, share, deadline) for work in chosen]
    page = write(folder, outcomes)
    click.echo(f"page: {page}")
    return 1 if any(outcome["failed"] for outcome in outcomes) else 0


def line(work: Work, backend: str, tiny: bool, seconds: float, *more: str) -> list[str]:
    """The whole command of a stage."""
    if not work.own:
        return list(work.command)
    tail = ["--backend", backend, "--seconds", f"{seconds:.0f}", *more]
    return [*work.command, *(["--tiny"] if tiny and "--tiny" not in work.command else []), *tail]


def run(
    work: Work, backend: str, tiny: bool, folder: Path, share: float, deadline: float
) -> dict[str, Any]:
    """Runs one stage; its outcome for the page."""
    left = deadline - time.monotonic()
    limit = min(work.seconds * share, max(left, 0.0))
    figures, log = folder / f"{work.name}.json", folder / f"{work.name}.txt"
    figures.unlink(missing_ok=True)
    begin = time.monotonic()
    if work.missing or left <= 0:
        status = f"left out: {work.missing or 'the time was over'}"
    else:
        words = line(work, backend, tiny, limit, "--json", str(figures))
        status = ended(words, log, limit + GRACE_S, work.env)
    taken = time.monotonic() - begin
    click.echo(f"{work.name:12} {taken:6.1f} s  {status}")
    return {
        "stage": work.name,
        "status": status,
        "failed": status != "passed" and not work.missing,
        "seconds": taken,
        "found": json.loads(figures.read_text()) if work.own and figures.is_file() else {},
    }


def ended(words: Sequence[str], log: Path, limit_s: float, env: Mapping[str, str]) -> str:
    """How a command ended; what it prints goes to a file."""
    everything = {**os.environ, "PYTHONUNBUFFERED": "1", **env}
    with log.open("w") as out:
        try:
            done = subprocess.run(
                words,
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                env=everything,
            )
        except subprocess.TimeoutExpired:
            return f"ended after {limit_s:.0f} s"
        except OSError as error:
            return f"could not be started: {error}"
    return "passed" if done.returncode == 0 else f"failed ({done.returncode})"


def write(folder: Path, outcomes: Sequence[dict[str, Any]]) -> Path:
    """Writes the dated page and its figures."""
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    devices = [o["found"]["device"] for o in outcomes if isinstance(o["found"].get("device"), str)]
    device = devices[0] if devices else "unknown device"
    name = re.sub(r"[^a-z0-9]+", "-", device.split(",")[0].lower()).strip("-")
    file = folder / f"cuda_{name}_{date}.md"
    file.with_suffix(".json").write_text(json.dumps(outcomes, indent=2) + "\n")
    lines = [f"# CUDA kernels and backend on {device}, {date}", "", "| stage | s | outcome |"]
    lines += ["|---|---:|---|"]
    for outcome in outcomes:
        checks = outcome["found"].get("checks", [])
        failed = [check for check in checks if not check["holds"]]
        text = f"{len(checks) - len(failed)} of {len(checks)} checks hold" if checks else ""
        words = ", ".join(part for part in (outcome["status"], text) if part)
        lines.append(f"| {outcome['stage']} | {outcome['seconds']:.0f} | {words} |")
    for outcome in outcomes:
        lines += section(outcome)
    file.write_text("\n".join(lines) + "\n")
    return file


def section(outcome: dict[str, Any]) -> list[str]:
    """Tables, failures and notes of one stage."""
    found = outcome["found"]
    failed = [check for check in found.get("checks", []) if not check["holds"]]
    lines = [f"- {check['what']}: {check['text']}" for check in failed[:20]]
    lines += [f"- and {len(failed) - 20} more"] if len(failed) > 20 else []
    lines += [f"- note: {note}" for note in found.get("notes", [])]
    tables: dict[str, list[dict[str, Any]]] = {}
    for report in found.get("reports", []):
        tables.setdefault(report["subject"], []).extend(report["rows"])
    for subject, rows in tables.items():
        lines += ["", f"### {subject}", "", *table(rows)]
    return ["", f"## {outcome['stage']}", "", *lines] if lines else []


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Rows of benchmarks as a table of the page."""
    facts = list(dict.fromkeys(name for row in rows for name in row["facts"]))
    lines = [f"| {' | '.join(['what', 'us', *facts])} |", f"|---|{'---:|' * (1 + len(facts))}"]
    for row in rows:
        values = [row["microseconds"], *(row["facts"].get(name, "") for name in facts)]
        cells = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in values]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    raise SystemExit(command(standalone_mode=False))
