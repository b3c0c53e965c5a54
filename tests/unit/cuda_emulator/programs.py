"""Builds the emulator's test programs, once for what they are made of, and runs them."""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
EMULATOR = ROOT / "tests" / "native" / "cuda_emulator"
SOURCES = EMULATOR / "programs"
SANITIZERS = {"plain": "", "address": "address,undefined", "thread": "thread"}
KINDS = {".cu", ".cuh", ".cpp", ".h", ".txt"}
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
def _digest() -> str:
    """Of all that the programs are made of, and by which compiler."""
    version = subprocess.run(["c++", "--version"], capture_output=True, check=True).stdout
    found = hashlib.sha256(version)
    for root in (EMULATOR, ROOT / "csrc" / "cuda", Path(__file__).parent):
        for path in sorted(p for p in root.rglob("*") if p.suffix in KINDS):
            found.update(str(path).encode() + path.read_bytes())
    return found.hexdigest()[:16]


def made(name: str, make: Callable[[Path], None]) -> Path:
    """A folder that ``make`` has filled, now or earlier; other processes wait for the first one."""
    where = ROOT / "build" / "cuda_emulator_programs" / name
    where.mkdir(parents=True, exist_ok=True)
    with where.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = where / f"made-{_digest()}"
        if not stamp.exists():
            for old in where.glob("made-*"):
                old.unlink()
            make(where)
            stamp.touch()
    return where


@functools.cache
def build(variant: str) -> Path:
    """Where the programs of a variant of SANITIZERS are.

    Raises:
        subprocess.CalledProcessError: the build failed; its output has been printed.
    """
    scripts = Path(sysconfig.get_path("scripts"))
    cmake = shutil.which("cmake", path=f"{scripts}{os.pathsep}{os.environ['PATH']}")
    if cmake is None or shutil.which("c++") is None:
        pytest.skip("the emulator's programs need cmake and a C++ compiler")

    def make(where: Path) -> None:
        options = [f"-DANYCHIP_CUDA_SANITIZE={SANITIZERS[variant]}", "-DCMAKE_BUILD_TYPE=None"]
        for words in ([*("-S", SOURCES, "-B", where), *options], ["--build", where]):
            done = subprocess.run([cmake, *words], capture_output=True, text=True)
            if done.returncode:
                sys.stderr.write(done.stdout + done.stderr)
            done.check_returncode()

    return made(variant, make)


def run(variant: str, program: str, *words: str, **settings: str) -> Outcome:
    """Runs a program with ``ANYCHIP_EMULATOR_<name>`` set as ``settings`` say, and no others."""
    others = {k: v for k, v in os.environ.items() if not k.startswith("ANYCHIP_")}
    chosen = {f"ANYCHIP_EMULATOR_{name.upper()}": value for name, value in settings.items()}
    done = subprocess.run(
        [build(variant) / program, *words],
        env={**others, **chosen, "ASAN_OPTIONS": "detect_leaks=0"}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    reports = [line for line in done.stderr.splitlines() if any(word in line for word in REPORTS)]
    return Outcome(done.returncode, done.stdout.strip(), reports)
