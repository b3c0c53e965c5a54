"""How does what is elsewhere come to the device and back? By chunks: read, update, write at once.

While a chunk is updated, the next one is read by one thread and the one before it written by
another; each waits for the disk or a stream with the interpreter let go. Slots and bounce buffers
are few and fixed, and are used again after the event, or the write, that ends their last use.

The update itself runs on the device, by the kernel that it has without offload, so that the bits
are the same and rules need no second implementation. The price is that states cross the link both
ways, 24 bytes per parameter of AdamW with masters, where an update on the host would send 6.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anychip import runtime
from anychip.contract import Backend, Memory
from anychip.train.zero.tiers import (
    ALIGNMENT,
    Device,
    Elsewhere,
    File,
    HostRoom,
    Room,
    Spill,
    Stored,
    Tier,
    aligned,
    places_of,
)

IN_FLIGHT = 2
"""Buffers of gradients that may be on their way to another tier."""
SLOTS = 3
"""Chunks on the device: one is read, one updated, one written."""


class Trip(NamedTuple):
    """A chunk's way through a slot: record ``number`` of each.

    Attributes:
        loads: what is read.
        saves: what is written after it.
    """

    number: int
    loads: Sequence[Stored]
    saves: Sequence[Stored]

    @property
    def rooms(self) -> dict[Stored, tuple[int, int]]:
        """Of each the place in the slot, and bytes."""
        every = list(dict.fromkeys([*self.loads, *self.saves]))
        sizes = [each.place(self.number)[1] for each in every]
        ends = accumulate(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in sizes)
        return dict(zip(every, zip([0, *ends], sizes, strict=False), strict=True))

    @property
    def nbytes(self) -> int:
        """Of the slot."""
        return max((start + size for start, size in self.rooms.values()), default=0)


class _Bounce:
    """Host memory between a file and the device: two buffers, taken in turn."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._events: list[torch.Event | None] = [None, None]
        self._next = 0

    def take(self, nbytes: int, lanes: Lanes) -> tuple[int, Tensor]:
        """A buffer that no copy uses any more, and its number."""
        number, self._next = self._next, 1 - self._next
        event = self._events[number]
        if event is not None:
            event.synchronize()
        if not self._buffers or len(self._buffers[0]) < nbytes:
            for other in filter(None, self._events):
                other.synchronize()
            self._buffers = [lanes.host_memory(nbytes) for _ in range(2)]
        return number, self._buffers[number][:nbytes]

    def used_until(self, number: int, event: torch.Event) -> None:
        """The copy that uses a buffer."""
        self._events[number] = event


