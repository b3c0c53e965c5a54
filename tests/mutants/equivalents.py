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
    """One entry.

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
        {"file": file, "function": function, **row}
        for file, functions in files.items()
        for function, own in functions.items()
        for row in own
    ]
    for number, row in enumerate(rows, 1):
        missing = {*KEYS, "reason"} ^ {*row, "occurrence"}
        if missing or not row["reason"].endswith("."):
            raise ValueError(
                f"{path.name}, entry {number}: needs {', '.join(KEYS)} (0 unless given) and a "
                f"reason in a sentence; wrong are {sorted(missing) or row['reason']}"
            )
        values = {"occurrence": 0, **row}
        identity = tuple(values[key] for key in KEYS)
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
    for key in KEYS[2:]:
        value = getattr(mutant, key)
        if key != "occurrence" or value:
            row.add(key, value)
    row.add("reason", "")
    return f'[["{mutant.file}"."{mutant.function}"]]\n{tomlkit.dumps(row)}'
