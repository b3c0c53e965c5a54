"""When does an answer of a probe still hold? While nothing that it depended on has changed.

That is: the plugin's files, what else is installed, the interpreter, and the variables and files
that the answer names. Nothing is guessed: an answer that names nothing is not kept.
"""

import glob
import hashlib
import importlib.util
import json
import os
import sys
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

import anychip
from anychip.contract import API_VERSION, Probe
from anychip.registry.discovery import Plugin


def surroundings() -> list[Any]:
    """What the answers of all plugins depend on, as JSON values."""
    return [anychip.__version__, list(API_VERSION), sys.executable, sys.version, _installed()]


def fingerprint(plugin: Plugin, around: list[Any]) -> str:
    """A hash of everything that the plugin's answer depends on, but for what it names itself."""
    origin = [plugin.name, plugin.module, plugin.distribution, plugin.version]
    files = [(str(path), _status(path)) for path in sorted(_files(plugin.module))]
    return _hash([origin, _record(plugin.distribution), files, around])


def _hash(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def state(probe: Probe) -> str:
    """A hash of how the variables and files are that an answer says it depends on."""
    facts: dict[str, Any] = {}
    for name in probe.depends or ():
        if "/" in name:
            facts[name] = [(path, _status(Path(path))) for path in sorted(glob.glob(name))]
        else:
            facts[name] = {k: v for k, v in os.environ.items() if fnmatchcase(k, name)}
    return _hash(facts)


def _status(path: Path) -> tuple[int, ...] | None:
    """What of a file tells that it changed; a device is written to, and stays the same."""
    try:
        found = path.stat()
    except OSError:
        return None
    changes = (found.st_size, found.st_mtime_ns) if found.st_rdev == 0 else ()
    return found.st_mode, found.st_rdev, found.st_ino, *changes


def _installed() -> list[str]:
    """Names of the metadata directories on sys.path; they hold distribution names and versions."""
    found: list[str] = []
    for directory in sys.path:
        try:
            names = os.listdir(directory or ".")
        except OSError:  # zip archives and paths that are not there
            continue
        found += [name for name in names if name.endswith((".dist-info", ".egg-info"))]
    return sorted(found)


def _record(distribution: str) -> str:
    try:
        return metadata.distribution(distribution).read_text("RECORD") or ""
    except metadata.PackageNotFoundError:
        return ""


def _files(module: str) -> list[Path]:
    """The files of a plugin's top-level package: it may be editable."""
    top_level = module.partition(":")[0].partition(".")[0]
    try:
        found = importlib.util.find_spec(top_level)
    except (ImportError, ValueError):
        found = None
    if found is None:
        return []
    roots = list(found.submodule_search_locations or [])
    if not roots:
        return [Path(found.origin)] if found.origin else []
    every = [path for root in roots for path in Path(root).rglob("*")]
    return [path for path in every if "__pycache__" not in path.parts and path.is_file()]
