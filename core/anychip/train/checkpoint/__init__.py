"""What survives the process: a checkpoint that is complete or not there, and resume bit for bit.

``DIRECTORY/checkpoint`` holds three files of tensors, named by their content, and a manifest that
names them with sizes and hashes. A save writes new files beside the old ones and then replaces the
manifest by one atomic rename: whenever the process or the machine stops, the manifest names one
complete checkpoint. One process saves at a time. Loading verifies the hashes and the form of
everything, runs no code from the files, and changes something only when all of it fits.

A checkpoint holds whole tensors, whatever they were partitioned over, so that it loads at another
number of ranks. Rank 0 writes it, and every rank reads it. Checkpoints written by all ranks, or
while training goes on, are not part of this version.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import random
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, cast

import torch
from torch import nn

import anychip
from anychip import runtime
from anychip.comm import gather_objects
from anychip.contract import HOST, AnychipError, Communicator
from anychip.train import files, lock, schema

FORMAT = "anychip-checkpoint"
VERSION = 2
PARTS = ("model", "optimizer", "progress")
WAIT_S = 10.0
"""For another process that saves into the same directory."""

_PART = r"(?:model|optimizer|progress)-[0-9a-f]{16}\.pt"
_OURS = re.compile(rf"{_PART}|manifest\.json|\.lock|.*\.partial")
_CHUNK = 1 << 20

_NAME = schema.Check(
    "a name like model-0123456789abcdef.pt",
    lambda value: type(value) is str and re.fullmatch(_PART, value) is not None,
)
_FILE = {"name": _NAME, "nbytes": schema.COUNT, "sha256": str}
_MANIFEST = {"step": schema.COUNT, "files": dict.fromkeys(PARTS, _FILE)}
_DEVICE = {"device": schema.optional(schema.BYTES), "device_type": str}
_PROGRESS = {
    "step": schema.COUNT,
    "data": schema.optional(schema.Check("a dict", lambda value: isinstance(value, dict))),
    "random": [{"host": schema.BYTES, "python": tuple, **_DEVICE}],
    "extra": {str: schema.ANY},
}
_STATES = {"model": {str: schema.ANY}, "optimizer": {}, "progress": _PROGRESS}


class CheckpointError(AnychipError, ValueError):
    """A checkpoint is damaged, belongs to something else, or was made by a newer version."""


class Stateful(Protocol):
    """What has a state that can be saved: an optimizer, a loader.

    One with ``check_state_dict``, which raises ValueError for what ``load_state_dict`` would not
    take, is asked before anything is loaded into anything.
    """

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
    rank 0 writes, and all return when the checkpoint is there. Where ``state_dict`` takes
    ``to_rank``, only rank 0 holds what it gathers.

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
        DirectoryInUseError: another process saves there, and did not end in ten seconds.
    """
    folder, model = Path(directory) / "checkpoint", _holder(model, optimizer)
    states = {
        "model": _state_of(model, comm),
        "optimizer": _state_of(optimizer, comm),
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


def _holder(model: nn.Module | Model, optimizer: Stateful) -> nn.Module | Model:
    """What has the values of a model: an optimizer may have taken its weights apart."""
    stands_for = getattr(optimizer, "stands_for", None)
    return model if stands_for is None else cast(Model, stands_for(model))


def _state_of(target: Stateful, comm: Communicator | None) -> dict[str, Any]:
    gathers = "to_rank" in inspect.signature(target.state_dict).parameters
    return cast(Any, target).state_dict(to_rank=0) if comm and gathers else target.state_dict()


def _write(folder: Path, step: int, states: Mapping[str, Any]) -> None:
    _require_ours(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock.hold(folder, wait_s=WAIT_S):
            _replace(folder, step, states)
    except OSError as error:
        before = "the one before is intact" if _names_of(folder) else "there was none before"
        cause: Any = error.__cause__ if isinstance(error, files.NotWrittenError) else error
        text = f"the checkpoint of step {step} was not written; {before}: {cause.strerror}"
        raise files.NotWrittenError(error.errno, text, str(folder)) from error


def _replace(folder: Path, step: int, states: Mapping[str, Any]) -> None:
    try:
        _write_manifest(folder, step, {p: _write_part(folder, p, states[p]) for p in PARTS})
    finally:
        _sweep(folder, keep=[*_names_of(folder), lock.NAME])


def saved_step(directory: str | Path) -> int | None:
    """The step of the checkpoint in a directory by its manifest; None: there is none.

    Raises:
        CheckpointError: the manifest is damaged, or of a newer version.
    """
    folder = Path(directory) / "checkpoint"
    return int(_read_manifest(folder)["step"]) if _has_manifest(folder) else None


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
    if not _has_manifest(folder):
        _require_ours(folder)
        return State(0, {})
    states, model = _read(folder), _holder(model, optimizer)
    progress, rank = states["progress"], 0 if comm is None else comm.rank
    randoms = progress["random"][rank] if rank < len(progress["random"]) else None
    targets = {"optimizer": optimizer} if data is None else {"data": data, "optimizer": optimizer}
    states["data"] = progress["data"]
    if randoms is not None:
        check_randoms = partial(_check_random_state, device=_device_of(model))
        _hand_over(folder, "generators", check_randoms, randoms)
    _check_model(folder, model, states["model"])
    if data is not None and progress["data"] is None:
        raise _error(folder, "it was saved without a position in the data")
    for name, target in targets.items():
        if check := getattr(target, "check_state_dict", None):
            _hand_over(folder, name, check, states[name])
    for name, target in targets.items():
        _hand_over(folder, name, target.load_state_dict, states[name])
    model.load_state_dict(states["model"])
    if randoms is not None:
        _set_random_state(randoms, _device_of(model))
    return State(progress["step"], progress["extra"])


def _hand_over(folder: Path, name: str, take: Callable[..., Any], state: dict[str, Any]) -> None:
    try:
        take(state)
    except (ValueError, KeyError, TypeError) as error:
        raise _error(folder, f"it does not fit the {name}: {error}") from error


class _HashingFile:
    """A file for torch.save that hashes what goes by.

    torch's writer turns an OSError into a RuntimeError that says nothing of a full disk; ``error``
    keeps it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
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
    with files.fresh(folder / part) as file:
        writer = _HashingFile(file)
        try:
            torch.save(state, cast(IO[bytes], writer))
        except RuntimeError:
            if writer.error is None:
                raise
            raise writer.error from None
        digest = writer.hash.hexdigest()
        # Named by content: a file with this name already is this file.
        name = f"{part}-{digest[:16]}.pt"
        files.sync(file).replace(folder / name)
    return {"name": name, "nbytes": writer.nbytes, "sha256": digest}


def _write_manifest(folder: Path, step: int, entries: Mapping[str, Any]) -> None:
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "anychip": anychip.__version__,
        "torch": torch.__version__,
        "files": entries,
    }
    _sync_folder(folder)  # the files' names are on the disk before the manifest that has them
    files.write(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _has_manifest(folder: Path) -> bool:
    return os.path.lexists(folder / "manifest.json")


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, in its form.

    Raises:
        CheckpointError: it is damaged, not ours, or of another version.
    """
    try:
        with files.open_to_read(folder / "manifest.json") as file:
            manifest = json.loads(file.read().decode("utf-8"))
        schema.check(manifest, {"format": schema.ANY}, "manifest.json")
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {FORMAT!r} expected, got {manifest['format']!r:.40}")
        if manifest.get("version") != VERSION:
            schema.check(manifest, {"version": schema.ANY, "anychip": str}, "manifest.json")
            raise ValueError(
                f"it has version {manifest['version']!s:.40} of the format, written by anychip "
                f"{manifest['anychip']:.40}; this is anychip {anychip.__version__}, which reads "
                f"version {VERSION}"
            )
        schema.check(manifest, _MANIFEST, "manifest.json")
        manifest["files"] = {part: manifest["files"][part] for part in PARTS}
    except (ValueError, RecursionError) as error:
        raise _error(folder, f"manifest.json is damaged, or is not ours: {error}") from error
    except OSError as error:
        raise _error(folder, f"manifest.json cannot be read: {error.strerror}") from error
    return cast(dict[str, Any], manifest)


def _names_of(folder: Path) -> list[str]:
    """The files that the manifest names, and itself; none when there is no manifest."""
    if not _has_manifest(folder):
        return []
    entries = _read_manifest(folder)["files"].values()
    return ["manifest.json", *(entry["name"] for entry in entries)]


def _read(folder: Path) -> dict[str, Any]:
    """The parts, verified, and of their form.

    Raises:
        CheckpointError: a file is missing or damaged, or holds something else.
    """
    with ExitStack() as stack:
        step, opened = _open_parts(folder, stack)
        for entry, file in opened.values():
            _verify(folder, entry, file)
        states = {part: _load(folder, *opened[part]) for part in PARTS}
    for part, form in _STATES.items():
        try:
            schema.check(states[part], form, part)
        except ValueError as error:
            raise _error(folder, f"it holds something else: {error}") from error
    if states["progress"]["step"] != step:
        raise _error(folder, f"manifest.json has step {step}, and progress another one")
    return states


def _open_parts(
    folder: Path, stack: ExitStack
) -> tuple[int, dict[str, tuple[Mapping[str, Any], IO[bytes]]]]:
    """The step, and each part's entry and file: readable when another save takes its name away."""
    manifest = _read_manifest(folder)
    opened = {}
    for part, entry in manifest["files"].items():
        try:
            file = files.open_to_read(folder / entry["name"])
        except FileNotFoundError:
            if _read_manifest(folder) != manifest:
                return _open_parts(folder, stack)  # there is a newer one by now
            raise _error(folder, f"{entry['name']} is missing") from None
        except OSError as error:
            raise _error(folder, f"{entry['name']} cannot be read: {error.strerror}") from error
        opened[part] = (entry, stack.enter_context(file))
    return manifest["step"], opened


def _verify(folder: Path, entry: Mapping[str, Any], file: IO[bytes]) -> None:
    nbytes = os.fstat(file.fileno()).st_size
    if nbytes != entry["nbytes"]:
        raise _error(folder, f"{entry['name']} has {nbytes} bytes, {entry['nbytes']} were written")
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    if digest.hexdigest() != entry["sha256"]:
        raise _error(folder, f"the content of {entry['name']} is not what was written")
    file.seek(0)


def _load(folder: Path, entry: Mapping[str, Any], file: IO[bytes]) -> Any:
    try:
        return torch.load(file, map_location=HOST, weights_only=True)
    except Exception as error:  # what torch raises for a file that somebody made has no end
        text = str(error).partition("\n")[0][:200]
        raise _error(folder, f"{entry['name']} cannot be read: {text}") from error


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
    if value.layout != torch.strided or value.is_quantized or value.is_nested or value.is_meta:
        return f"a tensor of the layout {value.layout}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _error(folder: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {folder} cannot be loaded: {problem}\n"
        "  nothing was changed; use the settings it was made with, or begin anew in another "
        "directory"
    )


def _require_ours(folder: Path) -> None:
    """A folder that somebody else filled is left alone, and one that is somewhere else."""
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


def _sweep(folder: Path, *, keep: Iterable[str]) -> None:
    """Removes files of earlier checkpoints and of saves that did not come to their end."""
    kept = set(keep)
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in kept:
            path.unlink()


def _device_of(model: nn.Module | Model) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device(HOST))


def _random_state(device: torch.device) -> dict[str, Any]:
    states = {"host": torch.get_rng_state(), "python": random.getstate(), "device": None}
    if device.type != HOST:
        states["device"] = runtime.owner(device.type).random_state(device.index)
    return {**states, "device_type": device.type}


def _of_all_ranks(state: dict[str, Any], comm: Communicator | None) -> list[dict[str, Any]]:
    return [state] if comm is None else gather_objects(comm, state, to_rank=0)


def _check_random_state(states: Mapping[str, Any], device: torch.device) -> None:
    try:
        torch.Generator().set_state(states["host"])
        random.Random().setstate(states["python"])
    except Exception as error:  # they take what they made, and have no type for the rest
        raise ValueError(f"no state of a generator: {error}") from error
    mine, saved = _describe(_random_state(device)["device"]), _describe(states["device"])
    if states["device_type"] == device.type and mine != saved:
        raise ValueError(f"a device's generator with {mine} expected, got {saved}")


def _set_random_state(states: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["host"])
    random.setstate(states["python"])
    # The state of one chip's generator means nothing to another's.
    if states["device"] is not None and states["device_type"] == device.type:
        runtime.owner(device.type).set_random_state(states["device"], device.index)
