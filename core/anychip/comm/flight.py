"""A flight record: a rank's last calls, in a file, when its job has failed.

JSON lines. The first says who writes and why; each other is a call, in the order in which they were
begun: group, its members, number, what is called, state (``begun``, ``waited for``, ``done``), and
the clock's seconds of each. What all but one file have as ``done`` is what that rank has not done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

from anychip.comm.ledger import Failure, Ledger


def write(
    directory: Path, rank: int, world_size: int, failure: Failure, ledgers: Iterable[Ledger]
) -> None:
    """Writes ``rank<r>.jsonl``, over what an earlier job has left in the directory."""
    calls = sorted((row for ledger in ledgers for row in ledger.record()), key=lambda row: row[0])
    head = {
        "rank": rank,
        "world_size": world_size,
        "failed": round(time.time(), 6),
        "failure": failure.reason,
        "ranks at fault": failure.ranks,
    }
    lines = [json.dumps(fields) for fields in (head, *(fields for _, fields in calls))]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"rank{rank}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
