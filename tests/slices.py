"""Which thirty-seventh of the large families of cases does this commit run?

Families that are grids (operators by dtypes by sizes, the catalogue of wrong backends, seeded
mistakes, rows of a chip) are asked in full by ``make test-all``. A commit asks one slice of them:
a case belongs to slice ``stable_hash(id) mod 37``, and commit n (counted along first parents) runs
slice ``n mod 37``, so that 37 consecutive commits ask everything. A case that has failed once
stands in ``tests/failed_before.txt`` and is asked by every commit. Cases that share what is dear,
like a job of ranks, are marked ``grid("its name")`` and are of one slice. Of tests that take
long, whose ids begin as a line of ``tests/long.txt`` does, a slice asks
the sixth of its number mod 6: six commits ask all, or seven where slices begin anew.

``ANYCHIP_SLICE`` (0 to 36, or ``all``) overrides the count, and must be set where there is no
history to count: in an unpacked archive, or in a shallow clone.
"""

import hashlib
import json
import os
import subprocess
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAILED_BEFORE = Path(__file__).with_name("failed_before.txt")
LONG_TESTS = Path(__file__).with_name("long.txt")
SLICES, PARTS = 37, 6
"""Of grids, and of what takes long."""
VARIABLE = "ANYCHIP_SLICE"
LONG_CHAPTERS = ("streams/", "optimizer/", "zero/", "pipeline/", "training/", "errors/")
"""Of an emulated chip a commit asks a sixth."""


_NO_HISTORY = (
    "there is no git history here to count commits in: set"
    f" {VARIABLE} to 0 to {SLICES - 1} or 'all'"
)


class SliceError(Exception):
    """Which slice to run cannot be told; the message says what to set."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """What is asked of the grids.

    Attributes:
        number: the slice, or None for all of them.
        because: where the number comes from, for people.
        always: ids of cases that every slice asks.
    """

    number: int | None
    because: str
    always: Collection[str] = field(default_factory=frozenset)

    def takes(self, case: str, of: str = "", parts: int = SLICES) -> bool:
        """Whether a case is asked, by its id; cases ``of`` one thing are of one of the parts."""
        mine = self.number is None or slice_of(of or case, parts) == self.number % parts
        return mine or case in self.always

    def __str__(self) -> str:
        what = "all slices" if self.number is None else f"slice {self.number} of {SLICES}"
        return f"{what} ({self.because})"


def slice_of(case: str, parts: int = SLICES) -> int:
    """The slice of a case: the same in every process, on every machine and Python."""
    digest = hashlib.blake2b(case.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % parts


def chosen(environment: Mapping[str, str] = os.environ, root: Path = ROOT) -> Slice:
    """The slice that the environment asks for, else that of the commit.

    Raises:
        SliceError: the variable is malformed, or there is no history and no variable.
    """
    always = frozenset(listed(FAILED_BEFORE))
    asked = environment.get(VARIABLE)
    if asked is None:
        count = _first_parents(root)
        return Slice(number=count % SLICES, because=f"commit {count}", always=always)
    if asked == "all":
        return Slice(number=None, because=f"{VARIABLE}=all", always=always)
    if asked not in map(str, range(SLICES)):
        raise SliceError(f"{VARIABLE}: expected 0 to {SLICES - 1} or 'all', got {asked!r}")
    return Slice(number=int(asked), because=f"{VARIABLE}={asked}", always=always)


def listed(path: Path) -> list[str]:
    """The ids of a file, one a line; a line that begins with ``#`` is for people."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def remember(cases: Iterable[str]) -> list[str]:
    """Adds cases that have failed to the file; returns those that were not in it."""
    new = sorted(set(cases) - set(listed(FAILED_BEFORE)))
    if new:
        with FAILED_BEFORE.open("a", encoding="utf-8") as file:
            file.writelines(f"{case}\n" for case in new)
    return new


def suite_words(asked: Slice, family: str, report: Path) -> list[str]:
    """Arguments of ``anychip conformance``: operators of a slice, long chapters by turn, all else.

    A case of the grid is an operator here, ``<family>/<name>``, or a world of several ranks.
    """
    from anychip.operators import all_specs

    words = ["--level", "quick", "--json", str(report)]
    if asked.number is not None:
        names = [spec.name for spec in all_specs() if asked.takes(f"{family}/{spec.name}")]
        # A world of ranks that each emulate a device takes minutes, a chapter half of one.
        parts = {"collectives/3/": SLICES, "collectives/4/": SLICES, "collectives/2/": PARTS}
        parts |= dict.fromkeys(LONG_CHAPTERS, PARTS)
        left_out = [c for c, n in parts.items() if not asked.takes(f"{family}/{c}", parts=n)]
        others = f"not ({' or '.join(['operators/', 'gradients/', *left_out])})"
        words += ["-k", " or ".join([others, *(f"/{name}/" for name in names)])]
    return words


def part_of_operators(asked: Slice) -> list[str]:
    """Arguments of ``anychip conformance``: a sixth of the operators, and every other question."""
    from anychip.operators import all_specs

    names = (s.name for s in all_specs() if asked.takes(f"cpu/conformance/{s.name}", parts=PARTS))
    words = ["not (operators/ or gradients/)", *(f"/{name}/" for name in names)]
    return ["--level", "quick", "-k", " or ".join(words)]


def operators_that_failed(family: str, report: Path) -> list[str]:
    """The cases of the grid with failures in a report that ``suite_words`` has asked for."""
    results = json.loads(report.read_text(encoding="utf-8"))["results"] if report.exists() else []
    failed = {
        result["case"].split("/")[1] for result in results
        if result["outcome"] == "failed" and result["case"].startswith(("operators/", "gradients/"))
    }  # fmt: skip
    return [f"{family}/{name}" for name in sorted(failed)]


def _first_parents(root: Path) -> int:
    """How many commits the first-parent history of HEAD has."""
    if Path(_git(root, "rev-parse", "--show-toplevel")) != root.resolve():
        raise SliceError(_NO_HISTORY)
    if _git(root, "rev-parse", "--is-shallow-repository") == "true":
        raise SliceError(
            f"this clone is shallow, so that its commits cannot be counted: set {VARIABLE} to 0 to"
            f" {SLICES - 1} or 'all', or git fetch --unshallow"
        )
    return int(_git(root, "rev-list", "--count", "--first-parent", "HEAD"))


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise SliceError(_NO_HISTORY) from None
