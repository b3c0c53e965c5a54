"""Which slice of the grids finds a mistake that was mended once, and comes back?

Undoes the fixes of ``reverted_fixes.toml`` one by one, in a worktree of its own with an
environment of its own, and runs the tests that are nearest to each, all slices of them. What fails
is asked again without the mistake and has to pass then. A test that is no case of a grid runs in
every commit and finds the mistake at once; a case of a grid in its slice (tests/slices.py).

    python benchmarks/reverted_fixes.py [--only NAME] [--json]

Uncommitted changes take no part. Exits with 1 when ten slices do not find every fix, or the first
of them, whichever that is, less than 90 %. Compiled code is not built again: mistakes in kernels
are those of tests/cuda_emulated/seeded_bugs and tests/native.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests import slices  # noqa: E402 - found by the line above

TABLE = Path(__file__).with_suffix(".toml")
SOURCES = ("core", "backends", "examples")
COMPILED = ("anychip.comm._heartbeat", "anychip.dispatch._native", "anychip_cpu._native")
"""Modules that a checkout has after it was built."""
FAILURES = "REVERTED_FIXES_FAILURES"
"""Variable with the file to which pytest, of which this module is a plugin then, adds failures."""
LIMIT_S = 1200.0
BY_THE_FIRST = 0.9


class Fix(NamedTuple):
    """A fix, and the change that undoes it; the fields are those of the table."""

    name: str
    commit: str
    mended: str
    replace: str
    by: str
    asks: list[str]


class Found(NamedTuple):
    """What failed while a fix was undone.

    Attributes:
        by: a test, one that every commit runs if there is one; empty: none.
        slices: that find it.
    """

    fix: Fix
    by: str
    slices: list[int]


def read_fixes() -> list[Fix]:
    """The table."""
    tables = tomlkit.parse(TABLE.read_text(encoding="utf-8")).unwrap()
    return [Fix(name=name, **table) for name, table in tables.items()]


def file_of(fix: Fix, root: Path = ROOT) -> Path:
    """Where the text of a fix is.

    Raises:
        ValueError: nowhere, or at several places.
    """
    files = [path for folder in SOURCES for path in (root / folder).rglob("*.py")]
    files = [path for path in files if "build" not in path.relative_to(root).parts]
    places = [path for path in files for _ in range(path.read_text("utf-8").count(fix.replace))]
    if len(places) != 1:
        names = ", ".join(str(path.relative_to(root)) for path in places) or "no file"
        raise ValueError(f"{fix.name}: its text must be in one place, and is in {names}")
    return places[0]


def pytest_runtest_logreport(report: Any) -> None:
    """A hook of pytest, in the processes that this program starts."""
    if report.failed:
        _note(report.nodeid, is_grid="grid" in report.keywords)


def pytest_runtest_teardown(item: Any) -> None:
    """When a test has failed that every commit runs, no slice is left to be looked for."""
    if any(not is_grid for is_grid in _noted().values()):
        item.session.shouldstop = "every slice finds it"


def pytest_collectreport(report: Any) -> None:
    """The same for a file that cannot be imported, which fails in every slice."""
    if report.failed:
        _note(report.nodeid, is_grid=False)


def _note(case: str, *, is_grid: bool) -> None:
    with Path(os.environ[FAILURES]).open("a", encoding="utf-8") as file:
        file.write(json.dumps([case, is_grid]) + "\n")


def _noted() -> dict[str, bool]:
    """Tests that have failed: id, and whether it is a case of a grid."""
    return dict(map(json.loads, Path(os.environ[FAILURES]).read_text("utf-8").splitlines()))


@contextmanager
def checkout() -> Iterator[Path]:
    """A worktree of HEAD with what was compiled here, and ``env/bin/python`` to run it.

    The environment has the packages of this one, but not what installs anychip in place.
    """
    with tempfile.TemporaryDirectory(prefix="reverted_fixes") as folder:
        tree, env = Path(folder) / "tree", Path(folder) / "env"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree)], check=True)
        try:
            for name in COMPILED:
                spec = importlib.util.find_spec(name)
                if spec is not None and spec.origin is not None:
                    package, _, _ = name.rpartition(".")
                    parent = next(tree.glob(f"*/**/{package.replace('.', '/')}/__init__.py")).parent
                    shutil.copy(spec.origin, parent)
            venv.create(env, symlinks=True)
            site = Path(sysconfig.get_path("purelib", vars={"base": str(env)}))
            roots = [tree / "core", *sorted((tree / "backends").iterdir())]
            paths = [*map(str, roots), sysconfig.get_path("purelib")]
            (site / "this.pth").write_text("\n".join(paths))
            shutil.copy(__file__, site)
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def failures(tree: Path, words: Sequence[str]) -> dict[str, bool]:
    """Tests that fail in a tree: id, and whether it is a case of a grid.

    Raises:
        RuntimeError: pytest ends with something else, such as no test.
    """
    record = tree.parent / "failures"
    record.write_text("")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ANYCHIP_", "PYTHON"))}
    environment |= {FAILURES: str(record), "OMP_NUM_THREADS": "1"}
    command = [str(tree.parent / "env" / "bin" / "python"), "-m", "pytest", "-q"]
    command += ["-p", "no:cacheprovider", "-p", Path(__file__).stem, *words]
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    found = dict(map(json.loads, record.read_text("utf-8").splitlines()))
    if done.returncode not in (0, 1) and not found:
        raise RuntimeError(f"pytest ends with {done.returncode}: {done.stdout[-1000:]}")
    return found


def attempt(fix: Fix, tree: Path) -> Found:
    """Undoes a fix, asks its tests, and puts it back."""
    path = file_of(fix, tree)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fix.replace, fix.by), encoding="utf-8")
    try:
        failed = failures(tree, fix.asks)
    finally:
        path.write_text(text, encoding="utf-8")
    if failed:
        # Cases of the suite can be asked by what selects them only.
        again = fix.asks if "--pyargs" in fix.asks else list(failed)
        for case in failures(tree, again):
            failed.pop(case, None)
    always = [c for c, is_grid in failed.items() if not is_grid or c in slices.failed_before()]
    numbers = range(slices.SLICES) if always else {slices.slice_of(case) for case in failed}
    return Found(fix, next(iter(always or failed), ""), sorted(numbers))


def share(found: Sequence[Found]) -> float:
    """Of the fixes, what one slice finds: the mean over all of them."""
    return sum(len(each.slices) for each in found) / (slices.SLICES * len(found))


def row(found: Found) -> str:
    """A line of the table."""
    numbers = ", ".join(map(str, found.slices))
    where = "every" if len(found.slices) == slices.SLICES else numbers or "**none**"
    by = f"`{found.by}`" if found.by else "-"
    return f"| {found.fix.commit} | {found.fix.mended} | {where} | {by} |"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", default="", help="fixes whose names contain one of these, with commas"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    options = parser.parse_args()
    fixes = [
        fix for fix in read_fixes() if any(name in fix.name for name in options.only.split(","))
    ]
    if not fixes:
        parser.error(f"no fix has a name with {options.only!r}")
    found = []
    if not options.json:
        print("| commit | what it mended | slices that find it | by |\n|---|---|---|---|")
    with checkout() as tree:
        for fix in fixes:
            found.append(each := attempt(fix, tree))
            if not options.json:
                print(row(each), flush=True)
    whole, first = sum(bool(each.slices) for each in found), share(found)
    if options.json:
        listed = [{**each._asdict(), "fix": each.fix._asdict()} for each in found]
        print(json.dumps({"within_ten": whole, "by_the_first": first, "fixes": listed}, indent=2))
    else:
        print(f"\nFound within ten slices: {whole} of {len(found)}; by the first: {first:.1%}.")
    return 0 if whole == len(found) and first >= BY_THE_FIRST else 1


if __name__ == "__main__":
    sys.exit(main())
