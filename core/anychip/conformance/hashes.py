"""Which suite asked, and which plugin answered? Hashes of their files.

Not a signature: whoever changes a file and the report can make both agree. They tell two versions
apart that carry one number.
"""

import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

from anychip import registry
from anychip.cabi import Library
from anychip.contract import Backend

SUITE = Path(__file__).parent


def digest(parts: Iterable[str]) -> str:
    """SHA-256 of some texts, each ended by a zero byte."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.encode() + b"\0")
    return found.hexdigest()


@cache
def suite_hash() -> str:
    """Of every file of this package: cases, oracles, bounds and their data."""
    return _hash_files({str(path.relative_to(SUITE)): path for path in _below(SUITE)})


def plugin_hash(backend: Backend) -> str | None:
    """Of the files that the plugin's distribution recorded, and of its package's.

    An editable installation records no modules, hence the package. None for a backend that was
    handed over as an object: nobody else has those files.
    """
    distribution, version = registry.provenance_of(backend)
    if version == "not installed":
        return None
    if isinstance(backend, Library):
        own = {backend.table.path.name: backend.table.path}
        is_packaged = distribution != backend.table.path.name
        return _hash_files({**dict(_recorded(distribution) if is_packaged else ()), **own})
    package = type(backend).__module__.partition(".")[0]
    return _hash_files({**dict(_recorded(distribution)), **dict(_package(package))})


def distribution_hash(distribution: str) -> str:
    """Of the files that a distribution recorded."""
    return _hash_files(dict(_recorded(distribution)))


def _hash_files(files: dict[str, Path]) -> str:
    return digest(
        part
        for name, path in sorted(files.items())
        for part in (name, hashlib.sha256(path.read_bytes()).hexdigest())
    )


def _recorded(distribution: str) -> Iterator[tuple[str, Path]]:
    """What RECORD lists, but for what the installer and the interpreter made here."""
    for file in metadata.distribution(distribution).files or ():
        path = Path(str(file.locate()))
        top = file.parts[0]
        if top.endswith(".dist-info") and file.name not in ("METADATA", "entry_points.txt"):
            continue
        made_here = top == ".." or "editable" in top or path.suffix in (".pyc", ".pth")
        if not made_here and path.is_file():
            yield file.as_posix(), path


def _package(name: str) -> Iterator[tuple[str, Path]]:
    found = importlib.util.find_spec(name)
    if found is None:
        return
    if not found.submodule_search_locations and found.origin is not None:
        yield Path(found.origin).name, Path(found.origin)
    for root in found.submodule_search_locations or ():
        for path in _below(Path(root)):
            yield f"{name}/{path.relative_to(root).as_posix()}", path


def _below(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path
