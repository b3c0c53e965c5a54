"""Everything that ``make test`` asks: pytest, then the conformance suite of the cpu backend.

    python -m tests [--jobs N] [PYTEST ARGUMENT ...]

Grids run one slice, long tests and the suite's operators one sixth (tests/slices.py), the suite at
level quick; with ``ANYCHIP_SLICE=all``, all of them and level full. With arguments, pytest alone
runs, on what they choose. The end says where the time went, next to its budget. Exit status 1 when
something failed.
"""

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


def commands(jobs: int, arguments: Sequence[str], asked: slices.Slice) -> dict[str, list[str]]:
    """The command of each part."""
    # A third of the time tests wait, for ranks and limits: one process more than cores are there.
    several = ["--numprocesses", str(jobs + 1), "--dist", "worksteal"]
    pytest = [sys.executable, "-m", "pytest", *several]
    if arguments:
        return {"test/pytest": [*pytest, *arguments]}
    anychip = str(Path(sysconfig.get_path("scripts")) / "anychip")
    suite = [anychip, "conformance", "--backend", "cpu", "--jobs", str(min(jobs, 2))]
    suite += ["--level", "full"] if asked.number is None else slices.part_of_operators(asked)
    return {"test/pytest": [*pytest, "--slice"], "test/conformance": suite}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests", allow_abbrev=False)
    parser.add_argument("--jobs", type=int, default=2)
    given, arguments = parser.parse_known_args()
    try:
        asked = slices.Slice(number=None, because="") if arguments else slices.chosen()
    except slices.SliceError as error:
        parser.error(str(error))
    took, failed = {}, []
    # One thread in each of the processes: two cores are not shared by four.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, words in commands(given.jobs, arguments, asked).items():
        start = time.monotonic()
        if subprocess.run(words, cwd=ROOT, env=environment).returncode != 0:
            failed.append(name)
        took[name] = time.monotonic() - start
    print(budgets.table(took), flush=True)
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
