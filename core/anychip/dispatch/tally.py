"""Provenance: which implementation served each operator, how often, and why others did not.

Counts are always on. A count is an ``itertools.count``: its ``__next__`` is one C call that no
other thread can interrupt, which makes counts exact without a lock or a table per thread.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from anychip.contract import Row

Passed = tuple[tuple[Row, Any, str], ...]
"""Rows that were asked before and refused: row, provider, and why."""


class Tally(NamedTuple):
    """The counter of one implementation in one role."""

    row: Row
    provider: Any
    fallback: str | None
    passed: Passed
    tick: Callable[[], int]
    counter: itertools.count[int]
    declined: itertools.count[int]
    """Of the calls that were counted, those that the row then did not take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvenanceRow:
    """One line of the report.

    Attributes:
        operator, direction: what was computed.
        implementation: module and function that computed it.
        kind: native, mapped, compiled or reference.
        provider: backend or kernel pack that brought it, or ``reference``.
        distribution, version: the installed distribution it came from.
        calls: how often.
        fallback_reason: why no other row served these calls; None when this was a choice. Of calls
            that the row refused: why.
    """

    operator: str
    direction: str
    implementation: str
    kind: str
    provider: str
    distribution: str | None
    version: str | None
    calls: int
    fallback_reason: str | None


class TorchRow(NamedTuple):
    """Calls of an operator of torch's own on a chip with a C library.

    Attributes:
        operator: the name by which a library lists it, or torch's where none can.
        provider: the chip.
        kind: ``native``, by the library, or ``host``, since it has not got it or did not take it.
    """

    operator: str
    provider: str
    kind: str
    calls: int


class Provenance:
    """A snapshot of the counts. ``str()`` is a table; ``rows()`` and ``to_json()`` are data."""

    def __init__(
        self,
        rows: Iterable[ProvenanceRow],
        refused: Iterable[ProvenanceRow] = (),
        torch: Iterable[TorchRow] = (),
    ) -> None:
        self._rows, self._refused, self._torch = tuple(rows), tuple(refused), tuple(torch)

    def rows(self) -> tuple[ProvenanceRow, ...]:
        """One entry per implementation and reason, by operator and direction."""
        return self._rows

    def fallbacks(self) -> tuple[ProvenanceRow, ...]:
        """The entries in which the reference stepped in."""
        return tuple(row for row in self._rows if row.fallback_reason is not None)

    def refused(self) -> tuple[ProvenanceRow, ...]:
        """Calls that a row did not take, by row and reason; another one served them."""
        return self._refused

    def torch_rows(self) -> tuple[TorchRow, ...]:
        """torch's own operators on a chip with a C library, most calls first."""
        return self._torch

    def to_json(self) -> dict[str, Any]:
        """``{"schema": 1, "operators": [...], "refused": [...]}``: :class:`ProvenanceRow`s.

        And ``"torch"``, of :class:`TorchRow`s, which is empty but on a chip with a C library.
        """
        operators, refused = ([asdict(r) for r in rows] for rows in (self._rows, self._refused))
        torch = [row._asdict() for row in self._torch]
        return {"schema": 1, "operators": operators, "refused": refused, "torch": torch}

    def __str__(self) -> str:
        return "\n".join([self._table(), *torch_summary([row._asdict() for row in self._torch])])

    def _table(self) -> str:
        if not self._rows:
            return "no operator was called"
        heads = ("operator", "direction", "calls", "kind", "from", "fallback")
        lines = [heads] + [
            (
                row.operator, row.direction, str(row.calls), row.kind,
                f"{row.provider} {row.version or ''}".strip(), row.fallback_reason or "-",
            )
            for row in self._rows
        ]  # fmt: skip
        widths = [max(len(line[i]) for line in lines) for i in range(len(heads) - 1)]
        return "\n".join(
            "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[-1]])
            for line in lines
        )

    def __repr__(self) -> str:
        return f"Provenance({json.dumps(self.to_json())})"


def torch_summary(rows: Iterable[Mapping[str, Any]], count: int = 8) -> list[str]:
    """Lines for people about :class:`TorchRow`s."""
    calls: dict[str, Counter[str]] = {"native": Counter(), "host": Counter()}
    for row in rows:
        calls[row["kind"]][row["operator"]] += row["calls"]
    whole = sum(of.total() for of in calls.values())
    parts = {"native": "native", "host": "computed on the host"}
    return [
        f"torch's operators, {name}: {of.total()} of {whole} calls"
        + ("; most: " if of else "")
        + ", ".join(f"{operator} {number}" for operator, number in of.most_common(count))
        for kind, name in parts.items()
        if whole and (of := calls[kind]) is not None
    ]


Key = tuple[int, str, str | None, tuple[tuple[int, str], ...]]
_lock = threading.Lock()
_tallies: dict[Key, Tally] = {}


def new_tally(row: Row, provider: Any, fallback: str | None = None, passed: Passed = ()) -> Tally:
    """The counter for a row in one role; the same one whenever the same role comes up again.

    Args:
        passed: the rows before it that did not take the calls which it counts.
    """
    name = f"{provider.name} {row.operator} {row.direction} {row.kind}"
    key = (id(row.function), name, fallback, tuple((id(r.function), why) for r, _, why in passed))
    with _lock:
        if key not in _tallies:
            counts = itertools.count(), itertools.count()
            _tallies[key] = Tally(row, provider, fallback, passed, counts[0].__next__, *counts)
        return _tallies[key]


def _calls(counter: itertools.count[int]) -> int:
    # repr is the one way to read a count without advancing it: "count(5)".
    return int(repr(counter)[6:-1])


_baseline: dict[Key, int] = {}


def provenance(*, reset: bool = False, torch: Iterable[TorchRow] = ()) -> Provenance:
    """What served the operators of this process since the start or the last reset.

    Args:
        reset: count from zero afterwards.
        torch: what is known of torch's own operators.
    """
    with _lock:
        counts = {k: _calls(t.counter) - _calls(t.declined) for k, t in _tallies.items()}
        fresh = [(t, counts[key] - _baseline.get(key, 0)) for key, t in _tallies.items()]
        if reset:
            _baseline.update(counts)
    served: Counter[ProvenanceRow] = Counter()
    refused: Counter[ProvenanceRow] = Counter()
    for tally, calls in fresh:
        if calls:
            served[unserved(tally.row, tally.provider, tally.fallback)] += calls
            refused.update({unserved(*passed): calls for passed in tally.passed})
    return Provenance(_lines(served), _lines(refused), torch)


def _lines(counted: Counter[ProvenanceRow]) -> list[ProvenanceRow]:
    rows = [replace(row, calls=calls) for row, calls in counted.items()]
    return sorted(rows, key=lambda r: (r.operator, r.direction != "forward", r.kind))


def unserved(row: Row, provider: Any, reason: str | None = None) -> ProvenanceRow:
    """The line of a row, without a call."""
    return ProvenanceRow(
        operator=row.operator, direction=row.direction, implementation=row.label, kind=row.kind,
        provider=provider.name, distribution=provider.distribution, version=provider.version,
        calls=0, fallback_reason=reason,
    )  # fmt: skip
