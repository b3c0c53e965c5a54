"""Training runs as processes, for tests."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from anychip.train import report
from tests import warm_python
from tests.integration import two_hosts

TINY = (
    "run.sample_tokens=5", "model.context=16", "model.layers=1", "model.heads=2", "model.width=16",
    "model.dropout=0.1", "data.batch_size=2",
)  # fmt: skip
"""Settings of a model that does a step in some milliseconds."""


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "anychip", "train", *args]


def variables(**extra: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **extra}


def train(*args: str, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs ``anychip train`` to its end, in a directory."""
    words = ("-m", "anychip", "train", *args)
    return warm_python.run(*words, cwd=cwd, env=variables(**extra), timeout=250)


def start(*args: str, cwd: Path) -> subprocess.Popen[str]:
    """Starts ``anychip train`` in a directory."""
    return subprocess.Popen(
        command(*args), cwd=cwd, env=variables(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


@contextmanager
def on_two_hosts(
    ranks: int, *words: str, cwd: Path, **extra: str
) -> Iterator[subprocess.Popen[str]]:
    """A command on both of :mod:`tests.integration.two_hosts`, which ends with the context."""
    prefix = two_hosts.prefix()
    if prefix is None:
        pytest.skip(two_hosts.NOT_HERE)
    script = [sys.executable, "-m", "tests.integration.two_hosts", str(ranks), *words]
    root = str(Path(__file__).parents[3])
    paths = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [*prefix, *script], cwd=cwd, env=variables(PYTHONPATH=paths, **extra), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as job:  # fmt: skip
        try:
            yield job
        finally:
            for pid in processes(job.pid) if job.poll() is None else ():
                os.kill(pid, signal.SIGKILL)


def processes(of: int) -> list[int]:
    """A process and all that come from it, as long as it runs."""
    place = Path(f"/proc/{of}/task/{of}/children")
    children = place.read_text().split() if place.exists() else []
    return [of, *(found for child in children for found in processes(int(child)))]


def is_running(pid: int) -> bool:
    """Not ended, even if nobody has asked yet with what."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def rows(out: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without the figures that no two runs have in common."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for row in found:
        for name in ("tokens_per_s", *report.MEASURED):
            row.pop(name, None)
    return found


def num_rows(out: Path) -> int:
    """Lines in metrics.jsonl so far."""
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
