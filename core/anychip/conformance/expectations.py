"""What a backend says about itself: cases that it never passes, and cases not passed yet.

``expectations.toml`` lies in the backend's package::

    [[unsupported]]                      # permanent: the chip cannot
    case = "random/generator/state"      # a case's id; * and ? stand for anything
    reason = "the chip's generator has no state that can be read"
    capability = "generator_state"       # of LACKS; never one that the backend declares

    [[expected_failure]]                 # temporary: a known defect
    case = "operators/rms_norm/bf16/3x4096"
    reason = "partial sums are bfloat16"
    until = "2027-01-31"                 # a date, or the plugin's version that will have the repair
    crash = true                         # optional: it ends the process; run with --isolate only

An unsupported case that passes, an expected failure that passes, an entry that matches no case and
one past its date are failures: a list describes the backend as it is. What is simply not there, a
row or a dtype, is not asked and not listed.
"""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import tomlkit
import tomlkit.exceptions

from anychip.conformance.chapters.device import ROWS
from anychip.conformance.report import Result, with_outcome
from anychip.contract import Backend

FILE = "expectations.toml"
ExpectationKind = Literal["unsupported", "expected_failure"]
_KEYS = {
    "unsupported": {"case", "reason", "capability"},
    "expected_failure": {"case", "reason", "until"},
}
_OPTIONAL = {"unsupported": set[str](), "expected_failure": {"crash"}}
LACKS = (*Backend.capabilities, "graphs", "generator_state", "message_tags", "rank_order")
"""What a backend can lack: the contract's optional groups, then the state of a generator, tags of
messages between two ranks, and groups whose ranks are not in order."""
FIRST_DAYS = 90
"""Days until which a first list expects its failures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One line of a list.

    Attributes:
        kind: which list.
        case: glob on case ids.
        reason: why, for people.
        capability: of an unsupported case: what the backend lacks.
        until: of an expected failure: a date, or a version of the plugin.
        crash: of an expected failure: it ends the process.
    """

    kind: ExpectationKind
    case: str
    reason: str
    capability: str | None = None
    until: datetime.date | str | None = None
    crash: bool = False

    def matches(self, id: str) -> bool:
        """Whether the entry is about a case."""
        return fnmatchcase(id, self.case)

    def expired(self, version: str, today: datetime.date) -> str | None:
        """Why an expected failure is overdue; None while it is not.

        Args:
            version: the installed plugin's; one that is not made of numbers never expires an entry.
        """
        if isinstance(self.until, datetime.date):
            return f"it was expected until {self.until}" if today > self.until else None
        if self.until is None or not _VERSION.match(version):
            return None
        reached = _numbers(version) >= _numbers(self.until)
        return f"it was expected until version {self.until}; this is {version}" if reached else None


_VERSION = re.compile(r"\d+(\.\d+)*")


def _numbers(version: str) -> tuple[int, ...]:
    found = _VERSION.match(version)
    assert found is not None
    return tuple(int(part) for part in found.group().split("."))


def advised(results: Sequence[Result], listed: Expectations) -> list[Result]:
    """Results, in which an unexpected pass says what to do with its entry."""
    found: dict[Entry, list[Result]] = {}
    for result in results:
        entry = listed.find(result.case)
        if entry is not None:
            found.setdefault(entry, []).append(result)
    reasons: dict[str, str] = {}
    for entry, matched in found.items():
        passing = [r.case for r in matched if r.outcome == "unexpected pass"]
        advice = f"{len(passing)} of {len(matched)} pass: narrow it to those that fail"
        if len(passing) == len(matched):
            advice = "take it out of the list"
        text = (
            f"listed as {entry.kind} ({entry.reason}), and does not fail; {entry.case!r}: {advice}"
        )
        reasons |= dict.fromkeys(passing, text)
    return [
        with_outcome(r, r.outcome, reasons[r.case]) if r.case in reasons else r for r in results
    ]


def first_list(results: Sequence[Result], listed: Expectations, today: datetime.date) -> str:
    """The text of a list with which this run would have passed, an entry for each case."""
    document = tomlkit.document()
    document.add(
        tomlkit.comment("As found by `anychip conformance`. The reasons are to be written.")
    )
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _KEYS}
    for result in results:
        entry = listed.find(result.case)
        if result.outcome == "failed" and result.case != ROWS:  # a table is mended at once
            reason = result.reason.strip().partition("\n")[0] or "failed"
            until = today + datetime.timedelta(days=FIRST_DAYS)
            row = {"case": result.case, "reason": reason, "until": until, "crash": result.crashed}
            rows["expected_failure"].append(row)
        elif entry is not None and result.outcome in ("expected failure", "unsupported"):
            known = {key: getattr(entry, key) for key in (*_KEYS[entry.kind], "crash")}
            rows[entry.kind].append({**known, "case": result.case})
    for kind, found in rows.items():
        if found:
            kept = [
                {k: v for k, v in sorted(row.items()) if v not in (None, False)} for row in found
            ]
            document.add(kind, tomlkit.item(kept))
    return tomlkit.dumps(document)


