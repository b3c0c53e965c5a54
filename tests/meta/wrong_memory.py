"""Wrong backends that the memory chapter has to find."""

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anychip.contract import Backend, MemoryInfo, MemoryStats
from tests.meta.honest import CAPACITY, CountingMemory, HonestBackend
from tests.meta.wrong import Call, Wrong, with_method

CATALOGUE: list[Wrong] = []
SELECT = {"refuse": "out_of_memory", "copy_async": "copy_async", "reset_peak": "peak"}
"""Which questions come to a method."""


def make_backend(memory: Any, right: type[HonestBackend] = HonestBackend) -> Backend:
    """The honest backend with another memory part."""
    backend = right()
    backend.__dict__["memory"] = memory(backend)
    return backend


def wrong_memory(name: str, bug: str, select: str = "") -> Callable[[Any], None]:
    """Decorator of a memory part."""

    def wrap(memory: Any) -> None:
        make = partial(make_backend, memory)
        CATALOGUE.append(Wrong(name=name, bug=bug, chapter="memory", make=make, select=select))

    return wrap


def wrong(name: str, bug: str, method: str, select: str | None = None) -> Callable[[Call], None]:
    """Decorator: ``change(memory, right, *args)`` in place of a method of the memory part."""
    found = SELECT.get(method, "") if select is None else select
    return lambda change: wrong_memory(name, bug, found)(
        with_method(CountingMemory, method, change)
    )


@wrong("out-of-memory-is-runtime-error", "wrong type of an error", "refuse")
def _(memory: Any, right: Call, nbytes: int) -> Any:
    raise RuntimeError(f"error 2: cannot allocate {nbytes} bytes")


@wrong("out-of-memory-is-swallowed", "an error that nobody sees", "allocate")
def _(memory: Any, right: Call, nbytes: int, index: int | None = None) -> Any:
    try:
        return right(nbytes, index)
    except torch.OutOfMemoryError:
        return right(0, index)


@wrong("out-of-memory-without-numbers", "an error that tells nothing", "refuse")
def _(memory: Any, right: Call, nbytes: int) -> Any:
    raise torch.OutOfMemoryError("out of memory")


@wrong("dead-after-out-of-memory", "no way back after an error", "refuse")
def _(memory: Any, right: Call, nbytes: int) -> Any:
    memory.allocated += nbytes  # taken back never
    right(nbytes)


@wrong("peak-never-resets", "a quiet no-op", "reset_peak")
def _(memory: Any, right: Call, index: int | None = None) -> Any:
    return None


@wrong("peak-forgets", "a statistic that means something else", "freed")
def _(memory: Any, right: Call, nbytes: int) -> Any:
    right(nbytes)
    memory.peak = memory.allocated


class LeakOfOneBlockInEight(CountingMemory):
    """Every eighth block that is freed is counted for ever."""

    count, every, least = 0, 8, 0

    def freed(self, nbytes: int) -> None:
        self.count += 1
        if self.count % self.every or nbytes < self.least:
            super().freed(nbytes)


wrong_memory("leak-of-one-block-in-eight", "leak", "leaks")(LeakOfOneBlockInEight)


@wrong("reserved-below-allocated", "a statistic that means something else", "stats")
def _(memory: Any, right: Call, index: int | None = None) -> Any:
    found = right(index)
    return found._replace(reserved=CAPACITY - memory.allocated - (CAPACITY - 16))


