"""Everything about the npu backend that can be shown without an Ascend device; `make test-npu`.

    python -m tests.npu [--torch-npu VERSION] [--only STEP ...] [--jobs N] [-k EXPRESSION]

Makes an environment with torch_npu, builds the CANN emulator for it, and runs the steps on it. Each
writes what it prints to build/npu_logs; the end says which failed, and where the time went. Exit
status 1 when one did. A commit runs one slice (tests/slices.py) of what is a grid: rows and
operators by dtypes, and the operators in the conformance suite; of its long chapters a sixth.
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests import budgets, slices
from tests.logs import CommandError, Log
from tests.npu.environment import BUILD, ROOT, Environment, pinned

FAMILY, REPORT = "npu/conformance", BUILD / "npu_logs" / "conformance.json"
"""Of the operators that the conformance suite asks about, and where its report goes."""


class Step(NamedTuple):
    """Something to be shown, the program of the environment that does, and on how many devices."""

    name: str
    says: str
    command: Sequence[str]
    devices: int = 2


STEPS: Sequence[Step] = (
    Step(
        "tests", "tests/npu: emulator, rows, training, ranks, faults, doctor",
        ("pytest", "-q", "-p", "no:cacheprovider", "--dist", "worksteal", "tests/npu"),
    ),
    Step(
        "conformance", "conformance suite of npu, level quick",
        ("anychip", "conformance", "--backend", "npu"),
        4,  # HCCL takes one rank per device, and the suite asks four ranks
    ),
)  # fmt: skip


def words_of(name: str, expression: str, jobs: int) -> list[str]:
    """What a step's command is given besides: the tests that are chosen, or one slice."""
    if name == "conformance":
        REPORT.unlink(missing_ok=True)
        return slices.suite_words(slices.chosen(), FAMILY, REPORT)
    return ["-n", str(jobs), *(["-k", expression] if expression else ["--slice"])]


def show(step: Step, environment: Environment, words: Sequence[str]) -> bool:
    """Runs one step and says how it went."""
    start = time.monotonic()
    log, problem = Log(logs(environment) / f"{step.name}.txt"), ""
    program, *rest = step.command
    try:
        variables = environment.variables() | {"ANYCHIP_CANN_DEVICES": str(step.devices)}
        log.command(environment.program(program), *rest, *words, env=variables)
    except CommandError as error:
        problem = str(error)
        if step.name == "conformance":
            slices.remember(slices.operators_that_failed(FAMILY, REPORT))
    took = time.monotonic() - start
    print(
        f"{'FAILED' if problem else 'passed'} {step.name} ({took:.0f} s): {step.says}", flush=True
    )
    last = log.end(40 if problem else 1)
    print(f"  {problem}; the end of {log.path.relative_to(ROOT)}:\n{last}" if problem else last)
    return not problem


def logs(environment: Environment) -> Path:
    return BUILD / "npu_logs" / environment.torch_npu


def make_ready(environment: Environment, jobs: int) -> bool:
    """The environment and the emulator."""
    start = time.monotonic()
    for name, make in (
        ("environment", environment.make),
        ("emulator", lambda log: environment.build(log, jobs)),
    ):
        log = Log(logs(environment) / f"{name}.txt")
        try:
            make(log)
        except CommandError as error:
            print(f"FAILED to make the {name}: {error}; the end of {log.path.relative_to(ROOT)}:")
            print(log.end())
            return False
    took = time.monotonic() - start
    print(
        f"torch_npu {environment.torch_npu} and the emulator are ready ({took:.0f} s)", flush=True
    )
    return True


def main() -> int:
    """The command line."""
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(prog="python -m tests.npu")
    parser.add_argument("--torch-npu", default=pinned(), metavar="VERSION")
    parser.add_argument("--only", nargs="*", choices=names, default=names, metavar="STEP")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="chooses among the tests")
    given = parser.parse_args()
    try:
        print(slices.chosen(), flush=True)
    except slices.SliceError as error:
        parser.error(str(error))
    start = time.monotonic()
    environment = Environment(torch_npu=given.torch_npu)
    if not make_ready(environment, given.jobs):
        return 1
    if not given.only:
        print("to use it:")
        print(f"  . {shlex.quote(os.path.relpath(environment.program('activate')))}")
        print(f"  export LD_LIBRARY_PATH={shlex.quote(str(environment.emulator / 'lib'))}")
        return 0
    made = time.monotonic() - start
    chosen = [step for step in STEPS if step.name in given.only]
    # One after the other: each keeps the cores busy by itself.
    words = {step.name: words_of(step.name, given.k, given.jobs) for step in chosen}
    failed = [s.name for s in chosen if not show(s, environment, words[s.name])]
    print(budgets.table({"npu/build": made, "npu/steps": time.monotonic() - start - made}))
    print(f"{len(chosen) - len(failed)} of {len(chosen)} steps passed", *failed, sep=", failed: ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