class Expectations:
    """The lists of one backend. The first entry that matches a case counts."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries = tuple(entries)

    def find(self, id: str) -> Entry | None:
        """The entry about a case."""
        return next((entry for entry in self.entries if entry.matches(id)), None)

    def stale(self, ids: Sequence[str]) -> list[Entry]:
        """Entries that match none of the cases."""
        return [e for e in self.entries if not any(e.matches(id) for id in ids)]

    def check_against(self, backend: Backend) -> None:
        """Raises ValueError for an entry that contradicts what the backend declares."""
        for entry in self.entries:
            if entry.capability in backend.capabilities:
                raise ValueError(
                    f"{FILE} of backend {backend.name!r}: {entry.case!r} is listed as unsupported "
                    f"for want of {entry.capability!r}, which the backend declares; take it out of "
                    "one of the two"
                )


def load(backend: Backend, path: Path | None = None) -> Expectations:
    """The lists from a file, or from the package of the backend's class; empty without one.

    Raises:
        ValueError: the file is malformed; the message names the entry.
        FileNotFoundError: ``path`` does not exist.
    """
    if path is not None:
        found = parse(path.read_text(encoding="utf-8"), str(path))
    else:
        package = type(backend).__module__.rpartition(".")[0] or type(backend).__module__
        found = parse(_packaged(package), f"{package}/{FILE}")
    found.check_against(backend)
    return found


def _packaged(package: str) -> str:
    try:
        file = resources.files(package) / FILE
        return file.read_text(encoding="utf-8") if file.is_file() else ""
    except (ModuleNotFoundError, TypeError, AttributeError):  # a class of no package, or a script's
        return ""


def parse(text: str, where: str) -> Expectations:
    """The lists from TOML text; ``where`` names it in messages."""
    try:
        document: Mapping[str, Any] = tomlkit.parse(text).unwrap()
    except tomlkit.exceptions.TOMLKitError as error:
        raise ValueError(f"{where} is not TOML: {error}") from None
    unknown = set(document) - set(_KEYS)
    if unknown:
        raise ValueError(f"{where}: the lists are {', '.join(_KEYS)}; got {sorted(unknown)}")
    entries = []
    for kind in _KEYS:
        rows = document.get(kind, [])
        if not isinstance(rows, list):
            raise ValueError(f"{where}: write [[{kind}]], with two brackets, for each entry")
        entries += [_entry(kind, row, f"{where}, {kind} {n}") for n, row in enumerate(rows, 1)]
    return Expectations(entries)


def _entry(kind: str, row: Any, where: str) -> Entry:
    required, optional = _KEYS[kind], _OPTIONAL[kind]
    if not isinstance(row, dict) or not required <= set(row) <= required | optional:
        got = sorted(row) if isinstance(row, dict) else row
        raise ValueError(
            f"{where}: needs {sorted(required)}, may have {sorted(optional)}; got {got}"
        )
    for key in required - {"until"}:
        if not isinstance(row[key], str) or not row[key].strip():
            raise ValueError(f"{where}: {key} must be text, got {row[key]!r}")
    lack = row.get("capability")
    if lack is not None and lack not in LACKS:
        near = difflib.get_close_matches(lack, LACKS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(LACKS)}"
        raise ValueError(f"{where}: no capability is named {lack!r}; {hint}")
    crash = row.get("crash", False)
    if not isinstance(crash, bool):
        raise ValueError(f"{where}: crash must be true or false, got {crash!r}")
    return Entry(
        kind="unsupported" if kind == "unsupported" else "expected_failure",
        case=row["case"],
        reason=row["reason"],
        capability=lack,
        until=_until(row["until"], where) if "until" in row else None,
        crash=crash,
    )


def _until(value: Any, where: str) -> datetime.date | str:
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return value
    if isinstance(value, str):
        try:
            return datetime.date.fromisoformat(value)
        except ValueError:
            if _VERSION.fullmatch(value):
                return value
    raise ValueError(
        f'{where}: until must be a date ("2027-01-31") or a version ("1.2"), got {value!r}'
    )
