"""Training runs as processes, for tests."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from anychip.train import report
from tests import warm_python

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


def rows(out: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without the figures that no two runs have in common."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    for row in found:
        for name in ("tokens_per_s", *report.MEASURED):
            row.pop(name, None)
    return found


def num_rows(out: Path) -> int:
    """Lines in metrics.jsonl so far."""
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
