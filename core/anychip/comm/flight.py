"""A flight record: a rank's last calls, in a file, when its job has failed.

JSON lines. The first says who writes and why; each other is a call, in the order in which they were
begun: group, its members, number, what is called, state (``begun``, ``waited for``, ``done``), and
the clock's seconds of each. What all but one file have as ``done`` is what that rank has not done.
Ranks that have met again write a file for each generation.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from anychip.comm.ledger import Failure, Ledger


class Place(NamedTuple):
    """Who writes."""

    rank: int
    world_size: int
    generation: int

    @property
    def file(self) -> str:
        """``rank<r>.jsonl``, and of later generations ``rank<r>.generation<g>.jsonl``."""
        return f"rank{self.rank}{f'.generation{self.generation}' if self.generation else ''}.jsonl"


def write(directory: Path, place: Place, failure: Failure, ledgers: Iterable[Ledger]) -> None:
    """Writes the file, over what an earlier job has left in the directory."""
    calls = sorted((row for ledger in ledgers for row in ledger.record()), key=lambda row: row[0])
    head = {
        **place._asdict(),
        "failed": round(time.time(), 6),
        "failure": failure.reason,
        "ranks at fault": failure.ranks,
    }
    lines = [json.dumps(fields) for fields in (head, *(fields for _, fields in calls))]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / place.file).write_text("\n".join(lines) + "\n", encoding="utf-8")
