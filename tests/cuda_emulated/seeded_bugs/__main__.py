"""Puts mistakes into the CUDA kernels, one at a time, and demands that the kernels' tests fail.

    python -m tests.cuda_emulated.seeded_bugs --build build/cuda_emulated [--only PATTERN] [--slice]

Each table ``<family>.toml`` lists mistakes by name, as textual changes of one file. The changed
kernel is compiled as the build did it, and linked with everything else of that build; the tests of
the family then run on the changed module, in the order of threads that the table names. Exit status
1 when a mistake is not found, or when its text is not in the file any more.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tomlkit
from rich.console import Console
from rich.table import Table

from tests import slices, warm_python
from tests.cuda_emulated import sanitizers

ROOT = Path(__file__).parents[3]
TABLES = Path(__file__).parent
MODULE = f"_emu{sysconfig.get_config_var('EXT_SUFFIX')}"
SANITIZED = {"": "", "address,undefined": "_address", "thread": "_thread"}
"""What the name of a build's folder ends with, by the sanitizer of a mistake."""
REPORTS = ("runtime error: ", "ERROR: AddressSanitizer: ", "WARNING: ThreadSanitizer: ")
"""With what a sanitizer says what it has found; it ends the process then, and pytest with it."""
SECONDS = 300
"""What the tests of one mistake may take: an endless loop in a kernel is found by this."""


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One mistake; the fields are those of the tables, where a comment says what it stands for.

    Attributes:
        by: what stands in place of ``replace``; empty: nothing.
        file: where ``replace`` stands; empty: the family's kernel, or else the file that has it.
        kernel: the file of ``kernels`` that is compiled with it; empty: the family's.
    """

    family: str
    name: str
    replace: str
    found_by: str
    by: str = ""
    file: str = ""
    order: str = "forward"
    sanitizer: str = ""
    kernel: str = ""

    @property
    def id(self) -> str:
        """By what it is known among the cases of grids."""
        return f"cuda_emulated/seeded_bugs/{self.family}/{self.name}"


@dataclass(frozen=True)
class Verdict:
    """Whether the tests saw a mistake, and the line that says how."""

    bug: Bug
    found: bool
    how: str


def read_tables() -> list[Bug]:
    """Every mistake of every table.

    Raises:
        ValueError: two mistakes have one name.
    """
    bugs = []
    for path in sorted(TABLES.glob("*.toml")):
        tables = tomlkit.parse(path.read_text()).unwrap()
        usual = {key: tables.pop(key) for key in ("found_by",) if key in tables}
        bugs += [Bug(family=path.stem, name=n, **usual | table) for n, table in tables.items()]
    names = [bug.name for bug in bugs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two seeded bugs are named {name!r}")
    return bugs


def changed(bug: Bug) -> tuple[Path, str]:
    """The file of ``bug``, and its text with the mistake in it.

    Raises:
        ValueError: the text to replace is not there exactly once.
    """
    own = ROOT / (bug.file or f"csrc/cuda/kernels/{bug.family}.cu")
    others = [] if bug.file else sorted((ROOT / "csrc" / "cuda").rglob("*.*"))
    files = [own] if bug.replace in own.read_text() else others
    places = [path for path in files for _ in range(path.read_text().count(bug.replace))]
    if len(places) != 1:
        raise ValueError(f"{bug.name}: csrc/cuda has its text {len(places)} times, not once")
    return places[0], places[0].read_text().replace(bug.replace, bug.by)


def build(bug: Bug, build_folder: Path, work: Path) -> Path:
    """The emulated module with the mistake in it.

    A changed copy of ``csrc/cuda`` comes first on the include path, so that a mistake in a header
    is in the family's kernels too.
    """
    copy = work / "csrc" / "cuda"
    subprocess.run(["cp", "-r", str(ROOT / "csrc" / "cuda"), str(copy.parent)], check=True)
    path, text = changed(bug)
    (work / path.relative_to(ROOT)).write_text(text)
    commands = json.loads((build_folder / "compile_commands.json").read_text())
    own = {path: words for path, words in map(_compilation, commands) if "/cuda/CMake" in path}
    kernel = bug.kernel or bug.family
    original = next(path for path in own if path.endswith(f"emulated/{kernel}.cpp.o"))
    wrapper, made = work / "kernel.cpp", work / "kernel.o"
    wrapper.write_text(f'#include "{copy}/kernels/{kernel}.cu"\n')
    words = [word.replace(str(ROOT / "csrc" / "cuda"), str(copy)) for word in own[original]]
    words[words.index("-o") + 1] = str(made)
    words[words.index("-c") + 1] = str(wrapper)
    words = [w for w in words if not w.startswith("-M")]
    words = [w for i, w in enumerate(words) if i == 0 or not w.endswith((".o.d", ".cpp.o"))]
    sanitize = [w for w in words if w.startswith("-fsanitize")]
    _run(words, cwd=build_folder)
    linked = [made if path == original else build_folder / path for path in own]
    linked += sorted((build_folder / "tests" / "native" / "cuda_emulator").glob("*.a"))
    module = work / MODULE
    _run(
        [words[0], "-shared", "-pthread", *sanitize, "-o", str(module), *map(str, linked)], cwd=work
    )
    return module


def _compilation(entry: dict[str, str]) -> tuple[str, list[str]]:
    """What an entry of compile_commands.json writes, and its words; older CMake does not say."""
    words = shlex.split(entry["command"])
    if Path(words[0]).name == "ccache":
        del words[0]
    return words[words.index("-o") + 1], words


def try_bug(bug: Bug, plain_build: Path) -> Verdict:
    """Builds the mistake and runs the family's tests on it."""
    build_folder = plain_build.with_name(plain_build.name + SANITIZED[bug.sanitizer])
    if not build_folder.is_dir():
        return Verdict(bug, False, f"{build_folder.name} is not built: make test-cuda builds it")
    with tempfile.TemporaryDirectory(prefix="seeded_bug_") as folder:
        (Path(folder) / "csrc").mkdir()
        try:
            module = build(bug, build_folder, Path(folder))
        except (ValueError, RuntimeError) as error:
            return Verdict(bug, False, str(error))
        environment = {
            **os.environ, "ANYCHIP_CUDA_EMULATED": str(module), "ANYCHIP_EMULATOR_ORDER": bug.order,
            "OMP_NUM_THREADS": "1", **sanitizers.environment(bug.sanitizer),
        }  # fmt: skip
        tests = ROOT / "tests" / "unit" / "backends_cuda" / f"test_{bug.family}.py"
        words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        words += ["-k", f"({bug.found_by}) and emulated", str(tests)]
        try:
            if bug.sanitizer:  # it has to be there when the process starts
                done = subprocess.run(
                    [sys.executable, *words, "-s"],  # its report is the last that the process says
                    cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS,
                )  # fmt: skip
            else:
                done = warm_python.run(*words, cwd=ROOT, env=environment, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return Verdict(bug, True, f"the tests do not end within {SECONDS} s")
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 1 and lines:
        return Verdict(bug, True, lines[0].removeprefix("FAILED ")[:160])
    reports = [line for line in done.stderr.splitlines() if any(s in line for s in REPORTS)]
    if bug.sanitizer and done.returncode and reports:
        return Verdict(bug, True, reports[0].strip()[-160:])
    if done.returncode < 0:
        return Verdict(bug, True, f"the tests end by signal {-done.returncode}")
    last = done.stdout.splitlines()[-1] if done.stdout else done.stderr[-200:]
    return Verdict(bug, False, f"pytest ends with {done.returncode}: {last}")


def _run(words: list[str], cwd: Path) -> None:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(words[:1])} fails: {done.stderr[-500:]}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_emulated.seeded_bugs")
    parser.add_argument("--build", type=Path, required=True, help="folder of the emulated build")
    parser.add_argument("--only", default="", help="mistakes whose name contains this")
    parser.add_argument("--slice", action="store_true", help="this commit's thirty-seventh of them")
    parser.add_argument("--plain", action="store_true", help="those that need no sanitizer")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    bugs = [bug for bug in read_tables() if given.only in bug.name]
    bugs = [bug for bug in bugs if not (given.plain and bug.sanitizer)]
    if given.slice:
        asked = slices.chosen()
        # Those of a sanitizer have their turn where its build has.
        bugs = [bug for bug in bugs if bug.sanitizer or asked.takes(bug.id)]
    if not bugs:
        parser.error(f"no seeded bug has a name with {given.only!r}")
    console = Console()
    with ThreadPoolExecutor(given.jobs) as pool:
        verdicts = []
        for verdict in pool.map(lambda bug: try_bug(bug, given.build.resolve()), bugs):
            verdicts.append(verdict)
            console.print(
                f"{'found ' if verdict.found else 'MISSED'} {verdict.bug.name}: {verdict.how}",
                markup=False,
                highlight=False,
            )
    table = Table("family", "found", "of", box=None)
    for family in sorted({v.bug.family for v in verdicts}):
        own = [v for v in verdicts if v.bug.family == family]
        table.add_row(family, str(sum(v.found for v in own)), str(len(own)))
    console.print(table)
    missed = [v.bug.id for v in verdicts if not v.found]
    for case in slices.remember(missed) if given.slice else []:
        print(f"added to {slices.FAILED_BEFORE.name}; commit it: {case}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
