"""Which answers of probes are known from an earlier process? One JSON file, keyed by fingerprint.

They are for showing, never for choosing. A cache may be missing, unwritable or damaged; it is then
as if it were empty, and plugins are probed again. What makes an answer out of date is the business
of :mod:`.fingerprint`.
"""

import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from anychip.contract import Probe, Status
from anychip.registry import environment, fingerprint

SCHEMA = 2
LIFETIME_S = 86400.0


class Entry(NamedTuple):
    """An answer, when it was given, and how the things were that it says it depends on."""

    probe: Probe
    time: float
    state: str

    def is_whole(self) -> bool:
        """Whether it may be shown: what is broken may be so for the moment only.

        A time in the future means that the clock was set back.
        """
        age_s = time.time() - self.time
        is_kept = self.probe.depends is not None and self.probe.status != "broken"
        return is_kept and fingerprint.state(self.probe) == self.state and 0 <= age_s <= LIFETIME_S


def read() -> dict[str, tuple[Probe, float]]:
    """The answers that may be shown, each with its age in seconds, by fingerprint."""
    now = time.time()
    return {k: (e.probe, now - e.time) for k, e in _read_entries().items() if e.is_whole()}


def write(answers: Mapping[str, Probe]) -> None:
    """Adds answers by fingerprint; those that may not be shown are left out of the new file."""
    now = time.time()
    fresh = {key: Entry(probe, now, fingerprint.state(probe)) for key, probe in answers.items()}
    entries = {key: e for key, e in {**_read_entries(), **fresh}.items() if e.is_whole()}
    content = {
        "schema": SCHEMA,
        "answers": {
            key: {**entry._asdict(), "probe": entry.probe.to_json()}
            for key, entry in entries.items()
        },
    }
    try:
        _replace(_path(), json.dumps(content, indent=1))
    except OSError:
        return  # a read-only home: the next process probes again


def _path() -> Path:
    return environment.cache_directory() / "probes.json"


def _read_entries() -> dict[str, Entry]:
    try:
        content = json.loads(_path().read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            return {}
        return {key: _entry(value) for key, value in content["answers"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _entry(value: Mapping[str, Any]) -> Entry:
    probe = Probe.from_json(value["probe"])
    texts = (probe.reason, *(probe.depends or ()))
    if probe.status not in get_args(Status) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"not an answer of a probe: {probe}")
    return Entry(probe, float(value["time"]), value["state"])


def _replace(path: Path, text: str) -> None:
    """Writes a file so that readers see the old or the new text, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(unfinished, path)
    except OSError:
        os.unlink(unfinished)
        raise
