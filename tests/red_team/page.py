"""Writes docs/red-team.md: what was tried, what found it, and what nobody has found."""

import datetime
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import tomlkit

import anychip
from tests.mutants.campaign import Verdict
from tests.mutants.page import put, table
from tests.mutants.subjects import ROOT
from tests.red_team.mistake import Mistake
from tests.red_team.reach import Reach

PAGE = ROOT / "docs" / "red-team.md"
START = "<!-- written by make red-team -->"
REASONS = Path(__file__).with_name("reasons.toml")
LEAST_QUICK, LEAST_FULL = 97.0, 99.0
"""Percent of the mistakes with one or two conditions."""


class Reasons(NamedTuple):
    """By id: why a mistake is none; why one survives."""

    equivalent: Mapping[str, str]
    survives: Mapping[str, str]


def reasons(path: Path = REASONS) -> Reasons:
    """What was found out by hand."""
    return Reasons(**tomlkit.parse(path.read_text(encoding="utf-8")).unwrap())


class Count:
    """How many of some verdicts were found at which level; equivalent ones do not count."""

    def __init__(self, verdicts: Sequence[Verdict[Mistake]]) -> None:
        none = reasons().equivalent
        counted = [v for v in verdicts if v.mutant.id not in none]
        self.tried = len(counted)
        self.full = sum(not v.survived for v in counted)
        self.quick = sum(not v.survived and v.level == "quick" for v in counted)

    def rates(self) -> tuple[float, float]:
        """Found at quick, and by both levels, in percent."""
        of = max(self.tried, 1)
        return 100.0 * self.quick / of, 100.0 * self.full / of

    def cells(self) -> tuple[str, ...]:
        """For a table."""
        quick, full = self.rates()
        return (str(self.tried), str(self.tried - self.full), f"{quick:.1f} %", f"{full:.1f} %")


def group(mistake: Mistake) -> str:
    """What a mistake is in: rows of a direction, or a part of a backend."""
    where, what = mistake.target
    return f"rows, {what}" if what in ("forward", "backward") else where


def exactness(mistake: Mistake) -> str:
    """Whether an option has to be one number of all, to which only who tries it comes."""
    options = [c.number for c in mistake.conditions if (c.measure, c.comparison) == ("{}", "==")]
    numbers = [n for n in options if isinstance(n, (int, float, list)) and not isinstance(n, bool)]
    return "one number alone" if numbers else "others"


def tables(verdicts: Sequence[Verdict[Mistake]], discarded: Counter[str], seed: int) -> str:
    """All that is said of a run, in Markdown."""
    quick, full = Count(verdicts).rates()
    left_out = "; ".join(f"{count}: {reason}" for reason, count in discarded.most_common())
    by_chapter = Counter(v.chapter for v in verdicts if not v.survived)
    return "\n\n".join((
        f"anychip {anychip.__version__}, {datetime.date.today()}, seed {seed}. **{quick:.1f} % of "
        f"{Count(verdicts).tried} are found at level quick, {full:.1f} % with level full.** Left "
        f"out while drawing: {left_out or 'none'}.",
        _grouped("conditions", lambda m: (str(len(m.conditions)),), verdicts),
        _grouped("place", lambda m: (group(m),), verdicts),
        _grouped("backend", lambda m: (m.backend,), verdicts),
        _grouped("an option is", lambda m: (exactness(m),), verdicts),
        table(("found by chapter", "mistakes"), [(c, str(n)) for c, n in by_chapter.most_common()]),
        _grouped("condition", lambda m: {c.kind for c in m.conditions}, verdicts),
        _grouped("effect", lambda m: (m.effect.kind,), verdicts),
        _survivors(verdicts),
    ))  # fmt: skip


def reached(come: Reach, mistakes: Sequence[Mistake]) -> str:
    """To how many mistakes in rows a case of level quick comes, and which ones are left."""
    known = [m for m in mistakes if m.id in come]
    rows = []
    for number in sorted({len(m.conditions) for m in known}):
        such = [bool(come[m.id]) for m in known if len(m.conditions) == number]
        rows.append((str(number), str(len(such)), f"{100.0 * sum(such) / len(such):.1f} %"))
    left = [f"no case comes to {m}" for m in known if not come[m.id]]
    return "\n".join((*left, "", table(("conditions", "in rows", "reached"), rows)))


def _grouped(
    head: str, keys: Callable[[Mistake], object], verdicts: Sequence[Verdict[Mistake]]
) -> str:
    groups: dict[str, list[Verdict[Mistake]]] = {}
    for verdict in verdicts:
        for key in keys(verdict.mutant):  # type: ignore[attr-defined]
            groups.setdefault(key, []).append(verdict)
    rows = [(key, *Count(found).cells()) for key, found in sorted(groups.items())]
    return table((head, "tried", "survived", "quick", "full"), rows)


def _survivors(verdicts: Sequence[Verdict[Mistake]]) -> str:
    known = reasons()
    rows = [
        (f"`{v.mutant.id}`", str(v.mutant).replace("|", "&#124;"),
         known.survives.get(v.mutant.id, v.answer.reason))
        for v in verdicts if v.survived and v.mutant.id not in known.equivalent
    ]  # fmt: skip
    none = [(f"`{v.mutant.id}`", str(v.mutant), known.equivalent[v.mutant.id])
            for v in verdicts if v.mutant.id in known.equivalent]  # fmt: skip
    heads = ("mistake", "why")
    return "\n\n".join((table(("survived", *heads), rows), table(("is none", *heads), none)))


def publish(
    verdicts: Sequence[Verdict[Mistake]], discarded: Counter[str], seed: int, path: Path = PAGE
) -> None:
    """Puts the tables between the two marks of the page."""
    put(tables(verdicts, discarded, seed), path, START)


def weakness(verdicts: Sequence[Verdict[Mistake]]) -> str:
    """What is wrong with the rates; empty: nothing."""
    few = [v for v in verdicts if len(v.mutant.conditions) <= 2]
    stale = [v.mutant.id for v in verdicts
             if not v.survived and v.mutant.id in reasons().equivalent]  # fmt: skip
    if stale:
        return f"listed as no mistake, but found: {', '.join(stale)}"
    quick, full = Count(few).rates()
    if quick < LEAST_QUICK or full < LEAST_FULL:
        return (
            f"of the mistakes with one or two conditions {quick:.1f} % are found at level quick "
            f"and {full:.1f} % at full; at least {LEAST_QUICK} and {LEAST_FULL} % must be"
        )
    return ""