class Lanes:
    """The threads and streams of one rank between its device, host memory and files.

    Args:
        backend: of the device.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend, self._index = backend, backend.current_device()
        self.has_streams = "streams" in backend.capabilities
        # Then what is read lies where it is used; a device without streams works in its one order.
        self._is_direct = backend.is_host and not self.has_streams
        self._is_pinned = "pinned_memory" in backend.capabilities
        self._threads = [
            ThreadPoolExecutor(1, f"offload-{way}", partial(backend.set_device, self._index))
            for way in ("read", "write")
        ]
        for threads in self._threads:
            weakref.finalize(self, threads.shutdown, wait=False)
        self._streams = [backend.stream() for _ in range(2)] if self.has_streams else []
        self._bounces = [_Bounce(), _Bounce()]

    def host_memory(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8, aligned; page-locked where the backend can."""
        return aligned(nbytes, self._pinned(nbytes + ALIGNMENT))

    def _pinned(self, nbytes: int) -> Tensor | None:
        memory: Memory = self.backend.memory
        return memory.pinned(nbytes) if self._is_pinned and not self.backend.is_host else None

    def mark(self) -> torch.Event | None:
        """An event of the current stream, which others wait for."""
        if not self.has_streams:
            return None
        event = self.backend.event()
        event.record(self.backend.current_stream())
        return event

    def load(
        self, stored: Stored, record: int, view: Tensor, after: Sequence[Future[Any]] = ()
    ) -> Loading:
        """Begins to bring a record.

        Args:
            view: uint8 on the device; memory for it, that the current stream may write.
            after: what still reads from that memory.
        """
        written = stored.pending.get(record)
        given = stored, record, view, [*after, *filter(None, [written])], self.mark()
        return Loading(self, self._threads[0].submit(self._load, *given))

    @torch.no_grad()
    def _load(
        self,
        stored: Stored,
        record: int,
        view: Tensor,
        after: Sequence[Future[Any]],
        ready: torch.Event | None,
    ) -> torch.Event | None:
        for future in after:
            future.result()
        place, nbytes = stored.place(record)
        if self._is_direct:
            stored.room.read(place, view)
            return None
        number, source = -1, stored.room.memory(place, nbytes)
        if source is None:
            number, source = self._bounces[0].take(_rounded(nbytes), self)
            stored.room.read(place, source)
        event = self._copy(0, view, source[:nbytes], ready)
        if number >= 0 and event is not None:
            self._bounces[0].used_until(number, event)
        return event

    def save(self, stored: Stored, record: int, view: Tensor) -> Future[Any]:
        """Begins to write a record: what the current stream has put into ``view`` so far.

        That memory must stay as it is until the result is there.
        """
        future = self._threads[1].submit(self._save, stored, record, view, self.mark())
        stored.pending[record] = future
        return future

    @torch.no_grad()
    def _save(self, stored: Stored, record: int, view: Tensor, ready: torch.Event | None) -> None:
        place, nbytes = stored.place(record)
        if self._is_direct:
            stored.room.write(place, view)
            return
        target = stored.room.memory(place, nbytes)
        if target is not None:
            self._copied(1, target, view, ready)
            return
        _, bounce = self._bounces[1].take(_rounded(nbytes), self)
        self._copied(1, bounce[:nbytes], view, ready)
        stored.room.write(place, bounce)

    def _copy(
        self, way: int, target: Tensor, source: Tensor, ready: torch.Event | None
    ) -> torch.Event | None:
        if ready is None:
            target.copy_(source)
            return None
        stream, event = self._streams[way], self.backend.event()
        ready.wait(stream)
        with self.backend.use_stream(stream):
            target.copy_(source, non_blocking=True)
        event.record(stream)
        return event

    def _copied(self, way: int, target: Tensor, source: Tensor, ready: torch.Event | None) -> None:
        event = self._copy(way, target, source, ready)
        if event is not None:
            event.synchronize()

    def stream(self, works: Sequence[Trip], device: torch.device) -> Iterator[dict[Stored, Tensor]]:
        """Of each chunk what is loaded, and room for what is saved, 1-dim on the device.

        What is in it when the next one is asked for is saved. Returns when all of it is.
        """
        nbytes = _rounded(max((work.nbytes for work in works), default=0))
        count = min(SLOTS, len(works)) if nbytes else 0
        slots = [self._slot(nbytes, device) for _ in range(count)]
        saves: list[list[Future[Any]]] = [[] for _ in slots]
        loads: dict[int, list[Loading]] = {}

        def begin(at: int) -> None:
            work, slot = works[at], at % count if count else 0
            loads[at] = [
                self.load(stored, work.number, self._view(slots[slot], work, stored), saves[slot])
                for stored in work.loads
            ]

        try:
            for at, work in enumerate(works):
                for ahead in range(at + bool(at), min(at + 2, len(works))):
                    begin(ahead)
                for loading in loads.pop(at):
                    loading.wait()
                slot = slots[at % count] if count else torch.empty(0)
                views = {each: slot[a : a + n] for each, (a, n) in work.rooms.items()}
                yield {each: view.view(each.dtype) for each, view in views.items()}
                if work.saves:
                    saves[at % count] = [
                        self.save(each, work.number, self._view(slot, work, each))
                        for each in work.saves
                    ]
        finally:
            for loading in (each for found in loads.values() for each in found):
                with suppress(Exception):  # of one that was waited for it has been raised
                    loading.wait()
        for future in (each for found in saves for each in found):
            future.result()

    def _view(self, slot: Tensor, work: Trip, stored: Stored) -> Tensor:
        start, nbytes = work.rooms[stored]
        return slot[start : start + (_rounded(nbytes) if self._is_direct else nbytes)]

    def _slot(self, nbytes: int, device: torch.device) -> Tensor:
        if self._is_direct:
            return aligned(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


class Loading:
    """A record on its way to the device."""

    def __init__(self, lanes: Lanes, future: Future[torch.Event | None]) -> None:
        self._lanes, self._future = lanes, future

    def wait(self) -> None:
        """Returns when work queued on the current stream may read it."""
        event = self._future.result()
        if event is not None:
            event.wait(self._lanes.backend.current_stream())


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Tiers:
    """Where one rank keeps what, and the memory that it takes there.

    Args:
        kinds: of each of :data:`~anychip.train.zero.tiers.KINDS` its tier.
        device: torch's type of the device.
        chunk_nbytes: of float32 elements that are moved and updated together.
    """

    def __init__(self, kinds: dict[str, Tier], device: str, chunk_nbytes: int) -> None:
        self.kinds, self.chunk_numel = kinds, max(1, chunk_nbytes // torch.float32.itemsize)
        self.lanes = Lanes(runtime.owner(device))
        self._spills: dict[str, Spill] = {}
        self._sent: deque[Stored] = deque()

    def is_away(self, kind: str) -> bool:
        """It is not on the device."""
        return not isinstance(self.kinds[kind], Device)

    def store(self, kind: str, dtype: torch.dtype, cuts: Sequence[int]) -> Stored:
        """Room for a 1-dim tensor, its values undefined.

        Raises:
            NotWrittenError: the file system has no room.
        """
        tier = self.kinds[kind]
        nbytes = places_of(dtype, cuts)[-1]
        if isinstance(tier, File):
            directory = str(Path(tier.directory).resolve())
            if directory not in self._spills:
                self._spills[directory] = Spill(Path(directory))
            room: Room = self._spills[directory].room(nbytes)
        else:
            room = HostRoom(self.lanes.host_memory(nbytes))
        return Stored(room, tier, dtype, cuts)

    def keep(self, kind: str, values: Tensor, cuts: Sequence[int]) -> Elsewhere:
        """Some 1-dim values, in a room of their kind."""
        found = self.store(kind, values.dtype, cuts).all()
        found.store(values)
        return found

    def bring(self, stored: Stored, out: Tensor) -> None:
        """``out``, 1-dim on the device, becomes all of it; work queued after may read it."""
        target = out.view(torch.uint8)
        ends = [(a * out.itemsize, b * out.itemsize) for a, b in stored.records]
        given = [(n, target[a:b]) for n, (a, b) in enumerate(ends)]
        for loading in [self.lanes.load(stored, n, view) for n, view in given]:
            loading.wait()

    def send(self, stored: Stored, values: Tensor) -> None:
        """Keeps (numel,) values of the device; ``stored.settle()`` waits for it.

        Their memory is held until then, so that a slow disk is waited for after two of them.
        """
        while len(self._sent) >= IN_FLIGHT:
            self._sent.popleft().settle()
        self._sent.append(stored)
        source = values.view(torch.uint8)
        for number, (a, b) in enumerate(stored.records):
            self.lanes.save(stored, number, source[a * values.itemsize : b * values.itemsize])
