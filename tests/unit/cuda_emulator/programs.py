"""Builds the emulator's test programs, once per machine and session, and runs them."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
EMULATOR = ROOT / "tests" / "native" / "cuda_emulator"
SOURCES = EMULATOR / "programs"
SANITIZERS = {"plain": "", "address": "address,undefined", "thread": "thread"}
REPORTS = ("ERROR: AddressSanitizer", "WARNING: ThreadSanitizer", "runtime error:")


class Outcome(NamedTuple):
    """What came of a program.

    Attributes:
        status: its exit status.
        output: what it printed.
        reports: the first line of each sanitizer's report.
    """

    status: int
    output: str
    reports: list[str]


def table_of(path: Path, first: str) -> list[dict[str, str]]:
    """The rows of the table in a file's first comment, whose heading begins with ``first``."""
    lines = [line.removeprefix("// ") for line in path.read_text().splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith(first) and "|" in line)
    heading, *rows = [
        [cell.strip() for cell in line.split("|")]
        for line in lines[start : lines.index("//", start)]
    ]
    return [dict(zip(heading, row, strict=True)) for row in rows]


def line_of(source: str, marker: str) -> str:
    """``file:line`` of the line that carries ``// at: marker``."""
    lines = (SOURCES / source).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"// at: {marker}")]
    return f"{source}:{number}"


@functools.cache
def build(folder: Path, variant: str) -> Path:
    """Where the programs of a variant of SANITIZERS are; other processes wait for the first one.

    Raises:
        subprocess.CalledProcessError: the build failed; its output has been printed.
    """
    where = folder / f"cuda_emulator_{variant}"
    with (folder / f"cuda_emulator_{variant}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (where / "built").exists():
            scripts = Path(sysconfig.get_path("scripts"))
            cmake = shutil.which("cmake", path=f"{scripts}{os.pathsep}{os.environ['PATH']}")
            if cmake is None or shutil.which("c++") is None:
                pytest.skip("the emulator's programs need cmake and a C++ compiler")
            options = [f"-DANYCHIP_CUDA_SANITIZE={SANITIZERS[variant]}", "-DCMAKE_BUILD_TYPE=None"]
            for words in ([*("-S", SOURCES, "-B", where), *options], ["--build", where]):
                done = subprocess.run([cmake, *words], capture_output=True, text=True)
                if done.returncode:
                    sys.stderr.write(done.stdout + done.stderr)
                done.check_returncode()
            (where / "built").touch()
    return where


def run(folder: Path, variant: str, program: str, *words: str, **settings: str) -> Outcome:
    """Runs a program with ``ANYCHIP_EMULATOR_<name>`` set as ``settings`` say, and no others."""
    others = {k: v for k, v in os.environ.items() if not k.startswith("ANYCHIP_")}
    chosen = {f"ANYCHIP_EMULATOR_{name.upper()}": value for name, value in settings.items()}
    done = subprocess.run(
        [build(folder, variant) / program, *words],
        env={**others, **chosen, "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    reports = [line for line in done.stderr.splitlines() if any(word in line for word in REPORTS)]
    return Outcome(done.returncode, done.stdout.strip(), reports)
