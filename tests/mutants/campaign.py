"""Tries mutants: at level quick first, and at level full those that it leaves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.mutants.generation import Identity, Mutant
from tests.mutants.pool import Pool
from tests.mutants.sample import BACKENDS, backend_of
from tests.mutants.subjects import ROOT, Backend, Subjects
from tests.mutants.trial import Answer, Level, Question

SOURCES = ("core/anychip", "backends/cpu/anychip_cpu", "tests/meta/honest.py", "tests/mutants")
"""What the verdicts depend on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        mutant: the mutant.
        answer: of the last question about it.
        level: of that question.
        seconds: of all questions about it.
    """

    mutant: Mutant
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
    def from_json(cls, row: Mapping[str, Any]) -> Verdict:
        """Back from there."""
        fields = {key: value for key, value in row["mutant"].items() if key != "id"}
        return cls(
            mutant=Mutant(**fields), answer=Answer(**row["answer"]), level=row["level"],
            seconds=row["seconds"],
        )  # fmt: skip


def fingerprint() -> str:
    """A hash of everything that verdicts depend on."""
    digest = hashlib.sha256()
    for place in SOURCES:
        path = ROOT / place
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in [*files, *sorted(path.glob("_native*.so"))]:
            digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


class Campaign:
    """Tries mutants and remembers the verdicts in a file, so that it can be taken up again."""

    def __init__(
        self,
        pool: Pool,
        subjects: Mapping[Backend, Subjects],
        remember: Path | None,
        on_verdict: Callable[[Verdict], None] = lambda verdict: None,
    ) -> None:
        self.pool, self.subjects, self.remember = pool, subjects, remember
        self.on_verdict = on_verdict
        self.known: dict[tuple[str, str], Verdict] = {}
        if remember is not None and remember.is_file():
            for line in remember.read_text(encoding="utf-8").splitlines():
                verdict = Verdict.from_json(json.loads(line))
                self.known[verdict.mutant.id, verdict.level] = verdict

    def run(self, mutants: Sequence[Mutant], listed: Collection[Identity]) -> list[Verdict]:
        """The verdicts, in the order of the mutants; ``listed`` ones are asked at quick alone."""
        found = self._level("quick", mutants)
        left = [m for m in mutants if found[m.id].survived and m.identity not in listed]
        for id, verdict in self._level("full", left).items():
            found[id] = verdict
        return [found[mutant.id] for mutant in mutants]

    def _level(self, level: Level, mutants: Sequence[Mutant]) -> dict[str, Verdict]:
        found = {m.id: self.known[m.id, level] for m in mutants if (m.id, level) in self.known}
        for verdict in found.values():
            self.on_verdict(verdict)
        questions = [(m, self._question(m, level)) for m in mutants if m.id not in found]
        for mutant, answer, seconds in self.pool.ask(questions):
            verdict = Verdict(mutant=mutant, answer=answer, level=level, seconds=seconds)
            found[mutant.id] = verdict
            self._write(verdict)
            self.on_verdict(verdict)
        return found

    def _question(self, mutant: Mutant, level: Level) -> Question:
        backend = backend_of(mutant)
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        return Question(
            backend=backend, operators=tuple(self.subjects[backend][mutant.file][mutant.function]),
            level=level, file=mutant.file, text=mutant.apply(text),
        )  # fmt: skip

    def _write(self, verdict: Verdict) -> None:
        if self.remember is not None:
            self.remember.parent.mkdir(parents=True, exist_ok=True)
            with self.remember.open("a", encoding="utf-8") as file:
                file.write(json.dumps(verdict.to_json()) + "\n")

    def check_killers(self, verdicts: Iterable[Verdict]) -> None:
        """Raises RuntimeError when a case that killed a mutant fails without one, too."""
        questions: list[tuple[Backend, Question]] = []
        for backend in BACKENDS:
            for level in ("quick", "full"):
                cases = {
                    v.answer.case
                    for v in verdicts
                    if v.answer.case and v.level == level and backend_of(v.mutant) == backend
                }
                if cases:
                    question = Question(
                        backend=backend, operators=(), level=level, cases=tuple(sorted(cases))
                    )
                    questions.append((backend, question))
        for backend, answer, _ in self.pool.ask(questions):
            if answer.outcome != "survived":
                raise RuntimeError(
                    f"without any mutant, {answer.case} fails on {backend}: {answer.reason}; what "
                    "it killed does not count"
                )
