"""What may be in the folder of a checkpoint, and what does an error about it say?"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from anychip.contract import AnychipError

MANIFEST = "manifest.json"

FILE = re.compile(
    r"(?:model|optimizer|progress)-[0-9a-f]{16}\.pt|tensors-[0-9a-f]{16}\.safetensors"
)
"""Names of what a manifest may name, by content: no path, and nothing outside the folder."""

_OURS = re.compile(rf"{FILE.pattern}|manifest(?:-\d{{1,19}})?\.json|\.lock|.*\.partial")


class CheckpointError(AnychipError, ValueError):
    """A checkpoint is damaged, belongs to something else, or was made by a newer version."""


def refusal(folder: Path, problem: str) -> CheckpointError:
    """Of a checkpoint that is there and cannot be loaded."""
    return CheckpointError(
        f"checkpoint {folder} cannot be loaded: {problem}\n"
        "  nothing was changed; use the settings it was made with, or begin anew in another "
        "directory"
    )


def require_ours(folder: Path) -> None:
    """A folder that somebody else filled is left alone, and one that is somewhere else.

    Raises:
        CheckpointError: it is one of these.
    """
    if folder.is_symlink():
        raise CheckpointError(
            f"{folder} is a link, which is not followed; nothing was changed; make the directory "
            "above it a link, or use another one"
        )
    others = (
        [p.name for p in folder.iterdir() if not _OURS.fullmatch(p.name)] if folder.exists() else []
    )
    if others:
        raise CheckpointError(
            f"{folder} is not a checkpoint of anychip: it holds {sorted(others)[0]!r}; nothing was "
            "changed; use another directory"
        )


def has_manifest(folder: Path) -> bool:
    """Whether there is a checkpoint, damaged or not."""
    return os.path.lexists(folder / MANIFEST)


def older(folder: Path) -> dict[int, str]:
    """The manifests of checkpoints before the last one that are kept: by step, the last first."""
    found = [re.fullmatch(r"manifest-(\d{1,19})\.json", path.name) for path in folder.iterdir()]
    steps = {int(match[1]): match[0] for match in found if match is not None}
    return dict(sorted(steps.items(), reverse=True))


def sweep(folder: Path, *, keep: Iterable[str]) -> None:
    """Removes files of earlier checkpoints and of saves that did not come to their end."""
    kept = set(keep)
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in kept:
            path.unlink()


def sync(folder: Path) -> None:
    """Brings the names of its files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
