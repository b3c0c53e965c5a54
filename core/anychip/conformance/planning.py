"""Which cases has a run: of which backend, level and chapters, under which expectations?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from anychip import registry
from anychip.conformance import expectations, expression
from anychip.conformance.case import Case, Context, Level
from anychip.conformance.chapters import all_cases, check_chapters, device
from anychip.conformance.expectations import Entry, Expectations
from anychip.conformance.must_pass import MustPass, must_pass
from anychip.contract import Backend


@dataclass(frozen=True, kw_only=True)
class SuitePlan:
    """What is to be run, on which backend, under which expectations."""

    backend: Backend
    level: Level
    chapters: tuple[str, ...]
    select: str
    cases: tuple[Case, ...]
    expected: Expectations
    stale: tuple[Entry, ...]
    version: str
    must_pass: MustPass
    seed: int = 0
    expectations_file: Path | None = None

    def entry(self, case: Case) -> Entry | None:
        """What the backend says about a case."""
        return self.expected.find(case.id)


def plan(
    backend: Backend,
    *,
    level: Level = "quick",
    chapters: Iterable[str] = (),
    select: str = "",
    seed: int = 0,
    expectations_file: Path | None = None,
) -> SuitePlan:
    """Which cases a run has.

    Raises:
        ValueError: no such chapter; not an expression; no case is selected; a malformed list.
    """
    named = check_chapters(chapters)
    context = Context(backend, level, seed)
    every = list(all_cases(context))
    _check_ids(every)
    asked = [c for c in every if c.chapter in named and (level == "full" or not c.full)]
    chosen = expression.select(asked, select)
    if not chosen:
        raise ValueError(_nothing(select, level, asked, every))
    if device.row_faults(backend):  # whatever was asked for: a row that is never called passes all
        chosen += [c for c in every if c.id == device.ROWS and c not in chosen]
    expected = expectations.load(backend, expectations_file)
    return SuitePlan(
        backend=backend,
        level=level,
        chapters=named,
        select=select,
        cases=tuple(chosen),
        expected=expected,
        stale=tuple(expected.stale([case.id for case in every])),
        version=registry.provenance_of(backend)[1],
        must_pass=must_pass(every, backend, level),
        seed=seed,
        expectations_file=expectations_file,
    )


def _check_ids(cases: Sequence[Case]) -> None:
    seen: set[str] = set()
    for case in cases:
        assert case.id not in seen, f"two cases have the id {case.id}"
        seen.add(case.id)


def _nothing(select: str, level: Level, asked: Sequence[Case], every: Sequence[Case]) -> str:
    elsewhere = expression.select(every, select)
    hint = "`-k` words are parts of ids like " + (asked[0].id if asked else every[0].id)
    if elsewhere:
        first = elsewhere[0]
        hint = f"{first.id} is in chapter {first.chapter}"
        hint += ", at level full" if first.full and level == "quick" else ""
    return f"no case is selected by {select!r}; {hint}"