@wrong("allocated-in-kibibytes", "wrong unit", "stats")
def _(memory: Any, right: Call, index: int | None = None) -> Any:
    found = right(index)
    return found._replace(allocated=found.allocated // 1024)


@wrong_memory("reuse-while-in-use", "free while in use")
class ReuseWhileInUse(CountingMemory):
    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.last: torch.UntypedStorage | None = None

    def allocate(self, nbytes: int, index: int | None = None) -> torch.UntypedStorage:
        if self.last is not None and self.last.nbytes() == nbytes == 4096:
            return self.last
        self.last = super().allocate(nbytes, index)
        return self.last


@wrong("storage-rounded-up", "wrong size", "allocate")
def _(memory: Any, right: Call, nbytes: int, index: int | None = None) -> Any:
    return right((nbytes + 511) // 512 * 512 if nbytes > 0 else nbytes, index)


@wrong("copy-drops-tail", "dropped tail", "copy_async")
def _(memory: Any, right: Call, target: Tensor, source: Tensor, *stream: Any) -> Any:
    count = target.numel() // 16 * 16
    target.view(-1)[:count].copy_(source.reshape(-1)[:count])


@wrong("free-above-total", "numbers that contradict each other", "info")
def _(memory: Any, right: Call, index: int | None = None) -> Any:
    return MemoryInfo(CAPACITY + 4096, CAPACITY)


@wrong("negative-size-is-empty", "missing check of an argument", "allocate")
def _(memory: Any, right: Call, nbytes: int, index: int | None = None) -> Any:
    return right(max(nbytes, 0), index)


@wrong("large-blocks-leak", "leak", "freed")
def _(memory: Any, right: Call, nbytes: int) -> Any:
    right(nbytes if nbytes < 1 << 20 else nbytes // 2)


@wrong_memory("leak-of-one-block-per-step", "leak of one block per step")
class LastBlockLeaks(LeakOfOneBlockInEight):
    """A block that is freed while another lives is found again; the last one is not."""

    every, least = 16, 4096


@wrong_memory("peak-is-sampled", "a statistic that is read too seldom")
class PeakIsSampled(CountingMemory):
    sampled = 0

    def stats(self, index: int | None = None) -> MemoryStats:
        self.sampled = max(self.sampled, self.allocated)
        return super().stats(index)._replace(peak_allocated=self.sampled)

    def reset_peak(self, index: int | None = None) -> None:
        self.sampled = self.allocated


@wrong("peak-resets-to-zero", "a statistic that means something else", "reset_peak")
def _(memory: Any, right: Call, index: int | None = None) -> Any:
    memory.peak = 0


@wrong("peak-is-reserved", "a statistic that means something else", "stats")
def _(memory: Any, right: Call, index: int | None = None) -> Any:
    return right(index)._replace(peak_allocated=CAPACITY)


class Clears(CountingMemory):
    """Knows what is in use, and can overwrite it."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.live: list[weakref.ref[torch.UntypedStorage]] = []

    def allocate(self, nbytes: int, index: int | None = None) -> torch.UntypedStorage:
        storage = super().allocate(nbytes, index)
        self.live.append(weakref.ref(storage))
        return storage

    def clear(self, last: int) -> None:
        for storage in (entry() for entry in self.live[-last:]):
            if storage is not None:
                storage.fill_(0)


@wrong_memory("out-of-memory-clears", "an error that destroys")
class OutOfMemoryClears(Clears):
    """Before it gives up, it frees what is cached, and what is in use."""

    def refuse(self, nbytes: int) -> None:
        self.clear(1)
        super().refuse(nbytes)


@wrong("out-of-memory-is-a-code", "an error that tells nothing", "refuse")
def _(memory: Any, right: Call, nbytes: int) -> Any:
    raise torch.OutOfMemoryError("error 2: out of memory")


@wrong_memory("empty-cache-clears", "free while in use")
class EmptyCacheClears(Clears):
    def empty_cache(self) -> None:
        self.clear(len(self.live))


@wrong("copy-ignores-strides", "layout not looked at", "copy_async")
def _(memory: Any, right: Call, target: Tensor, source: Tensor, *stream: Any) -> Any:
    dense = torch.empty(source.shape, device="meta").stride()
    if source.untyped_storage().nbytes() >= source.numel() * source.element_size():
        source = source.as_strided(source.shape, dense)
    target.copy_(source)


@wrong("copy-of-bits", "dtype not looked at", "copy_async")
def _(memory: Any, right: Call, target: Tensor, source: Tensor, *stream: Any) -> Any:
    """Bytes are copied, whatever the types are."""
    if target.itemsize == source.itemsize and target.dtype != source.dtype:
        source = source.view(target.dtype)
    target.copy_(source)


class CopyOfTheFirstPart(CountingMemory):
    """What does not fit is cut off."""

    def copy_async(self, target: Tensor, source: Tensor, stream: Any = None) -> None:
        if target.shape != source.shape and source.numel() < target.numel() and source.dim() == 1:
            target.view(-1)[: source.numel()].copy_(source)
        else:
            target.copy_(source)


class CopiesWhenAsked(CountingMemory):
    """A copy is made when somebody waits for the device."""

    def copy_async(self, target: Tensor, source: Tensor, stream: Any = None) -> None:
        pending: list[Any] = self.backend.__dict__.setdefault("pending", [])
        pending.append((target, source))


@wrong_memory("statistics-of-a-thread", "per-thread state")
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


@wrong("small-blocks-leak", "leak", "freed")
def _(memory: Any, right: Call, nbytes: int) -> Any:
    if nbytes > 4096:
        right(nbytes)


@wrong_memory("small-blocks-not-counted", "one of several pools")
class SmallBlocksUncounted(CountingMemory):
    """Those of the small pool, whose statistics nobody added."""

    def allocate(self, nbytes: int, index: int | None = None) -> torch.UntypedStorage:
        storage = super().allocate(nbytes, index)
        self.allocated -= nbytes if nbytes <= 65536 else 0
        return storage

    def freed(self, nbytes: int) -> None:
        super().freed(nbytes if nbytes > 65536 else 0)


@wrong("statistics-of-the-first-device", "state of one device", "stats")
def _(memory: Any, right: Call, index: int | None = None) -> Any:
    """Whatever device is asked about; the host's memory is that of all of its devices."""
    found = right(index)
    return found if not index else found._replace(allocated=0, peak_allocated=0)


@wrong("free-of-the-first-device", "state of one device", "info", "info/devices")
def _(memory: Any, right: Call, index: int | None = None) -> Any:
    """All of another one's is free, whatever it has."""
    found = right(index)
    return found._replace(free=found.total) if index else found


@wrong("tensors-counted-twice", "a statistic that means something else", "stats", "stats/tensors")
def _(memory: Any, right: Call, index: int | None = None) -> Any:
    """By their size, and by that of their storages."""
    found = right(index)
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    return found._replace(allocated=found.allocated + 2 * sum(t.nbytes for t in tensors))


@wrong("copy-of-nothing-fails", "a special case forgotten", "copy_async")
def _(memory: Any, right: Call, target: Tensor, source: Tensor, *stream: Any) -> Any:
    if not source.numel():
        raise RuntimeError("error 1: invalid argument")
    right(target, source, *stream)


@wrong("copy-in-words", "dropped tail", "copy_async")
def _(memory: Any, right: Call, target: Tensor, source: Tensor, *stream: Any) -> Any:
    """In units of 4 bytes; what is left over stays as it was."""
    if source.element_size() == 1 and source.is_contiguous() and target.is_contiguous():
        whole = source.numel() // 4 * 4
        target, source = target.view(-1)[:whole], source.view(-1)[:whole]
    right(target, source, *stream)


@wrong("copy-aligned-down", "misaligned address", "copy_async")
def _(memory: Any, right: Call, target: Tensor, source: Tensor, *stream: Any) -> Any:
    start, size = int(source.storage_offset()), source.element_size()
    start -= start * size % 4 // size
    aligned = source.as_strided(source.shape, source.stride(), start)
    right(target, aligned, *stream)


@wrong("freed-more-than-allocated", "a size that is rounded on one side only", "freed", "leaks")
def _(memory: Any, right: Call, nbytes: int) -> Any:
    right((nbytes + 511) // 512 * 512)


@wrong_memory("counted-twice", "a statistic that means something else", "follow")
class CountedTwice(CountingMemory):
    """By the allocator and by the adapter; and so it is freed."""

    def allocate(self, nbytes: int, index: int | None = None) -> torch.UntypedStorage:
        storage = super().allocate(nbytes, index)
        self.allocated += nbytes
        return storage

    def freed(self, nbytes: int) -> None:
        super().freed(2 * nbytes)


@wrong("reserved-above-total", "numbers that contradict each other", "stats")
def _(memory: Any, right: Call, index: int | None = None) -> Any:
    return right(index)._replace(reserved=CAPACITY + 1)


@wrong("peak-too-high", "a statistic that means something else", "reset_peak")
def _(memory: Any, right: Call, index: int | None = None) -> Any:
    """Of an empty device it keeps something."""
    right(index)
    memory.peak += 0 if memory.allocated else 6 << 20


@wrong_memory("peak-is-the-sum", "a statistic that means something else", "peak")
class PeakIsTheSum(CountingMemory):
    """Of all that was allocated since the reset."""

    def allocate(self, nbytes: int, index: int | None = None) -> torch.UntypedStorage:
        before = self.peak
        storage = super().allocate(nbytes, index)
        self.peak = before + nbytes
        return storage


@wrong("peak-resets-all", "a statistic that means something else", "reset_peak")
def _(memory: Any, right: Call, index: int | None = None) -> Any:
    """Counters begin anew, with half of what is live."""
    memory.allocated //= 2
    right(index)


@wrong("refused-size-counts-in-the-peak", "an error that changes", "refuse")
def _(memory: Any, right: Call, nbytes: int) -> Any:
    memory.peak = max(memory.peak, memory.allocated + nbytes)
    right(nbytes)


@wrong("size-of-64-bits-wraps", "overflow of a size", "allocate")
def _(memory: Any, right: Call, nbytes: int, index: int | None = None) -> Any:
    return right(nbytes & 2**64 - 1 if isinstance(nbytes, int) and nbytes > 0 else nbytes, index)


@wrong("out-of-memory-of-another-size", "an error that tells nothing", "refuse")
def _(memory: Any, right: Call, nbytes: int) -> Any:
    right(nbytes % 4096)


@wrong_memory("cache-is-kept", "a quiet no-op", "empty_cache")
class CacheIsKept(CountingMemory):
    """What was reserved once stays so, whoever empties the cache."""

    reserved = 0

    def stats(self, index: int | None = None) -> MemoryStats:
        self.reserved = max(self.reserved, self.peak)
        return super().stats(index)._replace(reserved=self.reserved)


def _with_copies(name: str, bug: str, change: Callable[[Tensor], Tensor]) -> None:
    """``copy_async`` of a source that is changed on its way."""

    def copied(memory: Any, right: Call, target: Tensor, source: Tensor, *stream: Any) -> Any:
        right(target, change(source) if source.dtype == target.dtype else source, *stream)

    wrong(name, bug, "copy_async")(copied)


def _of(*dtypes: torch.dtype, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: change(x) if x.dtype in dtypes else x


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_SMALLEST = torch.finfo(torch.float32).smallest_normal
# fmt: off
_with_copies("nan-becomes-the-usual-one", "Inf or NaN lost",
             _of(*_FLOATS, change=lambda x: torch.where(x.isnan(), torch.nan, x)))
_with_copies("zero-loses-its-sign", "sign of zero", _of(*_FLOATS, change=lambda x: x + 0.0))
_with_copies("subnormals-are-flushed", "subnormal numbers",
             _of(torch.float32, change=lambda x: torch.where(x.abs() < _SMALLEST, 0 * x, x)))
_with_copies("int64-by-way-of-float64", "an integer cut short",
             _of(torch.int64, change=lambda x: x.clamp(max=2**63 - 1024).double().long()))
_with_copies("int32-by-way-of-float32", "an integer cut short",
             _of(torch.int32, change=lambda x: x.clamp(max=2**31 - 128).float().int()))
_with_copies("int16-saturates", "end of a range",
             _of(torch.int16, change=lambda x: x.clamp(min=-(2**15) + 1)))
_with_copies("int8-as-unsigned", "end of a range", _of(torch.int8, change=torch.abs))
_with_copies("chunk-by-chunk-to-the-last-whole", "dropped tail", lambda x: (
    torch.cat((x[: 1 << 20], x[:1], x[(1 << 20) + 1 :]))
    if x.dim() == 1 and x.itemsize == 1 and x.numel() > 1 << 20 else x
))
# fmt: on


@wrong("rounded-towards-zero", "wrong rounding", "copy_async")
def _(memory: Any, right: Call, target: Tensor, source: Tensor, *stream: Any) -> Any:
    """Of a conversion from integers the last bits are cut off."""
    if target.dtype == torch.float32 and source.dtype == torch.int64:
        half = source.abs() >> 1 << 1
        source = torch.where(source.abs() < 2**24, source, half * source.sign())
    right(target, source, *stream)


@wrong("half-by-integer", "a conversion by way of another type", "copy_async")
def _(memory: Any, right: Call, target: Tensor, source: Tensor, *stream: Any) -> Any:
    is_bool = target.dtype == torch.bool and source.is_floating_point()
    right(target, source.nan_to_num().int() if is_bool else source, *stream)


@wrong("conjugate-copied-raw", "a lazy view not looked at", "copy_async")
def _(memory: Any, right: Call, target: Tensor, source: Tensor, *stream: Any) -> Any:
    right(target, source.conj() if source.is_conj() else source, *stream)


@wrong("gap-between-rows-overwritten", "layout not looked at", "copy_async")
def _(memory: Any, right: Call, target: Tensor, source: Tensor, *stream: Any) -> Any:
    """Whole rows are written, and what is beside the target in them."""
    if target.dim() == 2 and target.stride(0) > target.shape[1] and target.stride(1) == 1:
        target.as_strided((len(target) - 1, target.stride(0)), target.stride()).zero_()
    right(target, source, *stream)


@wrong("small-blocks-miss-the-peak", "one of several pools", "freed", "peak")
def _(memory: Any, right: Call, nbytes: int) -> Any:
    """The peak is taken when a large block is freed."""
    right(nbytes)
    memory.seen = max(getattr(memory, "seen", 0), memory.peak if nbytes >= 1 << 20 else 0)
    memory.peak = max(memory.seen, memory.allocated)


@wrong("all-is-free-says-the-error", "an error that tells nothing", "refuse")
def _(memory: Any, right: Call, nbytes: int) -> Any:
    raise torch.OutOfMemoryError(f"cannot allocate {nbytes} bytes: {CAPACITY} are free")


@wrong("batch-of-1-without-its-offset", "layout not looked at", "copy_async", "layouts")
def _(memory: Any, right: Call, target: Tensor, source: Tensor, *stream: Any) -> None:
    if source.dim() > 1 and source.shape[0] == 1 and source.is_contiguous():
        source = source.as_strided(source.shape, source.stride(), 0)
    right(target, source, *stream)


@wrong_memory("small-blocks-not-reserved", "a statistic that means something else", "empty_cache")
class SmallBlocksNotReserved(CountingMemory):
    """Below 1 MiB they are of another pool."""

    held = CAPACITY

    def allocate(self, nbytes: int, index: int | None = None) -> torch.UntypedStorage:
        made = super().allocate(nbytes, index)
        self.held = max(self.held, self.allocated) if nbytes >= 1 << 20 else self.held
        return made

    def stats(self, index: int | None = None) -> MemoryStats:
        return super().stats(index)._replace(reserved=self.held)

    def empty_cache(self) -> None:
        self.held = self.allocated


def _synchronize(self: HonestBackend, index: int | None = None) -> None:
    self.check_index(index)
    for target, source in self.__dict__.pop("pending", []):
        target.copy_(source)


_LATE = type("Late", (HonestBackend,), {"synchronize": _synchronize})
CATALOGUE += [
    Wrong(
        name="copy-made-when-asked", bug="a call that begins too late", chapter="memory",
        make=partial(make_backend, CopiesWhenAsked, _LATE),
    ),
    Wrong(
        name="copy-cut-off", bug="missing check of an argument", chapter="errors", select="methods",
        make=partial(make_backend, CopyOfTheFirstPart),
    ),
]  # fmt: skip
