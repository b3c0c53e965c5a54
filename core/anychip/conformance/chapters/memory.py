"""Does memory keep to its definitions: storages, statistics, running out, copies?

Statistics are read around allocations of some MiB: on a host they are those of the whole process,
and small ones come and go in between.
"""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from anychip.conformance.case import Case, Context, check, check_equal_bits, expect_error
from anychip.conformance.chapters.device import in_thread
from anychip.contract import HOST, Memory, MemoryInfo, MemoryStats

MIB = 1 << 20
NOISE = MIB
"""What the process itself may allocate or free while a case looks at the statistics."""


def cases(context: Context) -> Iterator[Case]:
    """Storages and copies for all; statistics, peak and pinned memory where they are declared."""
    for capability, group in GROUPS.items():
        for name, run in group.items():
            yield Case(id=f"memory/{name}", run=run, capability=capability)


# Storages


def allocate(context: Context) -> None:
    """A storage of exactly the size asked for, on the device; 0 bytes too."""
    for nbytes in (0, 1, 3, 512, 4097, MIB + 1):
        storage = context.backend.memory.allocate(nbytes)
        kind = type(storage)
        check(kind is torch.UntypedStorage, f"UntypedStorage expected, got {kind}")
        check(storage.nbytes() == nbytes, f"{nbytes} bytes expected, got {storage.nbytes()}")
        device = torch.empty(0, device=context.device).device
        check(storage.device == device, f"on {device} expected, got {storage.device}")


def allocate_negative(context: Context) -> None:
    """A negative size is the caller's mistake, and says so."""
    expect_error(ValueError, "-1 bytes", context.backend.memory.allocate, -1, mentions=("-1",))


def storages_apart(context: Context) -> None:
    """Live storages do not overlap, under a random history of allocating and freeing."""
    order = random.Random(5 + context.seed)
    live: dict[int, torch.Tensor] = {}
    for step in range(200):
        if live and order.random() < 0.4:
            check_pattern(*live.popitem())
            continue
        nbytes = order.choice((1, 7, 64, 500, 4096, 70_001))
        live[step] = as_bytes(context.backend.memory.allocate(nbytes)).fill_(step % 251)
    for pattern, tensor in live.items():
        check_pattern(pattern, tensor)


def check_pattern(number: int, tensor: torch.Tensor) -> None:
    """A storage still holds what was written to it."""
    same = bool((tensor.cpu() == number % 251).all())
    check(same, f"the storage of step {number} ({tensor.numel()} bytes) was overwritten by another")


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A uint8 tensor over a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def info(context: Context) -> None:
    """Free and total bytes: ints, free at most total, total near that of the properties."""
    found = context.backend.memory.info()
    check(isinstance(found, MemoryInfo), f"a MemoryInfo expected, got {found!r}")
    check(type(found.free) is int and type(found.total) is int, f"ints expected, got {found!r}")
    check(0 <= found.free <= found.total and found.total > 0, f"0 <= free <= total, got {found}")
    known = context.backend.properties().total_memory
    check(0.5 <= found.total / known <= 2.0, f"total is {found.total}, properties() say {known}")


def out_of_memory(context: Context) -> None:
    """More than there is raises torch.OutOfMemoryError with the numbers; then the device works."""
    memory = context.backend.memory
    too_much = max(64 * memory.info().total, 2**60)  # more than any address space
    kept = as_bytes(memory.allocate(MIB)).fill_(99)
    for _ in range(3):
        error = expect_error(torch.OutOfMemoryError, f"{too_much} bytes", memory.allocate, too_much)
        numbers = re.findall(r"\d+", str(error))
        check(len(numbers) > 1, f"the sizes asked for and free expected, the message is: {error}")
    works(context)
    check_pattern(99, kept)


