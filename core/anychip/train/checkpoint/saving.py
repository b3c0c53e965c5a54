"""What is saved? Of each rank the tensors that it owns, and the little that rank 0 writes for all.

``publishing`` says how it gets to the disk.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anychip.contract import HOST, Communicator
from anychip.train.checkpoint import manifest, randomness
from anychip.train.checkpoint.agreement import gather
from anychip.train.checkpoint.background import Saver
from anychip.train.checkpoint.holders import Held, HeldWithStates, Stateful, holder
from anychip.train.checkpoint.names import Names
from anychip.train.checkpoint.parts import pieces
from anychip.train.checkpoint.publishing import Saving


def save(
    directory: str | Path, *, step: int, model: nn.Module, optimizer: Stateful,
    data: Stateful | None = None, extra: Mapping[str, Any] | None = None,
    names: Names | None = None, comm: Communicator | None = None, keep: int = 1,
    saver: Saver | None = None,
) -> Path:  # fmt: skip
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
        saver: writes while training goes on: this returns when all is copied to host memory, and
            waits before for what the saver still writes. Then an error may be of that checkpoint.

    Raises:
        OSError: it could not be written on some rank, for instance because the disk is full. The
            checkpoint that was there before still is.
        CheckpointError: the folder ``checkpoint`` holds files that are not ours; the ranks see
            different directories.
        DirectoryInUseError: another process saves there, and did not end in ten seconds.
    """
    if saver is not None:
        saver.close()
    saving = Saving(Path(directory) / "checkpoint", step=step, comm=comm, keep=keep)
    _write(saving, saver, partial(_collect, saving, model, optimizer, names, data, extra))
    return saving.path


def _write(saving: Saving, saver: Saver | None, collect: Callable[[], None]) -> None:
    with ExitStack() as stack:
        stack.callback(saving.close)
        saving.tried(saving.take)
        collect()
        if saver is None:
            saving.finish()
        else:
            saving.tried(lambda: saver.copy(saving))
            saver.start(saving)
            stack.pop_all()  # the saver closes it


def _collect(
    saving: Saving,
    model: nn.Module,
    optimizer: Stateful,
    names: Names | None,
    data: Stateful | None,
    extra: Mapping[str, Any] | None,
) -> None:
    """What this rank writes. A collective call."""
    held = holder(model, optimizer, names, 0 if saving.comm is None else saving.comm.rank)
    saving.token = gather(saving.comm, secrets.token_hex(8))[0]
    saving.pieces, saving.about = pieces(held.all_parts()), _about(held)
    everyone = gather(saving.comm, _small(held, model, optimizer), to_rank=0)
    position = None if data is None else data.state_dict()
    saving.progress = {"step": saving.step, "data": position, "extra": dict(extra or {})}
    saving.progress |= _joined(everyone, names)


def _about(held: Held) -> dict[str, Any]:
    """The tensors that a rank writes something of, and what else they are called."""
    written = [part for part in held.all_parts() if part.share is not None]
    tensors = {part.name: (manifest.name_of(part.dtype), part.shape) for part in written}
    return {"stage": held.stage, "tensors": tensors, "aliases": held.aliases}


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
