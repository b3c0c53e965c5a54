"""Everything about the CUDA kernels that can be shown without a GPU; `make test-cuda`.

    python -m tests.cuda_emulated [--only STEP ...] [--jobs N]

The kernels' own sources are compiled for the host, plain, with sanitizers and with counts of lines,
and by nvcc, whose machine code is read. Each step writes what it prints to build/cuda_logs; the end
says which failed, and where the time went. Exit status 1 when one did.

A commit runs one slice (tests/slices.py) of the unit tests in other orders than the first, of the
seeded mistakes and of the operators in the conformance suite, and one of the steps that need a
build of their own, with TSan a third of the samples; ``ANYCHIP_SLICE=all`` runs everything.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from anychip import operators
from tests import budgets, logs, slices
from tests.cuda_emulated import sanitizers

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
LOGS = BUILD / "cuda_logs"
UNIT_TESTS = "tests/unit/backends_cuda"
MODULE = f"csrc/cuda/_emu{sysconfig.get_config_var('EXT_SUFFIX')}"
LEAST_COVERED_LINES = 95
"""Percent of the kernels' lines that the unit tests must run."""


class Step(NamedTuple):
    """Something to be shown, and the function that shows it.

    Attributes:
        alone: it keeps all cores busy by itself, and runs when the others have ended.
    """

    name: str
    says: str
    run: Callable[[Log], None]
    alone: bool = False


class Log(logs.Log):
    """Runs the commands of one step, and keeps what they print."""

    def __init__(self, name: str, jobs: int) -> None:
        super().__init__(LOGS / f"{name}.txt")
        self.jobs = jobs

    def tests(self, folder: Path, order: str, *words: str, **env: str) -> None:
        """The kernels' unit tests on the module of a build folder, in an order of threads."""
        chosen = {
            "ANYCHIP_CUDA_EMULATED": str(folder / MODULE), "ANYCHIP_EMULATOR_ORDER": order,
            "ANYCHIP_EMULATOR_REQUIRED": "1", **env,
        }  # fmt: skip
        pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--slice")
        self.command(*pytest, "-k", "not cuda-", UNIT_TESTS, *words, env=chosen)


def build(log: Log, folder: str, *options: str, cuda: bool = False) -> Path:
    """Configures and builds one variant; a second call finds what has not changed."""
    scripts = Path(sysconfig.get_path("scripts"))
    path = BUILD / folder
    log.command(
        scripts / "cmake", *("-G", "Ninja", "-S", ROOT, "-B", path),
        *("-DANYCHIP_CPU=OFF", "-DANYCHIP_BRIDGE=OFF"), f"-DANYCHIP_CUDA={'ON' if cuda else 'OFF'}",
        f"-DANYCHIP_CUDA_EMULATOR={'OFF' if cuda else 'ON'}",
        f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_MAKE_PROGRAM={scripts / 'ninja'}",
        *options,
    )  # fmt: skip
    log.command(scripts / "cmake", "--build", path, "--parallel", str(log.jobs))
    return path


def forward_order(log: Log) -> None:
    log.tests(BUILD / "cuda_emulator", "forward")


def random_order(log: Log) -> None:
    log.tests(BUILD / "cuda_emulator", "random")


def warp_order(log: Log) -> None:
    log.tests(BUILD / "cuda_emulator", "warp")


def conformance(log: Log) -> None:
    family, report = "cuda_emulated/conformance", BUILD / "cuda_logs" / "conformance.json"
    report.unlink(missing_ok=True)
    anychip = Path(sysconfig.get_path("scripts")) / "anychip"
    words = slices.suite_words(slices.chosen(), family, report)
    try:
        log.command(anychip, "conformance", "--backend", "cuda-emulated", *words)
    except logs.CommandError:
        slices.remember(slices.operators_that_failed(family, report))
        raise


def seeded_bugs(log: Log) -> None:
    plain = [] if "address_sanitizer" in steps_of(slices.chosen()) else ["--plain"]
    log.command(
        *(sys.executable, "-m", "tests.cuda_emulated.seeded_bugs", *plain),
        *("--build", BUILD / "cuda_emulator", "--slice", "--jobs", str(log.jobs)),
    )


def address_sanitizer(log: Log) -> None:
    log.tests(
        BUILD / "cuda_emulator_address", "random", **sanitizers.environment("address,undefined")
    )


def thread_sanitizer(log: Log) -> None:
    module = BUILD / "cuda_emulator_thread" / MODULE
    environment = {
        "ANYCHIP_CUDA_EMULATED": str(module), "ANYCHIP_EMULATOR_ORDER": "random",
        **sanitizers.environment("thread"),
    }  # fmt: skip
    only = sampled_operators(slices.chosen())
    words = [] if only is None else ["--only", *only]
    log.command(sys.executable, "-m", "tests.cuda_emulated.samples", *words, env=environment)


def coverage(log: Log) -> None:
    folder = BUILD / "cuda_emulator_coverage"
    for counts in folder.rglob("*.gcda"):
        counts.unlink()
    log.tests(folder, "forward")
    log.command(
        *(
            sys.executable, "-m", "gcovr", "--root", ROOT, "--merge-lines", "--filter",
            "csrc/cuda/kernels/",
        ),
        *("--filter", r"csrc/cuda/.*\.cuh", folder),
        *("--fail-under-line", str(LEAST_COVERED_LINES)),
    )  # fmt: skip


def machine_code(log: Log) -> None:
    (module,) = (BUILD / "cuda" / "csrc" / "cuda").glob("_cuda*.so")
    log.command(sys.executable, "benchmarks/check_sass.py", module)
    # Without a driver: it is there in an instant, and the first launch says what is missing.
    log.command(sys.executable, "-c", IMPORTS_ALONE, module)


