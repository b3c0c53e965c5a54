"""Tries mutants: at level quick first, and at level full those that it leaves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tests.mutants.generation import Mutant
from tests.mutants.pool import Pool
from tests.mutants.sample import backend_of
from tests.mutants.subjects import ROOT, Backend, Subjects
from tests.mutants.trial import Answer, Level, Question

SOURCES = ("core/anychip", "backends/cpu/anychip_cpu", "tests/meta", "tests/mutants",
           "tests/red_team")  # fmt: skip
"""What the verdicts depend on."""


class Generated(Protocol):
    """A generated mistake: a mutant, or one of the red team's."""

    @property
    def id(self) -> str:
        """A hash of all that it is."""
        ...

    @property
    def identity(self) -> Hashable:
        """What a list of equivalent ones calls it."""
        ...

    def to_json(self) -> dict[str, Any]:
        """All that it is, for the file of results."""
        ...


M = TypeVar("M", bound=Generated)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict(Generic[M]):
    """What became of a mistake.

    Attributes:
        mutant: the mistake.
        answer: of the last question about it.
        level: of that question.
        seconds: of all questions about it.
    """

    mutant: M
    answer: Answer
    level: Level
    seconds: float

    @property
    def survived(self) -> bool:
        """Whether no case failed."""
        return self.answer.outcome == "survived"

    @property
    def chapter(self) -> str:
        """Which chapter killed it; the import that it broke; or nothing."""
        return self.answer.case.partition("/")[0] or self.answer.outcome

    def to_json(self) -> dict[str, Any]:
        """For the file of results."""
        return {
            "mutant": self.mutant.to_json(), "answer": asdict(self.answer), "level": self.level,
            "seconds": round(self.seconds, 2),
        }  # fmt: skip

    @classmethod
    def from_json(cls, mutant: M, row: Mapping[str, Any]) -> Verdict[M]:
        """Back from there."""
        answer = Answer(**row["answer"])
        return cls(mutant=mutant, answer=answer, level=row["level"], seconds=row["seconds"])


def fingerprint() -> str:
    """A hash of everything that verdicts depend on."""
    digest = hashlib.sha256()
    for place in SOURCES:
        path = ROOT / place
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in [*files, *sorted(path.glob("_native*.so"))]:
            digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def about(mutant: Mutant, level: Level, subjects: Mapping[Backend, Subjects]) -> Question:
    """What is asked about a mutant."""
    backend = backend_of(mutant)
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    return Question(
        backend=backend, operators=tuple(subjects[backend][mutant.file][mutant.function]),
        level=level, file=mutant.file, text=mutant.apply(text),
    )  # fmt: skip


class Campaign(Generic[M]):
    """Tries mistakes and remembers the verdicts in a file, so that it can be taken up again.

    Args:
        question: what is asked about a mistake at a level.
    """

    def __init__(
        self, pool: Pool, question: Callable[[M, Level], Question], remember: Path | None = None,
        on_verdict: Callable[[Verdict[M]], None] = lambda verdict: None,
    ) -> None:  # fmt: skip
        self.pool, self.question, self.remember = pool, question, remember
        self.on_verdict = on_verdict
        self.known: dict[tuple[str, str], Any] = {}
        if remember is not None and remember.is_file():
            rows = map(json.loads, remember.read_text(encoding="utf-8").splitlines())
            self.known = {(row["mutant"]["id"], row["level"]): row for row in rows}

    def run(self, mutants: Sequence[M], listed: Collection[Hashable]) -> list[Verdict[M]]:
        """The verdicts, in the order of the mistakes; ``listed`` ones are asked at quick alone."""
        found = self._level("quick", mutants)
        left = [m for m in mutants if found[m.id].survived and m.identity not in listed]
        for id, verdict in self._level("full", left).items():
            found[id] = verdict
        return [found[mutant.id] for mutant in mutants]

    def _level(self, level: Level, mutants: Sequence[M]) -> dict[str, Verdict[M]]:
        found = {
            m.id: Verdict.from_json(m, self.known[m.id, level])
            for m in mutants
            if (m.id, level) in self.known
        }
        for verdict in found.values():
            self.on_verdict(verdict)
        questions = [(m, self.question(m, level)) for m in mutants if m.id not in found]
        for mutant, answer, seconds in self.pool.ask(questions):
            verdict = Verdict(mutant=mutant, answer=answer, level=level, seconds=seconds)
            found[mutant.id] = verdict
            self._write(verdict)
            self.on_verdict(verdict)
        return found

    def _write(self, verdict: Verdict[M]) -> None:
        if self.remember is not None:
            self.remember.parent.mkdir(parents=True, exist_ok=True)
            with self.remember.open("a", encoding="utf-8") as file:
                file.write(json.dumps(verdict.to_json()) + "\n")

    def check_killers(self, verdicts: Iterable[Verdict[M]]) -> None:
        """Raises RuntimeError when a case that killed a mistake fails without one, too.

        Those of one subject in a process: it has an address space of so many bytes, and an emulated
        device takes some for each thread.
        """
        killers: dict[tuple[Backend, Level, str], set[str]] = {}
        for v in verdicts:
            if v.answer.case:
                backend = self.question(v.mutant, v.level).backend
                subject = "/".join(v.answer.case.split("/")[:2])
                killers.setdefault((backend, v.level, subject), set()).add(v.answer.case)
        questions = [
            (backend, Question(backend=backend, level=level, cases=tuple(sorted(cases))))
            for (backend, level, _), cases in sorted(killers.items())
        ]
        for backend, answer, _ in self.pool.ask(questions):
            if answer.outcome != "survived":
                raise RuntimeError(
                    f"without any mistake, {answer.case} fails on {backend}: {answer.reason}; what "
                    "it killed does not count"
                )
