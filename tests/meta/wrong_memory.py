"""Wrong backends that the memory chapter has to find."""

from __future__ import annotations

import torch

from anychip.contract import Backend, MemoryInfo, MemoryStats
from tests.meta.honest import CAPACITY, CountingMemory
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


CATALOGUE: tuple[Wrong, ...] = tuple(
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
    )
)