def out_of_memory_by_hand(context: Context) -> None:
    """``out_of_memory()`` turns an adapter's own failure into torch's, and lets others through."""
    memory = context.backend.memory

    def fail(error: Exception) -> None:
        with memory.out_of_memory(12345):
            raise error

    for error in (RuntimeError("adapter: no memory"), MemoryError()):
        expect_error(torch.OutOfMemoryError, type(error).__name__, fail, error, mentions=("12345",))
    own = torch.OutOfMemoryError("own words")
    expect_error(torch.OutOfMemoryError, "torch's own", fail, own, mentions=("own words",))
    expect_error(KeyError, "another exception", fail, KeyError("x"))


def works(context: Context) -> None:
    """The device allocates and computes."""
    storage = context.backend.memory.allocate(4096)
    check(storage.nbytes() == 4096, "no allocation after running out of memory")
    x = torch.arange(1000, dtype=torch.float32, device=context.device)
    total = float((x + 1.0).sum())
    check(total == 500500.0, f"sum after running out of memory: 500500 expected, got {total}")


def copy(context: Context, target: torch.Tensor, source: torch.Tensor, *stream: Any) -> None:
    """A copy that is waited for."""
    context.backend.memory.copy_async(target, source, *stream)
    context.backend.synchronize()


def copies(context: Context) -> None:
    """Host to device to host, bit for bit, in every layout that torch copies."""
    source = torch.arange(70_001, dtype=torch.int32)
    there = torch.empty(70_001, dtype=torch.int32, device=context.device)
    back = torch.empty(70_001, dtype=torch.int32)
    memory = context.backend.memory
    result: Any = memory.copy_async(there, source)  # type: ignore[func-returns-value]
    check(result is None, f"copy_async returns None, got {result!r}")
    copy(context, back, there)
    check_equal_bits("copied there and back", back, source)
    memory.copy_async(there[:35_000], source[35_000:70_000])
    copy(context, back, there)
    check_equal_bits("a part that was copied", back[:35_000], source[35_000:70_000])
    check_equal_bits("the part that was not", back[35_000:], source[35_000:])


def copies_of_bytes(context: Context) -> None:
    """Any number of bytes from and to any place; scalars; types of every width."""
    source = torch.arange(256, dtype=torch.uint8)
    places = ((0, 0, 0), (0, 1, 3), (1, 7, 0), (2, 5, 2), (3, 66, 1), (5, 251, 5))
    for first, count, target in places:
        there = torch.full((256 + 8,), 255, dtype=torch.uint8, device=context.device)
        copy(context, there[target : target + count], source[first : first + count])
        want = torch.full((256 + 8,), 255, dtype=torch.uint8)
        want[target : target + count] = source[first : first + count]
        check_equal_bits(f"{count} bytes from {first} to {target}", there.cpu(), want)
    values = (
        torch.tensor(2.5),
        torch.tensor([2**53 + 1, -(2**40)]),
        torch.tensor([True, False]),
        torch.tensor([1e-8, -3.0], dtype=torch.bfloat16),
    )
    for value in values:
        there = torch.zeros_like(value, device=context.device)
        copy(context, there, value)
        check_equal_bits(f"{value.dtype} of shape {tuple(value.shape)}", there.cpu(), value)


def copies_of_layouts(context: Context) -> None:
    """As ``target[...] = source``: strides of both, one value for many, another dtype."""
    source = torch.arange(35 * 64, dtype=torch.float32).view(35, 64)
    sources = {
        "transposed": source.t().contiguous().t(),
        "every second": torch.stack((source, -source), -1)[..., 0],
        "one row for all": source[:1].expand(35, 64),
        "of int32": source.int(),
    }
    for name, given in sources.items():
        for target_name, room in {
            "contiguous": torch.full((35, 64), -1.0),
            "transposed": torch.full((64, 35), -1.0).t(),
            "with gaps": torch.full((35, 2, 64), -1.0)[:, 0],
        }.items():
            there = room.to(context.device)
            copy(context, there, given)
            what = f"source {name}, target {target_name}"
            check_equal_bits(what, there.cpu(), given.to(torch.float32))


