"""How does a checkpoint get to the disk, so that it is complete or not there?

Rank 0 takes the folder, each rank writes what it owns, and rank 0 publishes the manifest when all
of that is on the disk. Ranks talk before and after, and not while they write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anychip.contract import HOST, Communicator
from anychip.runtime import on_host
from anychip.train import files, lock
from anychip.train.checkpoint import folder, manifest, randomness, writing
from anychip.train.checkpoint.agreement import attempt, gather, is_first
from anychip.train.checkpoint.boxes import Box
from anychip.train.checkpoint.holders import Held, HeldWithStates, Stateful, holder
from anychip.train.checkpoint.manifest import File, Stored, StoredTensor, TensorFile
from anychip.train.checkpoint.names import Names
from anychip.train.checkpoint.parts import pieces

WAIT_S = 10.0
"""For another process that saves into the same directory."""


def save(
    directory: str | Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: Stateful,
    data: Stateful | None = None,
    extra: Mapping[str, Any] | None = None,
    names: Names | None = None,
    comm: Communicator | None = None,
    keep: int = 1,
) -> Path:
    """Replaces the checkpoint in a directory and returns its folder.

    The states of torch's generators (the host's, and that of the model's device) and of Python's
    go with it, those of every rank. With several ranks a collective call: all write what they own
    into the one directory that all of them see, and all return when the checkpoint is there.

    Args:
        directory: of the run; made when it is not there.
        step: updates done.
        model: or this rank's stage of it.
        optimizer: with :class:`anychip.train.zero.Optimizer` each rank writes its part; with any
            other one rank 0 writes all.
        data: the loader, for its position.
        extra: tensors, numbers, texts, lists and dicts, given back by :func:`resume`.
        names: of the whole model, when ranks hold stages of it.
        comm: all ranks of the job; None: this is the only one.
        keep: so many of the last checkpoints stay.

    Raises:
        OSError: it could not be written on some rank, for instance because the disk is full. The
            checkpoint that was there before still is.
        CheckpointError: the folder ``checkpoint`` holds files that are not ours.
        DirectoryInUseError: another process saves there, and did not end in ten seconds.
    """
    path, first = Path(directory) / "checkpoint", is_first(comm)
    held = holder(model, optimizer, names, 0 if comm is None else comm.rank)
    with ExitStack() as stack:
        tried: Callable[[Callable[[], Any]], Any] = partial(_tried, path, step, comm)
        tried((lambda: _take(path, stack)) if first else _nothing)
        everyone = gather(comm, _small(held, model, optimizer), to_rank=0)
        written = tried(lambda: writing.write_tensors(path, pieces(held.all_parts())))
        listed = gather(comm, _listed(held, written), to_rank=0)
        position = None if data is None else data.state_dict()
        progress = {"step": step, "data": position, "extra": dict(extra or {})}
        progress |= _joined(everyone, names)
        tried((lambda: _publish(path, step, progress, listed, keep)) if first else _nothing)
    return path


def _nothing() -> None:
    pass


def _tried(path: Path, step: int, comm: Communicator | None, action: Callable[[], Any]) -> Any:
    """Attempts something; an OSError then says of which checkpoint, and what of the one before."""
    try:
        return attempt(comm, action)
    except OSError as error:
        before = (
            "the one before is intact" if folder.has_manifest(path) else "there was none before"
        )
        cause: Any = error.__cause__ if isinstance(error.__cause__, OSError) else error
        text = f"the checkpoint of step {step} was not written; {before}: {cause.strerror}"
        raise files.NotWrittenError(error.errno, text, str(path)) from error


def _take(path: Path, stack: ExitStack) -> None:
    """The folder is this job's until the stack ends; then nothing is left of a save that failed."""
    folder.require_ours(path)
    path.mkdir(parents=True, exist_ok=True)
    stack.enter_context(lock.hold(path, wait_s=WAIT_S))
    stack.callback(_clean, path)


def _clean(path: Path) -> None:
    # Why it failed has been said, and what is left over the next save removes.
    with suppress(OSError, folder.CheckpointError):
        _sweep(path, list(folder.older(path).values()))


