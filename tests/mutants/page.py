"""Writes docs/mutants.md: what was tried, what killed it, and what nothing can kill."""

import datetime
import platform
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from importlib.metadata import version
from pathlib import Path

import anychip
from tests.mutants.campaign import Verdict
from tests.mutants.generation import Identity, Mutant
from tests.mutants.sample import BACKENDS, backend_of
from tests.mutants.subjects import ROOT
from tests.mutants.trial import Outcome

PAGE = ROOT / "docs" / "mutants.md"
START, END = "<!-- written by make mutants -->", "<!-- end -->"


def write(
    every: Sequence[Mutant], verdicts: Sequence[Verdict[Mutant]], listed: Collection[Identity],
    seed: int, path: Path = PAGE,
) -> None:  # fmt: skip
    """Puts the tables between the two marks of the page."""
    put(tables(every, verdicts, listed, seed), path, START)


def put(made: str, path: Path, start: str) -> None:
    """Replaces what stands on a page between a mark and the end of what a run writes."""
    head, rest = path.read_text(encoding="utf-8").split(start, 1)
    _, tail = rest.split(END, 1)
    path.write_text(f"{head}{start}\n\n{made}\n\n{END}{tail}", encoding="utf-8")


def tables(
    every: Sequence[Mutant], verdicts: Sequence[Verdict[Mutant]], listed: Collection[Identity],
    seed: int,
) -> str:  # fmt: skip
    """All that is said of a run, in Markdown."""
    count = Count(verdicts, listed)
    parts = [
        f"anychip {anychip.__version__}, {datetime.date.today()}, torch {version('torch')}, "
        f"mutmut {version('mutmut')}, Python {platform.python_version()}, seed {seed}. "
        f"**{count.killed} of {count.tried - count.equivalent} mutants that can be told apart are "
        f"killed: {count.rate:.1f} %.** {len(every)} exist, {count.tried} were tried, "
        f"{count.equivalent} of these ({100 * count.equivalent / max(count.tried, 1):.1f} %) are "
        f"listed as equivalent, {count.survived} survived.",
        _by_class(every, verdicts, listed), _by_operator(verdicts, listed), _by_chapter(verdicts),
        _by_file(verdicts, listed), _survivors(verdicts, listed),
    ]  # fmt: skip
    return "\n\n".join(parts)


class Count:
    """How many of some verdicts are what."""

    def __init__(self, verdicts: Sequence[Verdict[Mutant]], listed: Collection[Identity]) -> None:
        left = [v for v in verdicts if v.survived]
        self.tried = len(verdicts)
        self.equivalent = sum(v.mutant.identity in listed for v in left)
        self.survived = len(left) - self.equivalent
        self.killed = self.tried - len(left)

    @property
    def rate(self) -> float:
        """Killed of those that are not equivalent, in percent."""
        return 100.0 * self.killed / max(self.killed + self.survived, 1)

    def cells(self) -> tuple[str, ...]:
        """Tried, killed, equivalent, survived, rate."""
        numbers = (self.tried, self.killed, self.equivalent, self.survived)
        return (*map(str, numbers), f"{self.rate:.1f} %")


def _by_class(
    every: Sequence[Mutant], verdicts: Sequence[Verdict[Mutant]], listed: Collection[Identity]
) -> str:
    exist = Counter((backend_of(m), m.kind) for m in every)
    rows = []
    for backend in BACKENDS:
        for kind in sorted({m.kind for m in every}):
            of = [v for v in verdicts if (backend_of(v.mutant), v.mutant.kind) == (backend, kind)]
            cells = Count(of, listed).cells()
            rows.append((backend, kind, str(exist[backend, kind]), *cells))
    rows.append(("all", "", str(len(every)), *Count(verdicts, listed).cells()))
    return table(("backend", "class of mistake", "exist", *COLUMNS), rows)


COLUMNS = ("tried", "killed", "equivalent", "survived", "rate")


def _by_operator(verdicts: Sequence[Verdict[Mutant]], listed: Collection[Identity]) -> str:
    return _grouped("mutation operator", lambda v: v.mutant.operator, verdicts, listed)


def _by_file(verdicts: Sequence[Verdict[Mutant]], listed: Collection[Identity]) -> str:
    return _grouped("file", lambda v: f"`{v.mutant.file}`", verdicts, listed)


def _grouped(
    head: str, key: Callable[[Verdict[Mutant]], str], verdicts: Sequence[Verdict[Mutant]],
    listed: Collection[Identity],
) -> str:  # fmt: skip
    rows = [
        (name, *Count([v for v in verdicts if key(v) == name], listed).cells())
        for name in sorted({key(v) for v in verdicts})
    ]
    return table((head, *COLUMNS), rows)


def _by_chapter(verdicts: Sequence[Verdict[Mutant]]) -> str:
    """Which chapter killed, at which level, and by what: a value, or something that stopped."""
    killed = [v for v in verdicts if not v.survived]
    ways: tuple[Outcome, ...] = ("value", "exception", "import", "crash", "hang")
    rows = []
    for chapter in sorted({v.chapter for v in killed}):
        of = [v for v in killed if v.chapter == chapter]
        outcomes = Counter(v.answer.outcome for v in of)
        full = sum(v.level == "full" for v in of)
        rows.append((chapter, str(len(of)), str(full), *(str(outcomes[way]) for way in ways)))
    heads = ("killed by chapter", "mutants", "at level full alone", "wrong value or rule",
             "exception", "at import", "crash", "hang")  # fmt: skip
    return table(heads, rows)


def _survivors(verdicts: Sequence[Verdict[Mutant]], listed: Collection[Identity]) -> str:
    left = [v.mutant for v in verdicts if v.survived and v.mutant.identity not in listed]
    rows = [
        (f"`{m.id}`", f"`{m.file}`", m.function, f"`` {m.change.replace('|', '&#124;')} ``")
        for m in left
    ]
    return table(("survived", "file", "function", "change"), rows)


def published_survivors(path: Path = PAGE) -> set[str]:
    """The ids of mutants that the page says survived."""
    return set(re.findall(r"^\| `([0-9a-f]{10})` \|", path.read_text("utf-8"), re.MULTILINE))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def published(path: Path = PAGE) -> tuple[str, float, int, int, int]:
    """Of the page: anychip's version, the rate in percent, tried, equivalent, survived."""
    text = path.read_text(encoding="utf-8")
    release = re.search(r"^anychip (\S+),", text, re.MULTILINE)
    total = re.search(
        r"^\| all \|  \| \d+ \| (\d+) \| \d+ \| (\d+) \| (\d+) \| ([\d.]+) % \|$",
        text,
        re.MULTILINE,
    )
    if release is None or total is None:
        raise ValueError(f"{path} has no table of a run; make mutants writes it")
    tried, equivalent, survived, rate = total.groups()
    return release[1], float(rate), int(tried), int(equivalent), int(survived)
