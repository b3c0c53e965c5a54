"""Where do states, masters, gradients and weights live? On the device, the host, or in a file.

What is not on the device is :class:`Stored`: a flat tensor cut into records, one per chunk of a
buffer, which :mod:`.streaming` brings to the device and back. Anything else that asks for its
values (a checkpoint, ``state_dict``) sees :class:`Elsewhere`, a tensor that reads what it is asked
for and no more.

A file has a room of its own on each rank, and no name: it is gone when the process is, however
that ends. Direct reads and writes (O_DIRECT) leave nothing in the page cache, which would count as
the process's memory.

Source: Rajbhandari et al. 2021, arXiv:2104.07857 (ZeRO-Infinity), sections 5 and 6.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from anychip.contract import HOST
from anychip.runtime import on_host
from anychip.train.files import NotWrittenError

ALIGNMENT = 4096
"""Bytes, of which place, length and address are multiples in direct reading and writing."""
CHUNK_NBYTES = 16 << 20
"""Of float32 elements that are updated together: long enough for a disk, or a link, to be fast."""
_AT_ONCE = 4 << 20
"""Bytes that values are read by, or written by, outside of the step."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where the model runs."""

    def __str__(self) -> str:
        return "device"


@dataclass(frozen=True, slots=True)
class Host:
    """The host's memory, page-locked where the backend can."""

    def __str__(self) -> str:
        return "host"


@dataclass(frozen=True, slots=True)
class File:
    """A file without a name in a directory, as of an NVMe disk; each rank has its own."""

    directory: str | Path

    def __str__(self) -> str:
        return "file"


Tier = Device | Host | File

KINDS = ("states", "masters", "gradients", "weights")
"""What can be elsewhere: the rule's states; float32 values of 16-bit weights, which are updated;
reduced gradients; and this rank's parts of what modules compute with."""


def tiers_of(offload: Mapping[str, str | Tier]) -> dict[str, Tier]:
    """Of each kind its tier.

    Raises:
        ValueError: another kind, or a tier that is none.
    """
    unknown = sorted(offload.keys() - set(KINDS))
    if unknown:
        raise ValueError(f"offload: one of {', '.join(KINDS)} expected, got {unknown[0]!r}")
    found = {kind: _tier(kind, given) for kind, given in offload.items()}
    return {kind: found.get(kind, Device()) for kind in KINDS}


def _tier(kind: str, given: str | Tier) -> Tier:
    tier = {"device": Device(), "host": Host()}.get(given) if isinstance(given, str) else given
    tier = File(str(given)) if tier is None else tier
    if not isinstance(tier, (Device, Host, File)):
        raise ValueError(f"offload: a tier for {kind} expected, got {given!r}")
    if isinstance(tier, File) and not Path(tier.directory).is_dir():
        raise ValueError(
            f"offload: {kind} to {str(tier.directory)!r}, which is neither 'device' nor 'host' nor "
            "a directory; make it, or name another one"
        )
    return tier


def in_text(text: str) -> dict[str, str]:
    """Of a setting, like ``states=host, gradients=/mnt/nvme``.

    Raises:
        ValueError: it is no list of a kind and its tier each.
    """
    found = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        kind, sign, tier = entry.partition("=")
        if not sign or kind.strip() not in KINDS:
            raise ValueError(
                f"offload must be like 'states=host, gradients=/mnt/nvme', of "
                f"{', '.join(KINDS)}, got {entry!r}"
            )
        found[kind.strip()] = tier.strip()
    return found


# Rooms


class Room(ABC):
    """Some bytes of a tier, whose places are multiples of ``ALIGNMENT``."""

    @abstractmethod
    def read(self, start: int, out: Tensor) -> None:
        """``out``, (nbytes,) uint8 on the host, becomes what is there from a place on."""

    @abstractmethod
    def write(self, start: int, values: Tensor) -> None:
        """Keeps (nbytes,) uint8 of the host from a place on."""

    def memory(self, start: int, nbytes: int) -> Tensor | None:
        """The bytes themselves, where they are in memory."""
        return None