IMPORTS_ALONE = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("_cuda", sys.argv[1])
start = time.perf_counter()
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(f"imported in {1e3 * (time.perf_counter() - start):.1f} ms; {module.build_info()}")
assert "torch" not in sys.modules
needed = {line.split("[")[1].rstrip("]") for line in __import__("subprocess").run(
    ["readelf", "-d", sys.argv[1]], check=True, capture_output=True, text=True
).stdout.splitlines() if "NEEDED" in line}
print("needs", sorted(needed))
assert all(name.startswith(("libc.", "libm.", "libdl.", "librt.", "libpthread.", "ld-linux"))
           for name in needed), needed
import glob
if not glob.glob("/dev/nvidiactl"):
    try:
        module.gelu_forward(0, 0, 1, False, module.FLOAT32, 0, 0)
    except RuntimeError as error:
        print(error)
        assert "driver" in str(error) or "device" in str(error)
    else:
        raise SystemExit("a launch without a driver must fail")
"""

VARIANTS = {
    "address_sanitizer": ("cuda_emulator_address", "-DANYCHIP_CUDA_SANITIZE=address,undefined"),
    "thread_sanitizer": ("cuda_emulator_thread", "-DANYCHIP_CUDA_SANITIZE=thread"),
    "coverage": ("cuda_emulator_coverage", "-DANYCHIP_CUDA_COVERAGE=ON"),
}
STEPS: Sequence[Step] = (
    Step("forward", "unit tests, threads in order", forward_order),
    Step("random", "unit tests, threads in a random order", random_order),
    Step("warp", "unit tests, one warp as far ahead as it may", warp_order),
    Step("conformance", "conformance suite of cuda-emulated, level quick", conformance),
    Step(
        "seeded_bugs", "mistakes in the kernels are found by their tests", seeded_bugs, alone=True
    ),
    Step("address_sanitizer", "unit tests with ASan and UBSan", address_sanitizer),
    Step("thread_sanitizer", "sample calls with TSan", thread_sanitizer),
    Step("coverage", f"unit tests run {LEAST_COVERED_LINES} % of the lines", coverage),
    Step("machine_code", "nvcc's code: registers, spills, 16-byte accesses", machine_code),
)


def steps_of(asked: slices.Slice) -> list[str]:
    """The names of the steps of a slice: of those with a build of their own, one in turn."""
    names = [step.name for step in STEPS]
    if asked.number is None:
        return names
    in_turn = list(VARIANTS)
    left_out = set(in_turn) - {in_turn[asked.number % len(in_turn)]}
    return [name for name in names if name not in left_out]


def sampled_operators(asked: slices.Slice) -> list[str] | None:
    """Operators whose samples TSan watches: a third at each turn of it; None: all of them."""
    if asked.number is None:
        return None
    turns, turn = len(VARIANTS), asked.number // len(VARIANTS)
    cases = {spec.name: f"cuda_emulated/samples/{spec.name}" for spec in operators.all_specs()}
    return [
        name for name, case in cases.items()
        if slices.slice_of(case) % turns == turn % turns or case in asked.always
    ]  # fmt: skip


def build_all(names: Sequence[str], jobs: int) -> None:
    """What the chosen steps need, one build after the other on all cores."""
    build(Log("build_cuda_emulator", jobs), "cuda_emulator")
    for name in names:
        if name in VARIANTS:
            folder, option = VARIANTS[name]
            build(Log(f"build_{folder}", jobs), folder, option)
    if "machine_code" in names:
        build(Log("build_cuda", jobs), "cuda", cuda=True)


def try_step(step: Step, jobs: int) -> tuple[str | None, float]:
    """Runs one step; returns what went wrong, or None, and the seconds it took."""
    start = time.monotonic()
    log, problem = Log(step.name, jobs), None
    try:
        step.run(log)
    except logs.CommandError as error:
        problem = str(error)
    took = time.monotonic() - start
    print(
        f"{'FAILED' if problem else 'passed'} {step.name} ({took:.0f} s): {step.says}", flush=True
    )
    if problem:
        print(f"  {problem}; the end of {log.path.relative_to(ROOT)}:")
        print(*(f"  | {line}" for line in log.path.read_text().splitlines()[-40:]), sep="\n")
    return problem, took


def main() -> int:
    """The command line."""
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_emulated")
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    try:
        asked = slices.chosen()
    except slices.SliceError as error:
        parser.error(str(error))
    only = given.only or steps_of(asked)
    print(f"{asked}: {', '.join(only)}", flush=True)
    start = time.monotonic()
    try:
        build_all(only, given.jobs)
    except logs.CommandError as error:
        print(f"FAILED to build: {error}; see {LOGS.relative_to(ROOT)}")
        return 1
    built = time.monotonic() - start
    chosen = sorted((step for step in STEPS if step.name in only), key=lambda step: step.alone)
    with ThreadPoolExecutor(given.jobs) as pool:
        beside = [step for step in chosen if not step.alone]
        results = list(pool.map(lambda step: try_step(step, given.jobs), beside))
    results += [try_step(step, given.jobs) for step in chosen if step.alone]
    failed = [step.name for step, (problem, _) in zip(chosen, results, strict=True) if problem]
    print(budgets.table({"cuda/build": built, "cuda/steps": time.monotonic() - start - built}))
    print(f"{len(chosen) - len(failed)} of {len(chosen)} steps passed", *failed, sep=", failed: ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
