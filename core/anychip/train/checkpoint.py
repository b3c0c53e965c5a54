"""What survives the process: a checkpoint that is complete or not there, and resume bit for bit.

``DIRECTORY/checkpoint`` holds three files of tensors, named by their content, and a manifest that
names them with sizes and hashes. A save writes new files beside the old ones and then replaces the
manifest by one atomic rename: whenever the process or the machine stops, the manifest names one
complete checkpoint. Loading verifies the hashes and runs no code from the files.

A checkpoint holds whole tensors, whatever they were partitioned over, so that it loads at another
number of ranks. Rank 0 writes it, and every rank reads it. Checkpoints written by all ranks, or
while training goes on, are not part of this version.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, cast

import torch
from torch import nn

import anychip
from anychip.contract import AnychipError, Communicator
from anychip.contract.collectives import gather_objects

FORMAT = "anychip-checkpoint"
VERSION = 2
PARTS = ("model", "optimizer", "progress")

_OURS = re.compile(r"(?:model|optimizer|progress)-[0-9a-f]{16}\.pt|manifest\.json|.*\.partial")
_CHUNK = 1 << 20


class CheckpointError(AnychipError, RuntimeError):
    """A checkpoint is damaged, belongs to something else, or was made by a newer version."""


class Stateful(Protocol):
    """What has a state that can be saved: an optimizer, a loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Model(Stateful, Protocol):
    """A module, or what stands for a model that several ranks hold."""

    def parameters(self) -> Iterable[torch.Tensor]: ...


class State(NamedTuple):
    """Where a run goes on.

    Attributes:
        step: updates done; 0 when there was no checkpoint.
        extra: what was given to :func:`save`.
    """

    step: int
    extra: Mapping[str, Any]


def save(
    directory: str | Path,
    *,
    step: int,
    model: nn.Module | Model,
    optimizer: Stateful,
    data: Stateful | None = None,
    extra: Mapping[str, Any] | None = None,
    comm: Communicator | None = None,
) -> Path:
    """Replaces the checkpoint in a directory and returns its folder.

    The states of torch's generators (the host's, and that of the model's device) and of Python's
    go with it, those of every rank. With several ranks a collective call: all give their states,
    rank 0 writes, and all return when the checkpoint is there.

    Args:
        directory: of the run; made when it is not there.
        step: updates done.
        data: the loader, for its position.
        extra: tensors, numbers, texts, lists and dicts, given back by :func:`resume`.
        comm: all ranks of the job; None: this is the only one.

    Raises:
        OSError: it could not be written, for instance because the disk is full. The checkpoint
            that was there before still is.
        CheckpointError: the folder ``checkpoint`` holds files that are not ours.
    """
    folder = Path(directory) / "checkpoint"
    states = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": {
            "step": step,
            "data": None if data is None else data.state_dict(),
            "random": _of_all_ranks(_random_state(_device_of(model)), comm),
            "extra": dict(extra or {}),
        },
    }
    if comm is None or comm.rank == 0:
        _write(folder, step, states)
    if comm is not None:
        comm.barrier()
    return folder


