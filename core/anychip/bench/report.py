"""The result of a benchmark: rows for people, JSON for programs."""

import datetime
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
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
    rows: Sequence[Timing]
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

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Headings, and a line of text per row; milliseconds where no row is below ten."""
        facts = list(dict.fromkeys(h for row in self.rows for h in row.facts))
        slow = bool(self.rows) and min(row.microseconds for row in self.rows) >= 10_000
        unit, factor = ("ms", 1e-3) if slow else ("us", 1.0)
        lines = []
        for row in self.rows:
            times = (row.microseconds * factor, row.best_microseconds * factor)
            values = (row.name, *times, *(row.facts.get(h, "") for h in facts))
            lines.append([_text(value) for value in values])
        return ["what", unit, f"best {unit}", *facts], lines

    def table(self) -> Table:
        """The rows as a rich table."""
        headings, lines = self.cells()
        table = Table(
            title=f"{self.subject} on {self.backend} ({self.device})", title_justify="left"
        )
        for number, heading in enumerate(headings):
            table.add_column(heading, no_wrap=number == 0, justify="right" if number else "left")
        for line in lines:
            table.add_row(*line)
        return table


def _text(value: Any) -> str:
    """Two digits after the point, or two that count; a large number needs neither."""
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"