def copies_in_order(context: Context) -> None:
    """Work of the same stream behind a copy sees it; nobody has to wait for that."""
    source = torch.arange(MIB, dtype=torch.float32)
    there = torch.zeros(MIB, device=context.device)
    back = torch.empty(MIB)
    context.backend.memory.copy_async(there, source)
    doubled = there * 2.0
    context.backend.memory.copy_async(back, doubled)
    context.backend.synchronize()
    check_equal_bits("copied, doubled, and copied back", back, source * 2.0)


def copies_on_stream(context: Context) -> None:
    """A copy on a stream of its own, and the tensors live until it is done."""
    backend = context.backend
    stream, source = backend.stream(), torch.arange(MIB, dtype=torch.int32)
    there = torch.empty(MIB, dtype=torch.int32, device=context.device)
    backend.synchronize()
    copy(context, there, source, stream)
    check_equal_bits("copied on a stream", there.cpu(), source)


# Statistics


def stats_types(context: Context) -> None:
    """Ints; reserved never below allocated; a peak just when it is declared."""
    found = context.backend.memory.stats()
    check(isinstance(found, MemoryStats), f"MemoryStats expected, got {found!r}")
    check(type(found.allocated) is int and type(found.reserved) is int, f"ints, got {found!r}")
    check(0 <= found.allocated <= found.reserved, f"0 <= allocated <= reserved, got {found}")
    has_peak = "memory_peak" in context.backend.capabilities
    check((found.peak_allocated is not None) == has_peak, f"memory_peak {has_peak}, got {found}")


def change_by(memory: Memory, act: Callable[[], Any]) -> int:
    """By how much ``allocated`` grows."""
    before = memory.stats().allocated
    act()
    return memory.stats().allocated - before


