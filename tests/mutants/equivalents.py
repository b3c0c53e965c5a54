"""Mutants that no input can tell from the original: ``equivalents.toml``, with arguments."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import tomlkit

from tests.mutants.generation import Identity, Mutant

FILE = Path(__file__).with_name("equivalents.toml")
KEYS = ("file", "function", "line", "operator", "change", "occurrence")


@dataclass(frozen=True, kw_only=True, slots=True)
class Equivalent:
    """One mutant of an entry.

    Attributes:
        identity: of the mutant; see :attr:`Mutant.identity`.
        reason: why no input can tell it from the original.
    """

    identity: Identity
    reason: str


def load(path: Path = FILE) -> dict[Identity, Equivalent]:
    """The entries by identity.

    Raises:
        ValueError: an entry lacks something, or stands there twice.
    """
    found: dict[Identity, Equivalent] = {}
    files = tomlkit.parse(path.read_text("utf-8")).unwrap()
    rows = [
        {"file": file, "function": function, "occurrence": 0, **row}
        for file, functions in files.items()
        for function, own in functions.items()
        for row in own
    ]
    for number, row in enumerate(rows, 1):
        missing = {"file", "function", "line", "changes", "occurrence", "reason"} ^ {*row}
        if missing or not row["reason"].endswith("."):
            raise ValueError(
                f"{path.name}, entry {number}: needs a line, changes (lists by operator), and a "
                f"reason in a sentence; wrong are {sorted(missing) or row['reason']}"
            )
        for operator, change in ((o, c) for o, own in row["changes"].items() for c in own):
            identity = tuple((row | {"operator": operator, "change": change})[k] for k in KEYS)
            if identity in found:
                raise ValueError(f"{path.name}, entry {number}: {identity} stands there twice")
            found[identity] = Equivalent(identity=identity, reason=row["reason"])
    return found


def check_fresh(listed: Iterable[Identity], mutants: Iterable[Mutant]) -> None:
    """Raises ValueError for entries that are no mutant of today's sources."""
    stale = set(listed) - {mutant.identity for mutant in mutants}
    if stale:
        lines = "\n".join(f"  {file}: {line} [{change}]" for file, _, line, _, change, _ in stale)
        raise ValueError(
            f"{FILE.name}: take out or rewrite what the sources no longer have:\n{lines}"
        )


def stanza(mutant: Mutant) -> str:
    """An entry for a mutant, with the argument left to be written."""
    row = tomlkit.table()
    row.add("line", mutant.line)
    if mutant.occurrence:
        row.add("occurrence", mutant.occurrence)
    row.add("reason", "")
    row.add(tomlkit.key(["changes", mutant.operator]), [mutant.change])
    return f'[["{mutant.file}"."{mutant.function}"]]\n{tomlkit.dumps(row)}'