class HostRoom(Room):
    """Bytes of host memory."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    def read(self, start: int, out: Tensor) -> None:
        out.copy_(self.memory(start, len(out)))

    def write(self, start: int, values: Tensor) -> None:
        self.memory(start, len(values)).copy_(values)

    def memory(self, start: int, nbytes: int) -> Tensor:
        return self._memory[start : start + nbytes]


class Spill:
    """The file of a rank in one directory; it grows by rooms, and is closed with its owner."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.nbytes = directory, 0
        self._file, self.is_direct = _open(directory)
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, self._file)
        if not self.is_direct:
            warnings.warn(
                f"offload: the file system of {directory} has no direct I/O, so that what is "
                "written there also takes room in the page cache",
                stacklevel=2,
            )

    def room(self, nbytes: int) -> FileRoom:
        """Takes so many bytes more, which the file system promises.

        Raises:
            NotWrittenError: it has no room.
        """
        with self._lock:
            start, self.nbytes = self.nbytes, self.nbytes + nbytes
        if nbytes:
            with _in_words(self.directory, f"{nbytes} more bytes"):
                os.posix_fallocate(self._file, start, nbytes)
        return FileRoom(self, start)

    def move(self, call: Any, place: int, memory: Tensor) -> None:
        """All of some host memory by os.preadv or os.pwritev, which let other threads run."""
        left = _bytes_of(memory)
        while left:
            with _in_words(self.directory, f"{len(left)} bytes"):
                done = call(self._file, [left], place)
            if not done:
                raise NotWrittenError(0, f"offload: the file in {self.directory} ends too early")
            left, place = left[done:], place + done


class _in_words:
    """Says of an OSError what could not be done."""

    def __init__(self, directory: Path, what: str) -> None:
        self.text = f"offload: no room for {what} in {directory}, or they cannot be reached"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, OSError):
            text = f"{self.text}: {error.strerror}; free some, or name another directory"
            raise NotWrittenError(error.errno, text) from error


def _open(directory: Path) -> tuple[int, bool]:
    """A file without a name, and whether it is read and written without the page cache."""
    with _in_words(directory, "a file"), tempfile.TemporaryFile(dir=directory) as file:
        plain = os.dup(file.fileno())
    with suppress(OSError):
        # The same file again: what has no name has no other way to be opened.
        direct = os.open(f"/proc/self/fd/{plain}", os.O_RDWR | os.O_DIRECT)
        try:
            os.pwritev(direct, [_bytes_of(aligned(ALIGNMENT))], 0)
        except OSError:
            os.close(direct)
        else:
            os.close(plain)
            return direct, True
    return plain, False


def _bytes_of(memory: Tensor) -> memoryview:
    # Not by numpy: what it has seen torch resizes no more, and weights come and go by that.
    whole: Any = (ctypes.c_ubyte * memory.numel()).from_address(on_host(memory).data_ptr())
    whole.owner = memory  # whose memory lives as long as the view
    return memoryview(whole).cast("B")


def aligned(nbytes: int, memory: Tensor | None = None) -> Tensor:
    """(nbytes,) uint8 on the host, whose address is a multiple of ``ALIGNMENT``.

    Args:
        memory: to take it from, of ``ALIGNMENT`` bytes more.
    """
    if memory is None:
        # Of the kernel: an allocator that keeps what was large once would hold what is gone.
        own = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(own, dtype=torch.uint8)[:nbytes]
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + nbytes]


