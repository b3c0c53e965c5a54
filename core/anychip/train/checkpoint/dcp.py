"""Checkpoints of ours for torch.distributed.checkpoint, and its checkpoints for us.

torch's own ``FileSystemReader`` takes a ``.metadata`` that is a pickle, and files of pickles; its
``HuggingFaceStorageReader`` takes each tensor's parts from files that have its name once, and loses
the shape where the last part is not there. :class:`Reader` is therefore one of ours.

Not imported with the package: torch.distributed.checkpoint takes a second.

torch reads ``.metadata`` with all that a pickle may do. Here it is read with what torch writes into
it, and nothing else.

Source: torch 2.13, ``torch/distributed/checkpoint``: storage.py, planner_helpers.py.
"""

import os
import pickle
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from anychip.contract import HOST, Communicator
from anychip.train.checkpoint import boxes, foreign, reading
from anychip.train.checkpoint.boxes import Box
from anychip.train.checkpoint.folder import CheckpointError
from anychip.train.checkpoint.holders import Held, Stateful
from anychip.train.checkpoint.manifest import Stored, StoredTensor
from anychip.train.checkpoint.names import Names, of_model
from anychip.train.checkpoint.parts import Part


def _name_in_torch(name: str) -> str:
    """``optimizer.NAME.STATE`` is ``optimizer.state.NAME.STATE`` there."""
    rest = name.removeprefix("optimizer.")
    return name if rest == name else f"optimizer.state.{rest}"


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


class Reader(StorageReader):
    """Lets ``torch.distributed.checkpoint.load`` read a checkpoint of ours.

    ``dcp.load({"model": model_state, "optimizer": {"state": states}}, storage_reader=Reader(out))``
    with states as torch's ``get_optimizer_state_dict`` has them; on any mesh. Each rank reads the
    boxes that meet its own, and compares their hashes while it loads. No pickle is read.

    Args:
        directory: that was given to :func:`~anychip.train.checkpoint.save`.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._stack = ExitStack()
        self.reset(directory)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """As torch's: another directory."""
        self._stack.close()
        if checkpoint_id is not None:
            self.checkpoint_id = Path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Opens the checkpoint that is there; the files stay open until they are read.

        Raises:
            CheckpointError: there is none, it is damaged, or of version 2.
        """
        self._stack.close()
        path = self.checkpoint_id / "checkpoint"
        self._opened = reading.open_files(path, None, self._stack)
        tensors = self._opened.manifest.tensors
        if not tensors:
            raise CheckpointError(f"{path} has no tensors in boxes; load it, and save it anew")
        self._ours = {_name_in_torch(name): name for name in tensors}
        found: dict[str, STORAGE_TYPES] = {
            name: _described(tensors[ours]) for name, ours in self._ours.items()
        }
        return Metadata(found, storage_data=self._opened.manifest.digest)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *a: Any, **k: Any
    ) -> None:
        """Nothing is left to be done."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Says which checkpoint this rank sees."""
        plan.storage_data = self._opened.manifest.digest
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises CheckpointError when the ranks see different checkpoints."""
        if len({plan.storage_data for plan in plans}) > 1:
            raise CheckpointError(f"{self.checkpoint_id}: the ranks see different checkpoints")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads each box once, in the order of the file.

        Raises:
            CheckpointError: its bytes are not those that were written.
        """
        wanted: dict[tuple[str, int], tuple[str, Stored, list[ReadItem]]] = {}
        for item in plan.items:
            name = self._ours[item.storage_index.fqn]
            stored = self._stored(name, item.storage_index)
            wanted.setdefault((stored.file, stored.offset), (name, stored, []))[2].append(item)
        with self._stack:
            for _, (name, stored, items) in sorted(wanted.items(), key=lambda entry: entry[0]):
                self._read(name, stored, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, name: str, stored: Stored, items: list[ReadItem], planner: LoadPlanner) -> None:
        try:
            bytes_ = self._opened.verified(name, stored)
        except CheckpointError as error:
            text = str(error).partition("\n")[0]
            raise CheckpointError(f"{text}; what was loaded before stays loaded") from error
        dtype = self._opened.manifest.tensors[name].dtype
        content = reading.as_tensor(bytes_, dtype).view(stored.box.sizes)
        for item in items:
            sizes = zip(item.storage_offsets, item.lengths, strict=True)
            target = planner.resolve_tensor(item).detach()
            target.copy_(content[tuple(slice(a, a + n) for a, n in sizes)])
            planner.commit_tensor(item, target)

    def _stored(self, name: str, index: MetadataIndex) -> Stored:
        every = self._opened.manifest.tensors[name].stored
        if index.index is not None and every[index.index].box.offsets == index.offset:
            return every[index.index]
        return next(stored for stored in every if stored.box.offsets == index.offset)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it may be a directory of ours."""
        return (Path(checkpoint_id) / "checkpoint").is_dir()


def _described(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [_chunk(stored.box) for stored in tensor.stored]
    return TensorStorageMetadata(
        TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks
    )


def load(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Stateful,
    names: Names | None = None,
    comm: Communicator | None = None,
    prefix: str | None = None,
    weights_only: bool = False,
) -> int:
    """Loads a checkpoint of torch.distributed.checkpoint: of FSDP2, of torchtitan.

    With several ranks a collective call. Each rank reads the boxes that meet its own. Options of
    the optimizer's groups (learning rate, ...) stay, and so do generators and data. No code runs
    that comes with the files.

    Args:
        directory: with ``.metadata`` in it.
        model, optimizer, names, comm: as :func:`~anychip.train.checkpoint.save` has them. The
            optimizer's rule has states of the same names as torch's: adamw.
        prefix: of the model's names, like ``"model."``; None: what fits.
        weights_only: the optimizer begins anew.

    Returns:
        The steps that the optimizer has done.

    Raises:
        CheckpointError: there is none, or it does not fit. The model is as it was, unless a file of
            tensors could not be read: there are no hashes to find that before.
    """
    path = Path(directory)
    return foreign.load(
        path, lambda held: _Source(path, held, prefix), model=model, optimizer=optimizer,
        names=names, comm=comm, weights_only=weights_only,
    )  # fmt: skip


_DTYPES = [t for t in vars(torch).values() if isinstance(t, torch.dtype)]
_NAMES = {
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
    "torch": {"Size", *(str(t).removeprefix("torch.") for t in _DTYPES)},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.serialization": {"_get_layout"},
}
"""What torch 2.13 writes into ``.metadata``: nothing that runs code or opens files."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which torch does not write")
        return super().find_class(module, name)


