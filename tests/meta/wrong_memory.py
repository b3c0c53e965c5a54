"""Wrong backends that the memory chapter has to find."""

import gc
import threading
import weakref

import torch

from anychip.contract import Backend, MemoryInfo, MemoryStats
from tests.meta.honest import CAPACITY, CountingMemory, HonestBackend
from tests.meta.wrong import Wrong, wrong_memory


class OutOfMemoryIsRuntimeError(CountingMemory):
    def refuse(self, nbytes: int) -> None:
        raise RuntimeError(f"error 2: cannot allocate {nbytes} bytes")


class OutOfMemoryIsSwallowed(CountingMemory):
    def allocate(self, nbytes: int, index: int | None = None) -> torch.UntypedStorage:
        try:
            return super().allocate(nbytes, index)
        except torch.OutOfMemoryError:
            return super().allocate(0, index)


class OutOfMemoryWithoutNumbers(CountingMemory):
    def refuse(self, nbytes: int) -> None:
        raise torch.OutOfMemoryError("out of memory")


class DeadAfterOutOfMemory(CountingMemory):
    def refuse(self, nbytes: int) -> None:
        self.allocated += nbytes  # taken back never
        super().refuse(nbytes)


class PeakNeverResets(CountingMemory):
    def reset_peak(self, index: int | None = None) -> None:
        return None


class PeakForgets(CountingMemory):
    def freed(self, nbytes: int) -> None:
        super().freed(nbytes)
        self.peak = self.allocated


class LeakOfOneBlockInEight(CountingMemory):
    count = 0

    def freed(self, nbytes: int) -> None:
        self.count += 1
        if self.count % 8:
            super().freed(nbytes)


class ReservedIsWhatIsFree(CountingMemory):
    def stats(self, index: int | None = None) -> MemoryStats:
        found = super().stats(index)
        return found._replace(reserved=CAPACITY - self.allocated - (CAPACITY - 16))