class FileRoom(Room):
    """Bytes of a file."""

    def __init__(self, spill: Spill, start: int) -> None:
        self._spill, self._start = spill, start

    def read(self, start: int, out: Tensor) -> None:
        for place, skip, part, whole in self._windows(start, out):
            self._spill.move(os.preadv, place, whole)
            if part is not whole:
                part.copy_(whole[skip : skip + len(part)])

    def write(self, start: int, values: Tensor) -> None:
        for place, skip, part, whole in self._windows(start, values):
            if part is not whole:
                if len(part) < len(whole):
                    self._spill.move(os.preadv, place, whole)
                whole[skip : skip + len(part)].copy_(part)
            self._spill.move(os.pwritev, place, whole)

    def _windows(self, start: int, given: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Aligned ranges around what is meant: their place, how far inside it begins, what of
        ``given`` it is, and memory for all of the range.
        """
        place = self._start + start
        if not (place | len(given) | given.data_ptr()) % ALIGNMENT:
            yield place, 0, given, given
            return
        for at in range(0, len(given), _AT_ONCE):
            part = given[at : at + _AT_ONCE]
            first = (place + at) // ALIGNMENT * ALIGNMENT
            stop = -(-(place + at + len(part)) // ALIGNMENT) * ALIGNMENT
            yield first, place + at - first, part, aligned(stop - first)


# Tensors in rooms


class Stored:
    """A 1-dim tensor in a room, in records that are moved as a whole.

    Args:
        room: of :meth:`nbytes_of` the same.
        cuts: elements at which records begin, and where the last one ends.

    Attributes:
        pending: what still writes a record, by its number.
    """

    def __init__(self, room: Room, tier: Tier, dtype: torch.dtype, cuts: Sequence[int]) -> None:
        self.room, self.tier, self.dtype = room, tier, dtype
        self.records = list(pairwise(cuts))
        self._places = places_of(dtype, cuts)
        self.pending: dict[int, Future[Any]] = {}

    @property
    def numel(self) -> int:
        """Elements in all."""
        return self.records[-1][1]

    def place(self, record: int) -> tuple[int, int]:
        """Where a record begins in the room, and its bytes."""
        start, stop = self.records[record]
        return self._places[record], (stop - start) * self.dtype.itemsize

    def settle(self) -> None:
        """Returns when what was given to be written is there."""
        while self.pending:
            self.pending.popitem()[1].result()

    def read(self, start: int, out: Tensor) -> None:
        """``out``, 1-dim on the host, becomes the elements from ``start`` on."""
        self._each(self.room.read, start, out)

    def write(self, start: int, values: Tensor) -> None:
        """Keeps 1-dim values of the host from ``start`` on."""
        self._each(self.room.write, start, values)

    def _each(self, move: Any, start: int, values: Tensor) -> None:
        self.settle()
        for (first, last), place in zip(self.records, self._places, strict=False):
            low, high = max(first, start), min(last, start + len(values))
            if low < high:
                part = values[low - start : high - start].view(torch.uint8)
                move(place + (low - first) * self.dtype.itemsize, part)

    def all(self) -> Elsewhere:
        """All of it."""
        return Elsewhere(self, torch.empty(self.numel, dtype=self.dtype, device="meta"))


def places_of(dtype: torch.dtype, cuts: Sequence[int]) -> list[int]:
    """Where each record begins in its room, and where the last one ends."""
    found = [0]
    for start, stop in pairwise(cuts):
        nbytes = (stop - start) * dtype.itemsize
        found.append(found[-1] + -(-nbytes // ALIGNMENT) * ALIGNMENT)
    return found


class Elsewhere(Tensor):
    """Some neighbouring elements of what is stored: a tensor that is read when somebody asks.

    Computing with it takes what is there then, on the host; what is written into it is kept. Its
    views are of the same kind.
    """

    stored: Stored
    twin: Tensor

    def __new__(cls, stored: Stored, twin: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(
            cls, twin.shape, strides=twin.stride(), dtype=twin.dtype, device=twin.device
        )
        made.stored, made.twin = stored, twin
        return made

    @property
    def start(self) -> int:
        """Its first element in what is stored."""
        return int(self.twin.storage_offset())

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({tuple(self.shape)}, {self.dtype}, {self.stored.tier})"

    def load(self) -> Tensor:
        """Its values, on the host."""
        found = torch.empty(self.numel(), dtype=self.dtype, device=HOST)
        self.stored.read(self.start, found)
        return found.view(self.shape)

    def store(self, values: Tensor) -> None:
        """Keeps values of its shape, from any device."""
        for at in range(0, self.numel(), _AT_ONCE):
            part = values.detach().reshape(-1)[at : at + _AT_ONCE]
            self.stored.write(self.start + at, part.to(HOST, self.dtype).contiguous())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Elsewhere):
            source = args[1].load() if isinstance(args[1], Elsewhere) else args[1]
            args[0].store(source.expand(args[0].shape))
            return args[0]
        returns = [value.alias_info for value in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in returns):
            return args[0]._view(func, args, kwargs)
        loaded = tree_map(_loaded, args), tree_map(_loaded, kwargs)
        found = func(*loaded[0], **loaded[1])
        if func._schema.is_mutable and isinstance(args[0], Elsewhere):
            args[0].store(loaded[0][0])
            return args[0]
        return found

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        twin = func(self.twin, *args[1:], **kwargs)
        if not isinstance(twin, Tensor) or not twin.is_contiguous():
            raise RuntimeError(
                f"{func}: what is in {self.stored.tier} memory has views of neighbouring elements "
                "only; take a copy: .clone()"
            )
        return Elsewhere(self.stored, twin)


def tier_of(tensor: Tensor) -> str:
    """The name of the tier that it is in."""
    return str(tensor.stored.tier) if isinstance(tensor, Elsewhere) else "device"


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor; of one that is elsewhere its values, on the host."""
    return tensor.load() if isinstance(tensor, Elsewhere) else tensor


def _loaded(value: Any) -> Any:
    return in_memory(value) if isinstance(value, Tensor) else value