def _sweep(path: Path, older: Sequence[str]) -> None:
    """Leaves what the last manifest and some older ones name."""
    named = [lock.NAME]
    for name in [folder.MANIFEST, *older] if folder.has_manifest(path) else []:
        named += [name, *manifest.read(path, name).names]
    folder.sweep(path, keep=named)


def _kept(path: Path, step: int, count: int) -> list[str]:
    """The last manifests before a step that are whole; what is not before it, a run has left."""
    found: list[str] = []
    for before, name in folder.older(path).items():
        if before < step and len(found) < count:
            with suppress(folder.CheckpointError):
                manifest.read(path, name)
                found.append(name)
    return found


def _small(held: Held, model: nn.Module, optimizer: Stateful) -> dict[str, Any]:
    """What rank 0 writes for this rank, beside tensors."""
    states: dict[str, Any] = {}
    if isinstance(held, HeldWithStates):
        if held.rank == 0:
            states["named"] = held.settings()
    elif held.rank == 0:
        states["whole"] = optimizer.state_dict()
    return {
        "random": randomness.state(device_of(model)),
        "optimizer": states,
        "others": held.others if held.rank == 0 else {},
    }


def device_of(model: nn.Module) -> torch.device:
    """Where a model is."""
    return next((p.device for p in model.parameters()), torch.device(HOST))


def _joined(everyone: Sequence[Mapping[str, Any]], names: Names | None) -> dict[str, Any]:
    """What the ranks have told; nothing on those that were not told."""
    if not everyone:
        return {}
    stages = [each["optimizer"] for each in everyone if each["optimizer"]]
    others: dict[str, Any] = {}
    for each in reversed(everyone):
        others |= each["others"]
    state = stages[0]
    if names is not None and "named" in state:
        found = [group for stage in stages for group in stage["named"]["param_groups"]]
        groups = [_whole_group(group, found) for group in names.groups]
        state = {"named": {**state["named"], "param_groups": groups}}
    return {"random": [each["random"] for each in everyone], "optimizer": state, "others": others}


def _whole_group(names: Sequence[str], found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    for group in found:
        if group["params"] and group["params"][0] in names:
            return {**group, "params": list(names)}
    raise AssertionError(f"no stage has a parameter of {list(names)}")


def _listed(held: Held, written: writing.Written) -> torch.Tensor:
    """What a rank has written, as bytes: only rank 0 gets them."""
    content = {
        "stage": held.stage,
        "files": written.files,
        "boxes": written.boxes,
        "tensors": {
            part.name: (manifest.name_of(part.dtype), part.shape)
            for part in held.all_parts()
            if part.share is not None
        },
        "aliases": held.aliases,
    }
    return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


def _publish(
    path: Path,
    step: int,
    progress: Mapping[str, Any],
    listed: Sequence[torch.Tensor],
    keep: int,
) -> None:
    tensors: dict[str, StoredTensor] = {}
    stages: dict[str, int] = {}
    aliases: dict[str, str] = {}
    tensor_files: dict[str, TensorFile] = {}
    found = [json.loads(on_host(each).numpy().tobytes()) for each in listed]
    for mine in sorted(found, key=lambda each: int(each["stage"])):
        tensor_files |= {name: TensorFile(*about) for name, about in mine["files"].items()}
        aliases |= mine["aliases"]
        for name, (dtype, shape) in mine["tensors"].items():
            # What several stages have (a buffer) is saved as the first of them has it.
            if stages.setdefault(name, mine["stage"]) == mine["stage"]:
                tensors.setdefault(name, StoredTensor(manifest.BY_NAME[dtype], tuple(shape), []))
        for name, (box, *where) in mine["boxes"]:
            if stages[name] == mine["stage"]:
                tensors[name].stored.append(Stored(Box(*map(tuple, box)), *where))
    for name, first in aliases.items():
        tensors.setdefault(name, tensors[first])
    file: File = writing.write_values(path, "progress", progress)
    if keep > 1:
        manifest.keep_as_older(path)
    manifest.write(path, step, file, tensors, tensor_files)
    _sweep(path, _kept(path, step, keep - 1))
