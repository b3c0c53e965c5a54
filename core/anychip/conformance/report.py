"""What a run found: one result per case, and the whole as text for people and JSON for machines.

The JSON is described in docs/conformance.md; a change that a reader would notice raises SCHEMA.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

import anychip
from anychip.conformance.bounds import Measurement
from anychip.conformance.case import Level

SCHEMA = 1
Outcome = Literal[
    "passed", "failed", "unsupported", "expected failure", "unexpected pass", "stale entry"
]
OUTCOMES: tuple[Outcome, ...] = (
    "passed", "unsupported", "expected failure", "failed", "unexpected pass", "stale entry",
)  # fmt: skip
FAILING: frozenset[Outcome] = frozenset({"failed", "unexpected pass", "stale entry"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What became of one case.

    Attributes:
        case: the id; of a stale entry its glob.
        outcome: see docs/conformance.md.
        reason: why, unless it passed.
        seconds: how long it took.
        call: the operator call, in one line.
        served_by: provider and implementation that served the call.
        measurements: distributions of errors.
        crashed: it ended its process, or ran past the time limit.
    """

    case: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    call: str | None = None
    served_by: str | None = None
    measurements: tuple[Measurement, ...] = ()
    crashed: bool = False

    @property
    def chapter(self) -> str:
        """The first part of the case's id."""
        return self.case.partition("/")[0]

    @property
    def ok(self) -> bool:
        """Whether the result lets the run pass."""
        return self.outcome not in FAILING

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "case": self.case,
            "chapter": self.chapter,
            "outcome": self.outcome,
            "reason": self.reason,
            "seconds": round(self.seconds, 4),
            "call": self.call,
            "served_by": self.served_by,
            "crashed": self.crashed,
            "errors": [m.to_json() for m in self.measurements],
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Result:
        """The inverse of ``to_json``."""
        errors = []
        for item in row["errors"]:
            fields: dict[str, Any] = {
                key: float(value) if value in ("inf", "-inf", "nan") else value
                for key, value in item.items()
            }
            errors.append(Measurement(**{**fields, "where": tuple(item["where"])}))
        names = ("case", "outcome", "reason", "seconds", "call", "served_by", "crashed")
        return cls(**{name: row[name] for name in names}, measurements=tuple(errors))


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Which backend, on what, in which versions."""

    backend: str
    device_type: str
    device: str
    distribution: str
    version: str
    api: tuple[int, int]
    capabilities: Mapping[str, int]
    torch: str = torch.__version__
    python: str = platform.python_version()
    suite: str = anychip.__version__


@dataclass(frozen=True, kw_only=True)
class Report:
    """A whole run.

    Attributes:
        identity: of the backend.
        level: quick or full.
        chapters: those that ran.
        select: the ``-k`` expression, or empty: only then is the chapter complete.
        isolated: every case ran in a child process.
        results: in the order in which they ran; stale entries last.
        provenance: ``anychip.provenance().to_json()`` of the run; None when it was isolated.
        references: operators of others that were compared with their own reference.
    """

    identity: Identity
    level: Level
    chapters: tuple[str, ...]
    select: str
    isolated: bool
    results: tuple[Result, ...]
    provenance: Mapping[str, Any] | None = None
    references: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether anything ran, and nothing failed."""
        return bool(self.results) and all(result.ok for result in self.results)

    @property
    def failures(self) -> tuple[Result, ...]:
        """Every result that keeps the run from passing."""
        return tuple(result for result in self.results if not result.ok)

    def counts(self, chapter: str | None = None) -> dict[Outcome, int]:
        """Results per outcome, of one chapter or of all."""
        found = Counter(r.outcome for r in self.results if chapter in (None, r.chapter))
        return {outcome: found[outcome] for outcome in OUTCOMES}

    def reproduce(self, result: Result) -> str:
        """The command that runs one case again."""
        level = "" if self.level == "quick" else f" --level {self.level}"
        isolate = " --isolate" if result.crashed else ""
        command = f"anychip conformance --backend {self.identity.backend}"
        return f'{command} -k "{result.case}"{level}{isolate}'

    def explain(self, result: Result) -> str:
        """Everything about a result that is not good, for a person: call, why, how to repeat it."""
        lines = [f"{result.outcome.upper()} {result.case}"]
        if result.call is not None:
            served = f"  [{result.served_by}]" if result.served_by else ""
            lines.append(f"  call: {result.call}{served}")
        lines += [f"  {line}" for line in result.reason.splitlines()]
        if result.outcome != "stale entry":
            lines.append(f"  again: {self.reproduce(result)}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The documented schema."""
        names = Identity.__dataclass_fields__
        return {
            "schema": SCHEMA,
            "passed": self.passed,
            "identity": {name: _plain(getattr(self.identity, name)) for name in names},
            "level": self.level,
            "chapters": list(self.chapters),
            "select": self.select,
            "isolated": self.isolated,
            "counts": self.counts(),
            "references": list(self.references),
            "results": [result.to_json() for result in self.results],
            "provenance": self.provenance,
        }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def with_outcome(result: Result, outcome: Outcome, reason: str) -> Result:
    """The same result, judged otherwise."""
    return replace(result, outcome=outcome, reason=reason)
