"""When does an answer of a probe still hold? While nothing that it depended on has changed.

That is: the plugin's files, what else is installed, the interpreter, drivers and device nodes, and
the environment. All of it is looked at from outside, without knowing which chip a driver is for;
what else counts, the answer says itself.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import anychip
from anychip.contract import API_VERSION, Probe
from anychip.registry.discovery import Plugin

# Majors of Linux' devices.txt that come and go with logins, terminals, disks and plugs: pty, tty,
# console, vcs, input, sound, Unix98 pty, USB. Every other character device may be a chip.
_VOLATILE_MAJORS = frozenset({2, 3, 4, 5, 7, 13, 116, *range(128, 144), 166, 180, 188, 189, 204})
_VARIABLES = re.compile(
    r"PATH|PYTHON\w*|LD_\w+|TORCH_\w+|OMP_\w+|\w+_(HOME|PATH|ROOT|DIR|DEVICES|CARDS)"
    r"|ANYCHIP_(?!BACKEND|CACHE_DIR|DEBUG|PROBE_TIMEOUT)\w+"
)
_VOLATILE_VARIABLES = re.compile(r"XDG_\w+|TEMP_\w+|PYTEST_\w+")


def surroundings() -> dict[str, Any]:
    """What the answers of all plugins depend on, as JSON values."""
    return {
        "anychip": [anychip.__version__, list(API_VERSION)],
        "python": [sys.executable, sys.version],
        "installed": _installed(),
        "nodes": sorted(_device_nodes(Path("/dev"), depth=2)),
        "drivers": sorted(_driver_versions()),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name) and not _VOLATILE_VARIABLES.fullmatch(name)
        },
    }


def fingerprint(plugin: Plugin, around: dict[str, Any]) -> str:
    """A hash of everything that the plugin's answer depends on."""
    facts = {
        "plugin": [plugin.name, plugin.module, plugin.distribution, plugin.version],
        "record": _record(plugin.distribution),
        "files": sorted(_files(plugin.module)),
        "around": around,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def state(probe: Probe) -> str:
    """A hash of how the variables and files are that an answer says it depends on."""
    facts: dict[str, Any] = {}
    for name in probe.depends:
        if "/" in name:
            facts[name] = [(path, _status(Path(path))) for path in sorted(glob.glob(name))]
        else:
            facts[name] = os.environ.get(name)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


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


def _files(module: str) -> Iterator[tuple[str, int, int]]:
    """Path, size and time of the files of a plugin's top-level package: it may be editable."""
    top_level = module.partition(":")[0].partition(".")[0]
    try:
        found = importlib.util.find_spec(top_level)
    except (ImportError, ValueError):
        found = None
    if found is None:
        return
    roots = list(found.submodule_search_locations or [])
    paths = [Path(found.origin)] if found.origin and not roots else []
    for root in roots:
        paths += [path for path in Path(root).rglob("*") if "__pycache__" not in path.parts]
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            yield str(path), status.st_size, status.st_mtime_ns


def _device_nodes(directory: Path, depth: int) -> Iterator[str]:
    """Character devices below a directory, with their numbers."""
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return
    for entry in entries:
        try:
            mode = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if stat.S_ISDIR(mode.st_mode) and depth > 1:
            yield from _device_nodes(Path(entry.path), depth - 1)
        elif stat.S_ISCHR(mode.st_mode) and os.major(mode.st_rdev) not in _VOLATILE_MAJORS:
            yield f"{entry.path} {os.major(mode.st_rdev)}:{os.minor(mode.st_rdev)}"


def _driver_versions() -> Iterator[str]:
    """Kernel modules that tell their version, and what drivers say below /proc/driver."""
    for pattern in ("/sys/module/*/version", "/proc/driver/*/version"):
        for path in Path("/").glob(pattern.lstrip("/")):
            try:
                yield f"{path} {path.read_text(errors='replace').strip()}"
            except OSError:
                yield f"{path} unreadable"
