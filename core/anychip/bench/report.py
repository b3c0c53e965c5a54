"""The result of a benchmark: rows for people, JSON for programs."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line.

    Attributes:
        name: what was timed.
        microseconds: median per call.
        best_microseconds: of the fastest round.
        facts: further columns by heading, numbers or text.
    """

    name: str
    microseconds: float
    best_microseconds: float
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All rows of one run, and where it ran."""

    subject: str
    backend: str
    device: str
    threads: int
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """``{"schema": 1, ...}``; the fields of the report and of each row."""
        import torch

        return {
            "schema": 1,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "host": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            **asdict(self),
        }

    def table(self) -> Table:
        """The rows as a rich table."""
        headings = list(dict.fromkeys(h for row in self.rows for h in row.facts))
        table = Table(
            title=f"{self.subject} on {self.backend} ({self.device})", title_justify="left"
        )
        table.add_column("what", no_wrap=True)
        for heading in ("us", "best us", *headings):
            table.add_column(heading, justify="right")
        for row in self.rows:
            facts = [_text(row.facts.get(h, "")) for h in headings]
            table.add_row(row.name, _text(row.microseconds), _text(row.best_microseconds), *facts)
        return table


def _text(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