def stats_follow(context: Context) -> None:
    """``allocated`` grows by what is allocated, and falls by what is freed."""
    memory = context.backend.memory
    gc.collect()
    start = memory.stats().allocated
    sizes, held = (3 * MIB, 8 * MIB, 5 * MIB), list[torch.UntypedStorage]()
    for nbytes in sizes:
        grown = change_by(memory, lambda: held.append(memory.allocate(nbytes)))  # noqa: B023
        check(grown >= nbytes - NOISE // 16, f"{nbytes} allocated, `allocated` grew by {grown}")
    for nbytes in reversed(sizes):
        fallen = -change_by(memory, held.pop)
        check(fallen >= nbytes - NOISE, f"{nbytes} freed, `allocated` fell by {fallen}")
    left = memory.stats().allocated - start
    check(abs(left) <= 2 * NOISE, f"{sum(sizes)} bytes came and went, `allocated` is {left} higher")


def stats_reserved(context: Context) -> None:
    """``reserved`` covers ``allocated`` at every moment of a random history."""
    memory, order = context.backend.memory, random.Random(11 + context.seed)
    held: list[torch.UntypedStorage] = []
    for _ in range(100):
        if held and order.random() < 0.5:
            held.pop(order.randrange(len(held)))
        else:
            held.append(memory.allocate(order.randrange(1, 2 * MIB)))
        found = memory.stats()
        check(found.reserved >= found.allocated, f"reserved is below allocated: {found}")
        live = sum(storage.nbytes() for storage in held)
        check(found.allocated >= live - NOISE, f"{live} bytes are live, allocated: {found}")


def nothing_leaks(context: Context) -> None:
    """As many bytes after many cycles as after a few: small and large, freed in any order."""
    memory, order = context.backend.memory, random.Random(17 + context.seed)
    cycles = 10_000 if context.level == "full" else 1000
    sizes = (1, 512, 5000, 256 * 1024, 3 * MIB)

    def cycle(count: int) -> None:
        held: list[torch.UntypedStorage] = []
        for step in range(count):
            held.append(memory.allocate(sizes[step % len(sizes)]))
            if len(held) > 4:
                held.pop(order.randrange(len(held)))

    cycle(10)
    gc.collect()
    start = memory.stats().allocated
    cycle(cycles)
    gc.collect()
    left = memory.stats().allocated - start
    check(left <= 2 * NOISE, f"{cycles} cycles of {sizes} bytes left {left} bytes behind")


def small_blocks(context: Context) -> None:
    """Small blocks count like large ones: what thousands of them take, and give back."""
    memory, nbytes, count = context.backend.memory, 1024, 6 * MIB // 1024
    gc.collect()
    before = memory.stats().allocated
    held = [memory.allocate(nbytes) for _ in range(count)]
    grown = memory.stats().allocated - before
    least = count * nbytes - NOISE
    check(grown >= least, f"{count} times {nbytes} bytes allocated, `allocated` grew by {grown}")
    held.clear()
    left = memory.stats().allocated - before
    check(left <= 2 * NOISE, f"{count} times {nbytes} bytes freed, `allocated` is {left} higher")


def stats_of_threads(context: Context) -> None:
    """Statistics are the device's, not a thread's: allocated there, seen and freed here."""
    memory = context.backend.memory
    before = memory.stats().allocated
    held = [in_thread(lambda: memory.allocate(12 * MIB))]
    grown = memory.stats().allocated - before
    check(grown >= 12 * MIB - NOISE, f"a thread allocated 12 MiB, `allocated` grew by {grown}")
    held.clear()
    left = memory.stats().allocated - before
    check(left <= NOISE, f"12 MiB of another thread were freed here, and {left} bytes are left")


def stats_of_tensors(context: Context) -> None:
    """torch's own tensors count once; on the host, whose allocator is the process's, or not."""
    memory, nbytes = context.backend.memory, 12 * MIB
    before = memory.stats().allocated
    held = torch.empty(nbytes, dtype=torch.uint8, device=context.device)
    grown = memory.stats().allocated - before
    right = [nbytes, 0] if held.device.type == HOST else [nbytes]
    text = f"a tensor of {nbytes} bytes was made, `allocated` grew by {grown}"
    check(any(abs(grown - want) <= NOISE for want in right), text)


def stats_of_devices(context: Context) -> None:
    """Each device answers for its own memory, and indices of one memory for all of it."""
    backend, nbytes = context.backend, 12 * MIB
    every = range(backend.device_count())
    homes = [torch.empty(0, device=backend.device(index)).device for index in every]
    for index in every:
        before = [backend.memory.stats(i).allocated for i in every]
        held = backend.memory.allocate(nbytes, index)
        for i in every:
            grown = backend.memory.stats(i).allocated - before[i]
            want = nbytes if homes[i] == homes[index] else 0
            text = f"{nbytes} bytes allocated on device {index}; {want} expected on device {i}"
            check(abs(grown - want) <= NOISE, f"{text}, `allocated` grew by {grown}")
        del held


def empty_cache(context: Context) -> None:
    """Gives back what is free; what is allocated keeps its bytes."""
    memory = context.backend.memory
    kept = as_bytes(memory.allocate(MIB)).fill_(77)
    memory.allocate(16 * MIB)
    before = memory.stats()
    result: Any = memory.empty_cache()  # type: ignore[func-returns-value]
    check(result is None, f"empty_cache returns None, got {result!r}")
    after = memory.stats()
    check(after.reserved <= before.reserved + NOISE, f"reserved grew: {before}, then {after}")
    moved = abs(after.allocated - before.allocated)
    check(moved <= NOISE, f"allocated changed by {moved} bytes: {before}, then {after}")
    check_pattern(77, kept)


# Peak


def peak_rises(context: Context) -> None:
    """The peak is at least what was allocated, also after it was freed, and never falls."""
    memory = context.backend.memory
    memory.reset_peak()
    base = memory.stats().allocated
    held = memory.allocate(24 * MIB)
    high = peak(context)
    check(high >= base + 24 * MIB - NOISE, f"24 MiB on top of {base}: the peak is {high}")
    del held
    for nbytes in (MIB, 4 * MIB, 2 * MIB):
        memory.allocate(nbytes)
        now = peak(context)
        check(now >= high, f"the peak fell from {high} to {now} without a reset")
    check(peak(context) >= memory.stats().allocated, "the peak is below what is allocated")
    base = memory.stats().allocated
    memory.allocate(48 * MIB)  # and it is gone before anybody asks
    high = peak(context)
    check(high >= base + 48 * MIB - NOISE, f"48 MiB came and went on top of {base}: peak {high}")


def peak_resets(context: Context) -> None:
    """After a reset the peak is what is allocated now."""
    memory = context.backend.memory
    memory.allocate(32 * MIB)
    held = memory.allocate(2 * MIB)
    memory.reset_peak()
    found = memory.stats()
    assert found.peak_allocated is not None
    above = found.peak_allocated - found.allocated
    check(abs(above) <= NOISE, f"right after a reset the peak is {above} bytes above: {found}")
    del held


def peak(context: Context) -> int:
    """The peak now."""
    found = context.backend.memory.stats().peak_allocated
    check(type(found) is int, f"peak_allocated: an int expected, got {found!r}")
    assert found is not None
    return found


# Pinned memory


def pinned(context: Context) -> None:
    """Page-locked bytes of the host, of the size asked for; copies from it arrive."""
    for nbytes in (1, 4096, MIB):
        tensor = context.backend.memory.pinned(nbytes)
        fits = tensor.dtype == torch.uint8 and tensor.numel() == nbytes
        check(fits, f"uint8[{nbytes}], {tensor}")
        check(tensor.device.type == HOST and tensor.is_pinned(), "page-locked host memory expected")
        tensor.fill_(nbytes % 251)
        there = torch.empty(nbytes, dtype=torch.uint8, device=context.device)
        copy(context, there, tensor)
        check_pattern(nbytes, there)


def pinned_copies(context: Context) -> None:
    """Copies between page-locked memory and the device, waited for later: by event, or for all."""
    memory, nbytes = context.backend.memory, 8 * MIB
    first, last = memory.pinned(nbytes), memory.pinned(nbytes)
    first.copy_(torch.arange(nbytes) % 251)
    want = first.clone()
    last.fill_(0xEE)
    there = torch.empty(nbytes, dtype=torch.uint8, device=context.device)
    memory.copy_async(there, first)
    memory.copy_async(last, there)
    if "streams" in context.backend.capabilities:
        event = context.backend.event()
        event.record(context.backend.current_stream())
        event.synchronize()
    else:
        context.backend.synchronize()
    first.fill_(0)  # the stream has passed this point: the source may change
    check_equal_bits("copied to the device and back", last, want)
    context.backend.synchronize()
    check_equal_bits("what is on the device", there.cpu(), want)


GROUPS: dict[str | None, dict[str, Callable[[Context], None]]] = {
    None: {
        "allocate/sizes": allocate,
        "allocate/negative": allocate_negative,
        "allocate/apart": storages_apart,
        "info": info,
        "out_of_memory/raised": out_of_memory,
        "out_of_memory/by_hand": out_of_memory_by_hand,
        "copy_async/round_trip": copies,
        "copy_async/bytes": copies_of_bytes,
        "copy_async/layouts": copies_of_layouts,
        "copy_async/order": copies_in_order,
    },
    "streams": {"copy_async/on_stream": copies_on_stream},
    "memory_stats": {
        "stats/types": stats_types,
        "stats/follow": stats_follow,
        "stats/reserved": stats_reserved,
        "stats/leaks": nothing_leaks,
        "stats/small": small_blocks,
        "stats/threads": stats_of_threads,
        "stats/tensors": stats_of_tensors,
        "stats/devices": stats_of_devices,
        "stats/empty_cache": empty_cache,
    },
    "memory_peak": {"peak/rises": peak_rises, "peak/resets": peak_resets},
    "pinned_memory": {"pinned/sizes": pinned, "pinned/copies": pinned_copies},
}