def _write(folder: Path, step: int, states: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _require_ours(folder)
    try:
        files = {part: _write_part(folder, part, states[part]) for part in PARTS}
        _write_manifest(folder, step, files)
    except OSError as error:
        kept = _names_of(folder)
        _sweep(folder, keep=kept)
        before = "the one before is intact" if kept else "there was none before"
        text = f"the checkpoint of step {step} was not written; {before}: {error.strerror}"
        raise OSError(error.errno, text, str(folder)) from error
    _sweep(folder, keep=_names_of(folder))


def resume(
    directory: str | Path,
    *,
    model: nn.Module | Model,
    optimizer: Stateful,
    data: Stateful | None = None,
    comm: Communicator | None = None,
) -> State:
    """Loads the checkpoint in a directory, if there is one, into what is given.

    Every rank reads the same files and takes its part. At the number of ranks that saved it, each
    goes on with its generators' states; at another one only those do that were there, and the
    others keep the states that they have.

    Raises:
        CheckpointError: the checkpoint is damaged, or is of another model, optimizer or data, or
            of a newer version. The model is as it was, and no file is changed.
    """
    folder = Path(directory) / "checkpoint"
    if not (folder / "manifest.json").exists():
        _require_ours(folder)
        return State(0, {})
    files = _read_manifest(folder)
    for part in PARTS:
        _verify(folder, files[part])
    states = {part: _load(folder / files[part]["name"]) for part in PARTS}
    progress = states["progress"]
    _check_model(folder, model, states["model"])
    if data is not None:
        if progress["data"] is None:
            raise _error(folder, "it was saved without a position in the data")
        _hand_over(folder, "data", data, progress["data"])
    _hand_over(folder, "optimizer", optimizer, states["optimizer"])
    model.load_state_dict(states["model"])
    rank = 0 if comm is None else comm.rank
    if rank < len(progress["random"]):
        _set_random_state(progress["random"][rank], _device_of(model))
    return State(progress["step"], progress["extra"])


def _hand_over(folder: Path, name: str, target: Stateful, state: dict[str, Any]) -> None:
    try:
        target.load_state_dict(state)
    except (ValueError, KeyError) as error:
        raise _error(folder, f"it does not fit the {name}: {error}") from error


class _HashingFile:
    """A file for torch.save that hashes what goes by.

    torch's writer turns an OSError into a RuntimeError that says nothing of a full disk; ``error``
    keeps it.
    """

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")
        self.hash = hashlib.sha256()
        self.nbytes = 0
        self.error: OSError | None = None

    def write(self, chunk: bytes) -> int:
        try:
            self.file.write(chunk)
        except OSError as error:
            self.error = error
            raise
        self.hash.update(chunk)
        self.nbytes += len(chunk)
        return len(chunk)

    def flush(self) -> None:
        self.file.flush()


def _write_part(folder: Path, part: str, state: Any) -> dict[str, Any]:
    """Writes one file, durably, and returns its entry of the manifest."""
    partial = folder / f"{part}.partial"
    writer = _HashingFile(partial)
    with writer.file:
        try:
            torch.save(state, cast(IO[bytes], writer))
        except RuntimeError:
            if writer.error is None:
                raise
            raise writer.error from None
        writer.flush()
        os.fsync(writer.file.fileno())
    digest = writer.hash.hexdigest()
    # Named by content: a file with this name already is this file.
    name = f"{part}-{digest[:16]}.pt"
    partial.replace(folder / name)
    return {"name": name, "nbytes": writer.nbytes, "sha256": digest}


def _write_manifest(folder: Path, step: int, files: Mapping[str, Any]) -> None:
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "anychip": anychip.__version__,
        "torch": torch.__version__,
        "files": files,
    }
    _sync_folder(folder)  # the files' names are on the disk before the manifest that has them
    partial = folder / "manifest.partial"
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(manifest, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / "manifest.json")
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Entries of the files by part."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise _error(folder, f"format {FORMAT!r} expected, got {manifest['format']!r}")
        if manifest["version"] != VERSION:
            raise _error(
                folder,
                f"it has version {manifest['version']} of the format, written by anychip "
                f"{manifest['anychip']}; this is anychip {anychip.__version__}, which reads "
                f"version {VERSION}",
            )
        return {
            part: {key: manifest["files"][part][key] for key in ("name", "nbytes", "sha256")}
            for part in PARTS
        }
    except (ValueError, KeyError, TypeError) as error:
        raise _error(folder, "manifest.json is damaged, or is not ours") from error


def _names_of(folder: Path) -> list[str]:
    """The files that the manifest names, and itself; none when there is no manifest."""
    if not (folder / "manifest.json").exists():
        return []
    return ["manifest.json", *(entry["name"] for entry in _read_manifest(folder).values())]


def _verify(folder: Path, entry: Mapping[str, Any]) -> None:
    path = folder / entry["name"]
    if not path.is_file():
        raise _error(folder, f"{entry['name']} is missing")
    nbytes = path.stat().st_size
    if nbytes != entry["nbytes"]:
        raise _error(folder, f"{entry['name']} has {nbytes} bytes, {entry['nbytes']} were written")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != entry["sha256"]:
        raise _error(folder, f"the content of {entry['name']} is not what was written")


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise _error(path.parent, f"{path.name} cannot be read: {error}") from error


def _check_model(folder: Path, model: nn.Module | Model, saved: Mapping[str, Any]) -> None:
    mine = {name: _describe(value) for name, value in model.state_dict().items()}
    other = {name: _describe(value) for name, value in saved.items()}
    wrong = [name for name in {**mine, **other} if mine.get(name) != other.get(name)]
    if wrong:
        name, more = wrong[0], f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise _error(
            folder,
            f"it is of another model: {name} is {mine.get(name, 'absent')} in this model and "
            f"{other.get(name, 'absent')} in the checkpoint{more}",
        )


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _error(folder: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {folder} cannot be loaded: {problem}\n"
        "  nothing was changed; use the settings it was made with, or another directory"
    )


def _require_ours(folder: Path) -> None:
    """A folder that somebody else filled is left alone."""
    others = (
        [p.name for p in folder.iterdir() if not _OURS.fullmatch(p.name)] if folder.exists() else []
    )
    if others:
        raise CheckpointError(
            f"{folder} is not a checkpoint of anychip: it holds {sorted(others)[0]!r}; nothing was "
            "changed; use another directory"
        )


def _sweep(folder: Path, *, keep: Iterable[str]) -> None:
    """Removes files of earlier checkpoints and of saves that did not come to their end."""
    kept = set(keep)
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in kept:
            path.unlink()


def _device_of(model: nn.Module | Model) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _random_state(device: torch.device) -> dict[str, Any]:
    states = {"host": torch.get_rng_state(), "python": random.getstate(), "device": None}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device.type).get_rng_state(device)
    return {**states, "device_type": device.type}


def _of_all_ranks(state: dict[str, Any], comm: Communicator | None) -> list[dict[str, Any]]:
    return [state] if comm is None else gather_objects(comm, state)


def _set_random_state(states: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["host"])
    random.setstate(states["python"])
    # The state of one chip's generator means nothing to another's.
    if states["device"] is not None and states["device_type"] == device.type:
        torch.get_device_module(device.type).set_rng_state(states["device"], device)
