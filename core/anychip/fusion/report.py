"""What ``fuse`` did, and what it left alone and why."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from anychip.dispatch.tally import ProvenanceRow


@dataclass(frozen=True, slots=True)
class Replaced:
    """One module of a model, or ``source``, a function of it, that an operator stands for now.

    The model's own code serves calls as ``unless`` says. The path of the model itself is "".
    """

    path: str
    kind: str
    source: str
    operator: str
    unless: str


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """One module that is as it was, and why."""

    path: str
    source: str
    reason: str


class FusionReport:
    """What was replaced, and ``before``, by an earlier call. ``str()`` is a table.

    ``left`` has modules without children that were left alone, and others with a known reason.
    """

    def __init__(
        self, replaced: Iterable[Replaced], left: Iterable[LeftAlone], before: int, own_calls: Any
    ) -> None:
        self.replaced, self.left, self.before = tuple(replaced), tuple(left), before
        self._own_calls = list({id(calls): calls for calls in own_calls}.values())

    def count(self, kind: str | None = None) -> int:
        """How many were replaced, of a kind or of all."""
        return sum(kind in (None, entry.kind) for entry in self.replaced)

    def fallbacks(self) -> tuple[ProvenanceRow, ...]:
        """Calls that the own code of what was replaced here, not of copies, has served since."""
        found = sum(self._own_calls, Counter[ProvenanceRow]())
        rows = [replace(row, calls=calls) for row, calls in found.items()]
        return tuple(sorted(rows, key=lambda r: (r.operator, r.implementation, r.fallback_reason)))

    def to_json(self) -> dict[str, Any]:
        """``{"schema": 1, "before": n, "replaced": [...], "left": [...]}``, entries by field."""
        return {
            "schema": 1,
            "before": self.before,
            "replaced": [asdict(entry) for entry in self.replaced],
            "left": [asdict(entry) for entry in self.left],
        }

    def __str__(self) -> str:
        done = Counter((r.kind, r.source, r.operator, r.unless) for r in self.replaced)
        lines = [f"replaced {len(self.replaced)}" if done else "nothing was replaced"]
        if self.before:
            lines[0] += f"; {self.before} were replaced before"
        if done:
            heads = ("kind", "count", "from", "to", "the model's own code serves")
            rows = [(k, str(n), s, f"ops.{o}", u) for (k, s, o, u), n in done.items()]
            lines += _table([heads, *rows])
        left = Counter((entry.source, entry.reason) for entry in self.left)
        if left:
            lines += ["", "left alone"]
            lines += _table([(str(n), source, why) for (source, why), n in left.items()])
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"FusionReport({json.dumps(self.to_json())})"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
