"""How do tensors come from the files of a checkpoint? The boxes that a part needs, and no others.

Files are opened once, before anything is looked at: another save may take their names away then,
and what is read still is one checkpoint.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from anychip.contract import HOST
from anychip.train import files
from anychip.train.checkpoint import boxes, folder, manifest
from anychip.train.checkpoint.folder import refusal
from anychip.train.checkpoint.manifest import File, Manifest, Stored, StoredTensor
from anychip.train.checkpoint.names import of_model, of_state, states_of
from anychip.train.checkpoint.parts import Part
from anychip.train.optim.average import EMA

_CHUNK = 1 << 20


class Reader:
    """The opened files of a checkpoint that some parts need.

    Args:
        found: what the folder's manifest says.
        opened: each file by its name.
    """

    def __init__(self, path: Path, found: Manifest, opened: dict[str, IO[bytes]]) -> None:
        self.path, self.manifest = path, found
        self._opened = opened
        self._verified: set[tuple[str, int]] = set()

    def values(self, name: str) -> Any:
        """What a file holds that is read as a whole, verified.

        Raises:
            CheckpointError: it is damaged, or torch does not read it without running code.
        """
        entry = self.manifest.files[name]
        file = self._opened[entry.name]
        _verify_file(self.path, entry, file)
        try:
            return torch.load(file, map_location=HOST, weights_only=True)
        except Exception as error:  # what torch raises for a file that somebody made has no end
            text = str(error).partition("\n")[0][:200]
            raise refusal(self.path, f"{entry.name} cannot be read: {text}") from error

    def names(self) -> Iterator[str]:
        """Of the tensors in opened files: of what is tied, the one under which it was written."""
        for name in self.manifest.tensor_files:
            file = self._opened[name]
            file.seek(0)
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            yield from (key.partition("[")[0] for key in header)

    def verify(self, part: Part) -> None:
        """Compares the hashes of the boxes that a part needs.

        Raises:
            CheckpointError: bytes are not those that were written.
        """
        for stored in needed(self.manifest, part):
            if (stored.file, stored.offset) in self._verified:
                continue
            self._verified.add((stored.file, stored.offset))
            self.verified(part.name, stored)

    def verified(self, name: str, stored: Stored) -> bytearray:
        """A box of a tensor.

        Raises:
            CheckpointError: bytes are not those that were written.
        """
        content = self._bytes(stored)
        if hashlib.sha256(content).hexdigest() != stored.sha256:
            raise refusal(
                self.path,
                f"the content of {stored.file} is not what was written ({name}, of "
                f"{stored.nbytes} bytes from {stored.offset} on)",
            )
        return content

    def read(self, part: Part) -> Tensor:
        """The elements of a part in the checkpoint, (numel,), on the host, of the saved dtype."""
        saved, numel = self.manifest.of(part), part.values.numel()
        assert saved is not None, part.name
        if part.is_per_rank and saved.shape != part.shape:
            return self._summed(part, saved)
        found = torch.empty(numel, dtype=saved.dtype, device=HOST)
        for stored in needed(self.manifest, part):
            held = as_tensor(self._bytes(stored), saved.dtype).view(stored.box.sizes)
            for common in boxes.overlaps(stored.box, saved.shape, part.offset, numel):
                run = found[common.start : common.start + math.prod(common.sizes)]
                run.view(common.sizes)[common.in_run] = held[common.in_box]
        return found

    def _summed(self, part: Part, saved: StoredTensor) -> Tensor:
        """Over the ranks that saved it, for the first one that loads it."""
        numel = part.values.numel()
        total = torch.zeros(numel, dtype=saved.dtype, device=HOST)
        for rank in range(saved.shape[0] if part.offset == 0 else 0):
            total += self.read(replace(part, shape=saved.shape, offset=rank * numel))
        return total

    def _bytes(self, stored: Stored) -> bytearray:
        content, file = bytearray(stored.nbytes), self._opened[stored.file]
        file.seek(stored.offset)
        got = file.readinto(content)  # type: ignore[attr-defined]
        if got != stored.nbytes:
            raise refusal(self.path, f"{stored.file} ends too early")
        return content


def as_tensor(content: bytearray, dtype: torch.dtype) -> Tensor:
    """(numel,) on the host, of the same memory."""
    if not content:
        return torch.empty(0, dtype=dtype, device=HOST)
    return torch.frombuffer(content, dtype=dtype)


def needed(found: Manifest, part: Part) -> list[Stored]:
    """The boxes in files that have elements of a part; none of a tensor that is not there."""
    tensor, numel = found.of(part), part.values.numel()
    if tensor is None:
        return []
    if part.is_per_rank and tensor.shape != part.shape:
        return tensor.stored if part.offset == 0 else []
    mine = boxes.of_run(tensor.shape, part.offset, numel)
    return [
        stored
        for stored in tensor.stored
        if any(boxes.intersection(stored.box, box).numel for box in mine)
    ]


def open_files(
    path: Path, parts: Sequence[Part] | None, stack: ExitStack, *, averaged: bool = False
) -> Reader:
    """Opens what the manifest names and parts need, of the checkpoint that is there.

    Args:
        parts: of the shapes that the manifest has, or not in it; None: all that there are.
        averaged: the model's trained tensors are to be their averages over steps.

    Raises:
        CheckpointError: the manifest is damaged; a file is missing, or has another length; there
            are no averages.
    """
    written = manifest.read(path)
    found = _averaged(path, written) if averaged else written
    sizes = {file.name: file.nbytes for file in found.files.values()}
    names = set(found.tensor_files)
    if parts is not None:
        fitting = [part for part in parts if fits(found, part)]
        names = {stored.file for part in fitting for stored in needed(found, part)}
    sizes |= {name: found.tensor_files[name].nbytes for name in names}
    opened = {}
    for name, nbytes in sizes.items():
        try:
            file = files.open_to_read(path / name)
        except FileNotFoundError:
            if manifest.read(path) != written:
                # There is a newer one by now.
                return open_files(path, parts, stack, averaged=averaged)
            raise refusal(path, f"{name} is missing") from None
        except OSError as error:
            raise refusal(path, f"{name} cannot be read: {error.strerror}") from error
        opened[name] = stack.enter_context(file)
        got = os.fstat(file.fileno()).st_size
        if got != nbytes:
            raise refusal(path, f"{name} has {got} bytes, {nbytes} were written")
    for name, about in found.tensor_files.items():
        if name in opened:
            _verify_file(path, File(name, about.header_nbytes, about.header_sha256), opened[name])
    return Reader(path, found, opened)


def _averaged(path: Path, found: Manifest) -> Manifest:
    """With the averages under the names of what they are averages of."""
    averages = {
        of_model(name): found.tensors[of_state(name, EMA)]
        for name, states in states_of(found.tensors).items()
        if EMA in states
    }
    if not averages:
        raise refusal(
            path, "it has no average of the weights, which optimizer.ema_decay=0.999 would keep"
        )
    return found._replace(tensors={**found.tensors, **averages})


def fits(found: Manifest, part: Part) -> bool:
    """The checkpoint has a tensor of a part's name and shape."""
    tensor = found.of(part)
    first = 1 if part.is_per_rank else 0
    return tensor is not None and tensor.shape[first:] == part.shape[first:]


def _verify_file(path: Path, entry: File, file: IO[bytes]) -> None:
    """Of what a file begins with, or all of it."""
    digest, left = hashlib.sha256(), entry.nbytes
    while chunk := file.read(min(_CHUNK, left)):
        digest.update(chunk)
        left -= len(chunk)
    if digest.hexdigest() != entry.sha256:
        raise folder.refusal(path, f"the content of {entry.name} is not what was written")
    file.seek(0)