def _read_metadata(file: Path) -> Metadata:
    with file.open("rb") as opened:
        try:
            found = _Unpickler(opened).load()
        except Exception as error:  # a pickle that somebody made can raise anything
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{file} cannot be read: it is of type {type(found).__name__}")
    return found


class _Source:
    """A checkpoint of torch's."""

    def __init__(self, path: Path, held: Held, prefix: str | None) -> None:
        self.path, self._reader = path, FileSystemReader(path)
        try:
            metadata = _read_metadata(path / ".metadata")
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} has no .metadata: it is no checkpoint of torch"
            ) from None
        self._reader.set_up_storage_reader(metadata, is_coordinator=False)
        self._tensors = {
            name: about
            for name, about in metadata.state_dict_metadata.items()
            if isinstance(about, TensorStorageMetadata)
        }
        model = [name.removeprefix(of_model("")) for name in held.described()]
        self._own_parts = {name.partition(".")[0] for name in model}
        found = {_before_name(key, set(model)) for key in self._tensors} - {None}
        self._states = self._only(found, "states") or "optimizer.state."
        self._prefix = self._only(self._prefixes(model), "names") if prefix is None else prefix

    def _prefixes(self, names: list[str]) -> set[str]:
        """What stands before the model's names."""
        for name in names:
            ends = [key for key in self._tensors if f".{key}".endswith(f".{name}")]
            found = {key.removesuffix(name) for key in ends if not key.startswith(self._states)}
            whole = {p for p in found if all(p + other in self._tensors for other in names)}
            if found:
                return whole or found
        return set()

    def _only(self, found: Collection[str | None], what: str) -> str:
        """The one that there is."""
        if len(found) > 1:
            several = " and ".join(sorted(repr(prefix) for prefix in found))
            raise CheckpointError(
                f"{self.path} has the model's {what} behind {several}; say which with prefix="
            )
        return next(iter(found), None) or ""

    def _name(self, name: str) -> str:
        """Of a tensor there, by its name in a checkpoint of ours."""
        if name.startswith(of_model("")):
            return self._prefix + name.removeprefix(of_model(""))
        return self._states + name.removeprefix("optimizer.")

    def find(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        about = self._tensors.get(self._name(name))
        if about is None:
            return None
        chunks = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in about.chunks]
        if not boxes.tile([box for box in chunks if box.numel], tuple(about.size)):
            raise CheckpointError(f"{self.path} has not every element of {name} exactly once")
        return about.properties.dtype, tuple(about.size)

    def others(self, known: Collection[str]) -> list[str]:
        mine = {self._name(name) for name in known}
        return [
            name
            for name in self._tensors
            if name.startswith(self._prefix)
            # Without a prefix what is beside the model stands among its names.
            and (self._prefix or name.partition(".")[0] in self._own_parts)
            and name not in mine
            and not name.startswith(self._states)
        ]

    def read(self, name: str, part: Part) -> Tensor:
        there = self._name(name)
        about, numel = self._tensors[there], part.values.numel()
        found = torch.empty(numel, dtype=about.properties.dtype, device=HOST)
        views, start = {}, 0
        for box in boxes.of_run(part.shape, part.offset, numel):
            views[torch.Size(box.offsets)] = found[start : start + box.numel].view(box.sizes)
            start += box.numel
        chunks = [ChunkStorageMetadata(at, view.shape) for at, view in views.items()]
        items = create_read_items_for_chunk_list(there, about, chunks)
        try:
            self._reader.read_data(LoadPlan(items), _IntoViews(views)).wait()
        except Exception as error:  # what torch raises for a file that somebody made has no end
            text = str(error).partition("\n")[0][:200]
            raise CheckpointError(f"{self.path}: {there} cannot be read: {text}") from error
        return found


def _before_name(key: str, names: Collection[str]) -> str | None:
    """What stands before a parameter's name, when a tensor is a state of it."""
    head, word, rest = f".{key}".partition(".state.")
    return f"{head}{word}"[1:] if word and rest.rpartition(".")[0] in names else None


class _IntoViews(DefaultLoadPlanner):
    """Puts each box into a view of its own."""

    def __init__(self, views: dict[torch.Size, Tensor]) -> None:
        super().__init__()
        self._views = views

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._views[index.offset]
