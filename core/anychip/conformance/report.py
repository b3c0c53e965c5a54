"""What a run found: one result per case, and the whole as text for people and JSON for machines.

The JSON has results that did not pass in full, and of those that did what a verdict needs; the rest
is in a file beside it (:mod:`.archive`). It is described in docs/conformance.md and
docs/report.schema.json; a change that a reader would notice raises SCHEMA.
"""

from __future__ import annotations

import json
import math
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

import anychip
from anychip.conformance.bounds import Measurement
from anychip.conformance.case import Curve, Level
from anychip.conformance.covering import Coverage
from anychip.conformance.hashes import digest

SCHEMA = 4
Outcome = Literal[
    "passed", "failed", "unsupported", "expected failure", "unexpected pass", "stale entry"
]
OUTCOMES: tuple[Outcome, ...] = (
    "passed", "unsupported", "expected failure", "failed", "unexpected pass", "stale entry",
)  # fmt: skip
_FIELDS = ("case", "outcome", "reason", "capability", "note", "call", "served_by", "crashed")
"""Of a result, that JSON has as they are."""
_DETAILS = ("call", "served_by", "errors", "curve", "coverage")
"""Of a result that passed, which verdicts do not need."""
DIRECTIONS = {"operators": "forward", "gradients": "backward"}
"""Which direction of an operator a chapter asks about."""
LIMIT_S = 300.0
"""Seconds that a case may take in a child process, unless the run says otherwise."""
LISTED = 8
"""Entries of a list that a person is shown."""
_LIST = re.compile(r"([\[({])([^\[\](){}\n]*)([\])}])")
FAILING: frozenset[Outcome] = frozenset({"failed", "unexpected pass", "stale entry"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What became of one case.

    Attributes:
        case: the id; of a stale entry its glob.
        outcome: see docs/conformance.md.
        reason: why, unless it passed.
        capability: of an unsupported case: what the backend lacks.
        note: what a passed case found that a reader would want to know.
        seconds: how long it took.
        call: the operator call, in one line.
        served_by: provider and implementation that served the call.
        measurements: distributions of errors.
        curve: of a training.
        coverage: of a design that passed.
        crashed: it ended its process, or ran past the time limit.
        known_error: of a result that was read without its measurements: the largest error.
    """

    case: str
    outcome: Outcome
    reason: str = ""
    capability: str | None = None
    note: str = ""
    seconds: float = 0.0
    call: str | None = None
    served_by: str | None = None
    measurements: tuple[Measurement, ...] = ()
    curve: Curve | None = None
    coverage: Coverage | None = None
    crashed: bool = False
    known_error: float | None = None

    @property
    def error(self) -> float | None:
        """The largest error in units of its limit, of any kind; None: nothing was measured."""
        errors = [m.of_limit for m in self.measurements]
        if not errors:
            return self.known_error
        return math.nan if any(map(math.isnan, errors)) else max(errors)

    @property
    def chapter(self) -> str:
        """The first part of the case's id."""
        return self.case.partition("/")[0]

    @property
    def ok(self) -> bool:
        """Whether the result lets the run pass."""
        return self.outcome not in FAILING

    def to_json(self) -> dict[str, Any]:
        """What there is to say, as JSON values; numbers that are not finite become text."""
        found = {name: getattr(self, name) for name in _FIELDS}
        found["errors"] = [m.to_json() for m in self.measurements]
        if self.curve is not None:
            found["curve"] = {key: _numbers(value) for key, value in self.curve._asdict().items()}
        if self.coverage is not None:
            found["coverage"] = _plain(asdict(self.coverage))
        return {"seconds": round(self.seconds, 4), **{k: v for k, v in found.items() if v}}

    def to_brief(self) -> dict[str, Any]:
        """As ``to_json``; of one that passed only what a verdict needs."""
        found = self.to_json()
        if self.outcome == "passed":
            for name in _DETAILS:
                found.pop(name, None)
        if self.error is not None:
            found["error"] = _numbers(float(f"{self.error:.4g}"))
        return found

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Result:
        """The inverse of ``to_json``; of ``to_brief`` without the measurements."""
        errors = []
        for item in row.get("errors", ()):
            fields: dict[str, Any] = {key: _number(value) for key, value in item.items()}
            tuples = {key: tuple(item[key]) for key in ("where", "histogram")}
            errors.append(Measurement(**{**fields, **tuples}))
        curve = None
        if "curve" in row:
            parts: dict[str, Any] = {
                key: tuple(map(_number, value)) if isinstance(value, list) else _number(value)
                for key, value in row["curve"].items()
            }
            curve = Curve(**parts)
        fields = {name: row[name] for name in (*_FIELDS, "seconds") if name in row}
        return cls(
            **fields,
            measurements=tuple(errors),
            curve=curve,
            coverage=Coverage.from_json(row["coverage"]) if "coverage" in row else None,
            known_error=_number(row.get("error")),
        )


class KernelPack(NamedTuple):
    """A distribution that brings rows for the backend."""

    distribution: str
    version: str
    hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Which backend, on what, in which versions.

    Attributes:
        device: what the backend says of the device.
        num_devices: that it offers here.
        distribution, version: of the plugin.
        api: version of the contract that it was made for.
        capabilities: that it declares, with their versions.
        dtypes: float types that it computes in, as in case ids.
        plugin_hash: of the plugin's files; None for a backend that was handed over as an object.
        kernel_packs: others that bring rows for it.
        suite, suite_hash: version of anychip, and hash of this package's files.
    """

    backend: str
    device_type: str
    device: str
    num_devices: int
    distribution: str
    version: str
    api: tuple[int, int]
    capabilities: Mapping[str, int]
    dtypes: tuple[str, ...]
    plugin_hash: str | None
    suite_hash: str
    kernel_packs: tuple[KernelPack, ...] = ()
    torch: str = torch.__version__
    python: str = platform.python_version()
    platform: str = f"{platform.system()} {platform.machine()}"
    suite: str = anychip.__version__

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Identity:
        """The inverse of its part of the report."""
        packs = tuple(KernelPack(**pack) for pack in row["kernel_packs"])
        tuples = {"api": tuple(row["api"]), "dtypes": tuple(row["dtypes"]), "kernel_packs": packs}
        return cls(**{**row, **tuples})


class Priority(NamedTuple):
    """One thing to fix, and what it is worth.

    Attributes:
        subject: an operator, or the first two parts of the failed cases' ids.
        calls: in one training step of a decoder, both directions.
        model: the decoder that calls it so often: GPT, or Llama where GPT does not call it.
        cases: that failed.
    """

    subject: str
    calls: int
    model: str
    cases: tuple[str, ...]


class Details(NamedTuple):
    """The file with what the report's JSON leaves out.

    Attributes:
        file: its name, in the folder of the report.
        sha256: of its bytes.
    """

    file: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """A whole run.

    Attributes:
        identity: of the backend.
        level: quick or full.
        chapters: those that ran.
        select: the ``-k`` expression, or empty: only then is the chapter complete.
        seed: of all random inputs.
        isolated: every case ran in a child process.
        results: in the order in which they ran; stale entries last.
        started: when, in UTC, as ISO 8601; of a plan empty.
        seconds: how long it took.
        must_pass: number of cases that this backend has to pass at this level, and hash of the list
            (:mod:`anychip.conformance.must_pass`), whatever was selected.
        next_to_fix: failures by what a step would gain, the first three.
        provenance: ``anychip.provenance().to_json()`` of the run, also of rows that served none;
            of cases that ended their process nothing is known.
        references: operators of others that were compared with their own reference.
        coverage: of operators whose calls cover combinations of options.
        details: where the measurements are; None until they are written.
        command: that asks this backend under these expectations; JSON does not have it.
        limit_s: for a case in a child process; JSON does not have it.
    """

    identity: Identity
    level: Level
    chapters: tuple[str, ...]
    select: str
    seed: int
    isolated: bool
    results: tuple[Result, ...]
    must_pass: tuple[int, str]
    started: str = ""
    seconds: float = 0.0
    next_to_fix: tuple[Priority, ...] = ()
    provenance: Mapping[str, Any] | None = None
    references: tuple[str, ...] = ()
    coverage: tuple[Coverage, ...] = ()
    details: Details | None = None
    command: str = ""
    limit_s: float = LIMIT_S

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

    def by_operator(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Of each operator and dtype, by direction: ``cases``, ``failed``, and ``error``."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        pairs = (
            (result, dtype)
            for result in self.results
            for dtype in dtypes_of(result, self.identity.dtypes)
        )
        for result, dtype in pairs:
            name, direction = result.case.split("/")[1], DIRECTIONS[result.chapter]
            new = {"cases": 0, "failed": 0, "error": None}
            line = found.setdefault(name, {}).setdefault(dtype, {}).setdefault(direction, new)
            line["cases"] += 1
            line["failed"] += not result.ok
            own = [m.of_limit for m in result.measurements if m.format == dtype]
            error = max(own) if own else result.error
            if error is not None:
                worst = float(f"{max(error, _number(line['error']) or 0.0):.4g}")
                line["error"] = _numbers(worst)
        return found

    def refusals(self, row: Mapping[str, Any]) -> list[tuple[str, int]]:
        """Why a row of the provenance did not take calls, and how many, most first."""
        same = ("operator", "direction", "implementation", "provider")
        refused = (self.provenance or {}).get("refused", [])
        found = [r for r in refused if all(r[name] == row[name] for name in same)]
        return sorted(((r["fallback_reason"], r["calls"]) for r in found), key=lambda p: -p[1])

    def reproduce(self, result: Result) -> str:
        """The command that runs one case again."""
        level = "" if self.level == "quick" else f" --level {self.level}"
        seed = f" --seed {self.seed}" if self.seed else ""
        isolate = " --isolate" if result.crashed else ""
        if isolate and self.limit_s != LIMIT_S:
            isolate += f" --limit {self.limit_s:g}"
        command = self.command or f"anychip conformance --backend {self.identity.backend}"
        return f'{command} -k "{result.case}"{level}{seed}{isolate}'

    def explain(self, result: Result) -> str:
        """Everything about a result that is not good, for a person: call, why, how to repeat it."""
        lines = [f"{result.outcome.upper()} {result.case}"]
        if result.call is not None:
            served = f"  [{result.served_by}]" if result.served_by else ""
            lines.append(f"  call: {abridged(result.call)}{served}")
        lines += [f"  {line}" for line in abridged(result.reason).splitlines()]
        if result.outcome != "stale entry":
            lines.append(f"  again: {self.reproduce(result)}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The documented schema."""
        names = Identity.__dataclass_fields__
        document = {
            "schema": SCHEMA,
            "passed": self.passed,
            "identity": {name: _plain(getattr(self.identity, name)) for name in names},
            "level": self.level,
            "chapters": list(self.chapters),
            "select": self.select,
            "seed": self.seed,
            "isolated": self.isolated,
            "started": self.started,
            "seconds": round(self.seconds, 3),
            "counts": self.counts(),
            "must_pass": {"cases": self.must_pass[0], "hash": self.must_pass[1]},
            "next_to_fix": [_plain(priority._asdict()) for priority in self.next_to_fix],
            "references": list(self.references),
            "operators": self.by_operator(),
            "coverage": [_plain(asdict(coverage)) for coverage in self.coverage],
            "results": [result.to_brief() for result in self.results],
            "provenance": self.provenance,
            "details": None if self.details is None else self.details._asdict(),
        }
        return {**document, "digest": digest_of(document)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Report:
        """The inverse of ``to_json``; counts, sums, verdict and digest are not read.

        Raises:
            ValueError: it is not a report of this schema.
        """
        if not isinstance(document, Mapping) or document.get("schema") != SCHEMA:
            found = document.get("schema") if isinstance(document, Mapping) else document
            raise ValueError(f"a conformance report of schema {SCHEMA} expected, got {found!r}")
        names = ("level", "select", "seed", "isolated", "started", "seconds", "provenance")
        try:
            return cls(
                **{name: document[name] for name in names},
                identity=Identity.from_json(document["identity"]),
                chapters=tuple(document["chapters"]),
                must_pass=(document["must_pass"]["cases"], document["must_pass"]["hash"]),
                references=tuple(document["references"]),
                coverage=tuple(map(Coverage.from_json, document["coverage"])),
                details=None if document["details"] is None else Details(**document["details"]),
                results=tuple(Result.from_json(row) for row in document["results"]),
                next_to_fix=tuple(
                    Priority(**{**row, "cases": tuple(row["cases"])})
                    for row in document["next_to_fix"]
                ),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"a conformance report of schema {SCHEMA} expected: {type(error).__name__}: {error}"
            ) from None


def dtypes_of(result: Result, claimed: Iterable[str]) -> list[str]:
    """In which float types a case has called an operator; none: it is about no operator.

    A case in one type has it in its id; a design is in those that it measured, or in all that the
    backend claims if it came to none.
    """
    parts = result.case.split("/")
    if result.chapter not in DIRECTIONS or len(parts) < 3:
        return []
    if parts[2] != "design":
        return [parts[2]] if len(parts) > 3 else []
    measured = {m.format for m in result.measurements}
    return [dtype for dtype in claimed if dtype in measured] or list(claimed)


def abridged(text: str) -> str:
    """A text for people: of each long list in it the first entries, the last, and how many more."""

    def shorter(found: re.Match[str]) -> str:
        entries = found[2].split(", ")
        if len(entries) <= LISTED:
            return found[0]
        more = len(entries) - LISTED + 1
        shown = [*entries[: LISTED - 2], f"... {more} more ...", entries[-1]]
        return found[1] + ", ".join(shown) + found[3]

    return _LIST.sub(shorter, text)


def digest_of(document: Mapping[str, Any]) -> str:
    """SHA-256 of a report without its digest: a report that was edited by hand is noticed."""
    rest = {key: value for key, value in document.items() if key != "digest"}
    return digest([json.dumps(rest, sort_keys=True, separators=(",", ":"))])


def to_text(document: Mapping[str, Any]) -> str:
    """The JSON of a report as it is written: one line per key, and one per result."""
    lines = []
    for key, value in document.items():
        text = json.dumps(value)
        if key == "results":
            text = "[\n" + ",\n".join(json.dumps(row) for row in value) + "\n]"
        lines.append(f'"{key}": {text}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _plain(value: Any) -> Any:
    if isinstance(value, KernelPack):
        return value._asdict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _numbers(value: float | tuple[float, ...]) -> Any:
    """JSON has no infinity and no NaN: they are the texts "inf", "-inf" and "nan"."""
    if isinstance(value, tuple):
        return [_numbers(item) for item in value]
    return value if math.isfinite(value) else str(value)


def _number(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value


def with_outcome(
    result: Result, outcome: Outcome, reason: str, capability: str | None = None
) -> Result:
    """The same result, judged otherwise."""
    return replace(result, outcome=outcome, reason=reason, capability=capability)
