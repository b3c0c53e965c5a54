"""Which answers of probes are known from an earlier process? One JSON file, keyed by fingerprint.

A cache may be missing, unwritable or damaged; it is then as if it were empty, and plugins are
probed again. What makes an answer out of date is the business of :mod:`.fingerprint`.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from anychip.contract import Probe, Status
from anychip.registry import environment

SCHEMA = 1
LIFETIME_S: Mapping[str, float] = {
    "ready": 86400,
    "incompatible": 86400,
    "unavailable": 3600,
    "broken": 60,  # often the moment's: a full disk, a loaded machine
}


def read() -> dict[str, Probe]:
    """The answers that have not expired, by fingerprint."""
    return {key: probe for key, (probe, _) in _read_entries().items()}


def write(answers: Mapping[str, Probe]) -> None:
    """Adds answers by fingerprint; expired ones are left out of the new file."""
    now = time.time()
    entries = {**_read_entries(), **{key: (probe, now) for key, probe in answers.items()}}
    content = {
        "schema": SCHEMA,
        "answers": {
            key: {"time": when, "probe": probe.to_json()} for key, (probe, when) in entries.items()
        },
    }
    try:
        _replace(_path(), json.dumps(content, indent=1))
    except OSError:
        return  # a read-only home: the next process probes again


def _path() -> Path:
    return environment.cache_directory() / "probes.json"


def _read_entries() -> dict[str, tuple[Probe, float]]:
    try:
        content = json.loads(_path().read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            return {}
        known = {key: _entry(value) for key, value in content["answers"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return {key: entry for key, entry in known.items() if _is_fresh(*entry)}


def _entry(value: Mapping[str, Any]) -> tuple[Probe, float]:
    probe = Probe(**value["probe"])
    if probe.status not in get_args(Status) or not isinstance(probe.reason, str):
        raise ValueError(f"not an answer of a probe: {probe}")
    return probe, float(value["time"])


def _is_fresh(probe: Probe, when: float) -> bool:
    # A time in the future means that the clock was set back; such an answer has no known age.
    return 0 <= time.time() - when <= LIFETIME_S[probe.status]


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