class CountsKibibytes(CountingMemory):
    def stats(self, index: int | None = None) -> MemoryStats:
        found = super().stats(index)
        return found._replace(allocated=found.allocated // 1024)


class ReuseWhileInUse(CountingMemory):
    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.last: torch.UntypedStorage | None = None

    def allocate(self, nbytes: int, index: int | None = None) -> torch.UntypedStorage:
        if self.last is not None and self.last.nbytes() == nbytes == 4096:
            return self.last
        self.last = super().allocate(nbytes, index)
        return self.last


class RoundsUp(CountingMemory):
    def allocate(self, nbytes: int, index: int | None = None) -> torch.UntypedStorage:
        return super().allocate((nbytes + 511) // 512 * 512 if nbytes > 0 else nbytes, index)


class CopyDropsTail(CountingMemory):
    def copy_async(
        self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream | None = None
    ) -> None:
        count = target.numel() // 16 * 16
        target.view(-1)[:count].copy_(source.reshape(-1)[:count])


class FreeAboveTotal(CountingMemory):
    def info(self, index: int | None = None) -> MemoryInfo:
        return MemoryInfo(CAPACITY + 4096, CAPACITY)


class NegativeSizeIsEmpty(CountingMemory):
    def allocate(self, nbytes: int, index: int | None = None) -> torch.UntypedStorage:
        return super().allocate(max(nbytes, 0), index)


class LargeBlocksLeak(CountingMemory):
    def freed(self, nbytes: int) -> None:
        super().freed(nbytes if nbytes < 1 << 20 else nbytes // 2)


class LastBlockLeaks(CountingMemory):
    """A block that is freed while another lives is found again; the last one is not."""

    count = 0

    def freed(self, nbytes: int) -> None:
        self.count += 1
        if nbytes < 4096 or self.count % 16:
            super().freed(nbytes)


class PeakIsSampled(CountingMemory):
    sampled = 0

    def stats(self, index: int | None = None) -> MemoryStats:
        self.sampled = max(self.sampled, self.allocated)
        return super().stats(index)._replace(peak_allocated=self.sampled)

    def reset_peak(self, index: int | None = None) -> None:
        self.sampled = self.allocated


class PeakResetsToZero(CountingMemory):
    def reset_peak(self, index: int | None = None) -> None:
        self.peak = 0


class PeakIsReserved(CountingMemory):
    def stats(self, index: int | None = None) -> MemoryStats:
        return super().stats(index)._replace(peak_allocated=CAPACITY)


class OutOfMemoryClears(CountingMemory):
    """Before it gives up, it frees what is cached, and what is in use."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.last: weakref.ref[torch.UntypedStorage] | None = None

    def allocate(self, nbytes: int, index: int | None = None) -> torch.UntypedStorage:
        storage = super().allocate(nbytes, index)
        self.last = weakref.ref(storage)
        return storage

    def refuse(self, nbytes: int) -> None:
        last = None if self.last is None else self.last()
        if last is not None:
            last.fill_(0)
        super().refuse(nbytes)


class OutOfMemoryIsACode(CountingMemory):
    def refuse(self, nbytes: int) -> None:
        raise torch.OutOfMemoryError("error 2: out of memory")


class EmptyCacheClears(CountingMemory):
    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.live: list[weakref.ref[torch.UntypedStorage]] = []

    def allocate(self, nbytes: int, index: int | None = None) -> torch.UntypedStorage:
        storage = super().allocate(nbytes, index)
        self.live.append(weakref.ref(storage))
        return storage

    def empty_cache(self) -> None:
        for entry in self.live:
            storage = entry()
            if storage is not None:
                storage.fill_(0)


class CopyIgnoresStrides(CountingMemory):
    def copy_async(
        self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream | None = None
    ) -> None:
        dense = torch.empty(source.shape, device="meta").stride()
        if source.untyped_storage().nbytes() >= source.numel() * source.element_size():
            source = source.as_strided(source.shape, dense)
        target.copy_(source)


class CopyOfBits(CountingMemory):
    """Bytes are copied, whatever the types are."""

    def copy_async(
        self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream | None = None
    ) -> None:
        if target.itemsize == source.itemsize and target.dtype != source.dtype:
            source = source.view(target.dtype)
        target.copy_(source)


class CopyOfTheFirstPart(CountingMemory):
    """What does not fit is cut off."""

    def copy_async(
        self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream | None = None
    ) -> None:
        if target.shape != source.shape and source.numel() < target.numel() and source.dim() == 1:
            target.view(-1)[: source.numel()].copy_(source)
        else:
            target.copy_(source)


class CopiesWhenAsked(CountingMemory):
    """A copy is made when somebody waits for the device."""

    def copy_async(
        self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream | None = None
    ) -> None:
        pending: list[tuple[torch.Tensor, torch.Tensor]]
        pending = self.backend.__dict__.setdefault("pending", [])
        pending.append((target, source))


class StatisticsOfAThread(CountingMemory):
    def __init__(self, backend: Backend) -> None:
        self.own = threading.local()
        super().__init__(backend)

    @property
    def allocated(self) -> int:  # type: ignore[override]
        return int(getattr(self.own, "allocated", 0))

    @allocated.setter
    def allocated(self, value: int) -> None:
        self.own.allocated = value


class SmallBlocksLeak(CountingMemory):
    def freed(self, nbytes: int) -> None:
        if nbytes > 4096:
            super().freed(nbytes)


class SmallBlocksUncounted(CountingMemory):
    """Those of the small pool, whose statistics nobody added."""

    def allocate(self, nbytes: int, index: int | None = None) -> torch.UntypedStorage:
        storage = super().allocate(nbytes, index)
        self.allocated -= nbytes if nbytes <= 65536 else 0
        return storage

    def freed(self, nbytes: int) -> None:
        super().freed(nbytes if nbytes > 65536 else 0)


class OfTheFirstDevice(CountingMemory):
    """Whatever device is asked about; the host's memory is that of all of its devices."""

    def stats(self, index: int | None = None) -> MemoryStats:
        found = super().stats(index)
        return found if not index else found._replace(allocated=0, peak_allocated=0)


class TensorsTwice(CountingMemory):
    """By their size, and by that of their storages."""

    def stats(self, index: int | None = None) -> MemoryStats:
        found = super().stats(index)
        tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
        return found._replace(allocated=found.allocated + 2 * sum(t.nbytes for t in tensors))


class CopyOfNothingFails(CountingMemory):
    def copy_async(
        self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream | None = None
    ) -> None:
        if not source.numel():
            raise RuntimeError("error 1: invalid argument")
        super().copy_async(target, source, stream)


class CopyInWords(CountingMemory):
    """In units of 4 bytes; what is left over stays as it was."""

    def copy_async(
        self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream | None = None
    ) -> None:
        if source.element_size() == 1 and source.is_contiguous() and target.is_contiguous():
            whole = source.numel() // 4 * 4
            target, source = target.view(-1)[:whole], source.view(-1)[:whole]
        super().copy_async(target, source, stream)


class CopyAlignedDown(CountingMemory):
    def copy_async(
        self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream | None = None
    ) -> None:
        start, size = int(source.storage_offset()), source.element_size()
        start -= start * size % 4 // size
        aligned = source.as_strided(source.shape, source.stride(), start)
        super().copy_async(target, aligned, stream)


def _copies_when_asked() -> Backend:
    def synchronize(self: HonestBackend, index: int | None = None) -> None:
        self.check_index(index)
        for target, source in self.__dict__.pop("pending", []):
            target.copy_(source)

    backend: Backend = type("Late", (HonestBackend,), {"synchronize": synchronize})()
    backend.__dict__["memory"] = CopiesWhenAsked(backend)
    return backend


_MEMORIES = tuple(
    wrong_memory(name, bug, memory)
    for name, bug, memory in (
        ("out-of-memory-is-runtime-error", "wrong type of an error", OutOfMemoryIsRuntimeError),
        ("out-of-memory-is-swallowed", "an error that nobody sees", OutOfMemoryIsSwallowed),
        ("out-of-memory-without-numbers", "an error that tells nothing", OutOfMemoryWithoutNumbers),
        ("dead-after-out-of-memory", "no way back after an error", DeadAfterOutOfMemory),
        ("peak-never-resets", "a quiet no-op", PeakNeverResets),
        ("peak-forgets", "a statistic that means something else", PeakForgets),
        ("leak-of-one-block-in-eight", "leak", LeakOfOneBlockInEight),
        ("reserved-below-allocated", "a statistic that means something else", ReservedIsWhatIsFree),
        ("allocated-in-kibibytes", "wrong unit", CountsKibibytes),
        ("reuse-while-in-use", "free while in use", ReuseWhileInUse),
        ("storage-rounded-up", "wrong size", RoundsUp),
        ("copy-drops-tail", "dropped tail", CopyDropsTail),
        ("free-above-total", "numbers that contradict each other", FreeAboveTotal),
        ("negative-size-is-empty", "missing check of an argument", NegativeSizeIsEmpty),
        ("large-blocks-leak", "leak", LargeBlocksLeak),
        ("leak-of-one-block-per-step", "leak of one block per step", LastBlockLeaks),
        ("peak-is-sampled", "a statistic that is read too seldom", PeakIsSampled),
        ("peak-resets-to-zero", "a statistic that means something else", PeakResetsToZero),
        ("peak-is-reserved", "a statistic that means something else", PeakIsReserved),
        ("out-of-memory-clears", "an error that destroys", OutOfMemoryClears),
        ("out-of-memory-is-a-code", "an error that tells nothing", OutOfMemoryIsACode),
        ("empty-cache-clears", "free while in use", EmptyCacheClears),
        ("copy-ignores-strides", "layout not looked at", CopyIgnoresStrides),
        ("copy-of-bits", "dtype not looked at", CopyOfBits),
        ("statistics-of-a-thread", "per-thread state", StatisticsOfAThread),
        ("small-blocks-leak", "leak", SmallBlocksLeak),
        ("small-blocks-not-counted", "one of several pools", SmallBlocksUncounted),
        ("statistics-of-the-first-device", "state of one device", OfTheFirstDevice),
        ("tensors-counted-twice", "a statistic that means something else", TensorsTwice),
        ("copy-of-nothing-fails", "a special case forgotten", CopyOfNothingFails),
        ("copy-in-words", "dropped tail", CopyInWords),
        ("copy-aligned-down", "misaligned address", CopyAlignedDown),
    )
)
CATALOGUE: tuple[Wrong, ...] = (
    *_MEMORIES,
    Wrong(
        name="copy-made-when-asked", bug="a call that begins too late", chapter="memory",
        make=_copies_when_asked,
    ),
    Wrong(
        name="copy-cut-off", bug="missing check of an argument", chapter="errors", select="methods",
        make=wrong_memory("copy-cut-off", "", CopyOfTheFirstPart).make,
    ),
)  # fmt: skip
