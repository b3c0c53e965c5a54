"""Everything that ``make test`` asks: pytest, then the conformance suite of the cpu backend.

    python -m tests [--jobs N] [PYTEST ARGUMENT ...]

Grids run one slice (tests/slices.py) and the suite level quick; with ``ANYCHIP_SLICE=all``, all
slices and level full. With arguments, pytest alone runs, on what they choose. The end says where
the time went, next to its budget. Exit status 1 when something failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from tests import budgets, slices

ROOT = Path(__file__).parents[1]
LONG_CHAPTERS = ("gradients", "operators")
"""At level full each of these takes about as long as all others together."""
SHORT_CHAPTERS = (
    "device memory streams random collectives optimizer zero pipeline training errors".split()
)


def commands(jobs: int, arguments: Sequence[str], level: str) -> dict[str, list[list[str]]]:
    """The commands of each part; those of one part run at the same time."""
    pytest = [sys.executable, "-m", "pytest", "--numprocesses", str(jobs)]
    if arguments:
        return {"test/pytest": [[*pytest, *arguments]]}
    anychip = str(Path(sysconfig.get_path("scripts")) / "anychip")
    suite = [anychip, "conformance", "--backend", "cpu", "--level", level]
    parts = [*([name] for name in LONG_CHAPTERS), SHORT_CHAPTERS]
    chosen = [[word for name in part for word in ("--chapter", name)] for part in parts]
    return {
        "test/pytest": [[*pytest, "--slice"]],
        "test/conformance": [[*suite, *words] for words in chosen],
    }


def run(part: Sequence[Sequence[str]]) -> bool:
    """Runs the commands at the same time, and shows what each printed when it has ended."""
    # One thread in each of the processes: two cores are not shared by four.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    alone = len(part) == 1
    kept = None if alone else subprocess.PIPE
    started = [subprocess.Popen(c, cwd=ROOT, env=environment, stdout=kept) for c in part]
    for process in started:
        printed, _ = process.communicate()
        if not alone:
            sys.stdout.buffer.write(printed)
            sys.stdout.flush()
    return all(process.returncode == 0 for process in started)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests", allow_abbrev=False)
    parser.add_argument("--jobs", type=int, default=2)
    given, arguments = parser.parse_known_args()
    try:
        asked = slices.chosen()
    except slices.SliceError as error:
        if not arguments:
            print(error, file=sys.stderr)
            return 2
    took, failed = {}, []
    level = "full" if not arguments and asked.number is None else "quick"
    for name, part in commands(given.jobs, arguments, level).items():
        start = time.monotonic()
        if not run(part):
            failed.append(name)
        took[name] = time.monotonic() - start
    print(budgets.table(took))
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
