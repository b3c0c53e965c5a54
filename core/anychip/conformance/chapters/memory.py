"""Does memory keep to its definitions: storages, statistics, running out?

Statistics are read around allocations of some MiB: on a host they are those of the whole process,
and small ones come and go in between. What copies do is asked in memory_copies.py.
"""

import gc
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from anychip.conformance.case import Case, Context, check, check_equal_bits, expect_error
from anychip.conformance.chapters import memory_copies
from anychip.conformance.surroundings import again, in_thread
from anychip.contract import HOST, Memory, MemoryInfo, MemoryStats

MIB = 1 << 20
NOISE = MIB
"""What the process itself may allocate or free while a case looks at the statistics."""
SMALL = 1 << 30
"""A device of so many bytes is filled up; a larger one may have other users at the same time."""


def cases(context: Context) -> Iterator[Case]:
    """Storages and copies for all; statistics, peak and pinned memory where they are declared."""
    asked = [
        Case(id=f"memory/{name}", run=partial(_after_garbage, run), capability=capability)
        for capability, group in GROUPS.items()
        for name, run in group.items()
    ]
    yield from asked
    yield from again("memory", asked, ONCE)


def _after_garbage(run: Callable[[Context], None], context: Context) -> None:
    """Asks when nothing is left in cycles that, collected meanwhile, would change statistics."""
    gc.collect()
    run(context)


# Storages


def allocate(context: Context) -> None:
    """A storage of exactly the size asked for, on the device, which it holds to both of its ends.

    0 bytes, and sizes next to powers of two, up to more than 32 bits count where there is room.
    """
    info = context.backend.memory.info()
    most = min(info.free // 2, info.total // 4)  # to which OpenCL lets a device limit a storage
    around = (2**k + step for k in (*range(1, 27, 3), 31, 32) for step in (-1, 0, 1, 1000))
    device = torch.empty(0, device=context.device).device
    for nbytes in (0, 1, 3, *(n for n in around if n < most)):
        storage = context.backend.memory.allocate(nbytes)
        check(type(storage) is torch.UntypedStorage, f"not UntypedStorage: {type(storage)}")
        check(storage.nbytes() == nbytes, f"{nbytes} bytes expected, got {storage.nbytes()}")
        check(storage.device == device, f"on {device} expected, got {storage.device}")
        for end in (as_bytes(storage)[:3], as_bytes(storage)[-3:]):
            check_pattern(nbytes, end.fill_(nbytes % 251))


def allocate_negative(context: Context) -> None:
    """A size that is negative, or no integer, is the caller's mistake, and the message says so."""
    expect_error(ValueError, "-1 bytes", context.backend.memory.allocate, -1, mentions=("-1",))
    for size in (16.5, 16.0, "16", None):
        expect_error(ValueError, f"{size!r} bytes", context.backend.memory.allocate, size)


def storages_apart(context: Context) -> None:
    """Live storages do not overlap, under a random history: also many, large, of another thread."""
    memory, here = context.backend.memory, context.backend.current_device()
    order, live = random.Random(5 + context.seed), dict[int, torch.Tensor]()
    sizes = (1, 7, 64, 500, 4096, 70_001, MIB + 300)
    chosen = [order.choice(sizes) if step < 200 else 4096 for step in range(500)]
    for step, nbytes in enumerate((*chosen, *(MIB + 300,) * 3)):
        if step < 200 and live and order.random() < 0.4:
            step = order.choice(list(live))
            check_pattern(step, live.pop(step))
            continue
        make = partial(memory.allocate, nbytes, here)
        live[step] = as_bytes(in_thread(make) if step % 8 == 7 else make()).fill_(step % 251)
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
    known, held = context.backend.properties().total_memory, list[torch.UntypedStorage]()
    for _ in range(2):
        found = context.backend.memory.info()
        check(isinstance(found, MemoryInfo), f"a MemoryInfo expected, got {found!r}")
        check(type(found.free) is int and type(found.total) is int, f"ints expected, got {found!r}")
        check(
            0 <= found.free <= found.total and found.total > 0, f"0 <= free <= total, got {found}"
        )
        check(0.5 <= found.total / known <= 2.0, f"total is {found.total}, properties say {known}")
        held.append(context.backend.memory.allocate(MIB))
        now = context.backend.properties().total_memory
        check(now == known, f"1 MiB was allocated, and total_memory is {now}, not {known}")


def info_of_devices(context: Context) -> None:
    """What is free on a device falls by a block of its own, where it falls so on the first one."""
    memory, nbytes = context.backend.memory, min(64 * MIB, context.backend.memory.info(0).free // 8)

    def fall(index: int) -> int:
        if "memory_stats" in context.backend.capabilities:
            memory.empty_cache()  # of which the block could be
        before, block = memory.info(index).free, memory.allocate(nbytes, index)
        as_bytes(block).fill_(1)
        return before - memory.info(index).free

    falls = [fall(0) for _ in range(3)]
    known, counts = falls[-1], "memory_stats" in context.backend.capabilities
    check(any(falls) or not counts, f"as much is free after {nbytes} bytes were written as before")
    # Twice the same: not the memory of a host, of which others take at the same time.
    if falls[-2] == known >= nbytes // 2:
        for index in range(1, context.backend.device_count()):
            found = max(fall(index) for _ in range(3))  # others may free at the same time
            what = f"{nbytes} bytes were allocated on device {index}, of which info() reports"
            check(found >= nbytes // 2, f"{what} {found}, and {known} of device 0")


def out_of_memory(context: Context) -> None:
    """More than there is raises torch.OutOfMemoryError with the numbers; then the device works."""
    memory = context.backend.memory
    free, total = memory.info()
    too_much = max(80 * total, 5 * 2**56) - 3  # more than any address space
    large = [request(context, min(free // 4, total // 8))]  # of which a message has to know
    kept = [as_bytes(memory.allocate(MIB)).fill_(99)]  # last: it would be freed first
    counts = "memory_stats" in context.backend.capabilities
    before = memory.stats() if counts else None
    for nbytes in (too_much, too_much + 4097, 2**63 - 1):
        for index in (None, *range(context.backend.device_count())):
            check(request(context, nbytes, index) is None, f"{nbytes} bytes: an error expected")
    # A number of bytes that no integer of 64 bits holds is not a small one.
    for nbytes in (2**63, 2**64, 2**64 + 16):
        expect_error((torch.OutOfMemoryError, ValueError), f"{nbytes}", memory.allocate, nbytes)
    # So much is there, but not free; a host may give what it does not have, until it is written.
    for _ in range(300 if total <= SMALL else 30):  # some devices report each
        if request(context, (memory.info().free + total) // 2 + 1) is not None:
            break
    if before is not None:
        after = memory.stats()
        check_bounds(context, after)
        for was, now in zip(before[::2], after[::2], strict=True):
            same = was is None or now is None or abs(was - now) <= NOISE
            check(same, f"nothing was allocated, and {before} became {after}")
    if total <= SMALL:  # to the last block, and then a little more
        large += [request(context, n) for n in (*(total >> k for k in range(1, 17)), 5000, 70_001)]
    large.clear()
    works(context)
    check_pattern(99, kept[0])


def request(context: Context, nbytes: int, index: int | None = None) -> torch.UntypedStorage | None:
    """A storage, or None where it is refused: by a message with the sizes, and nothing moved."""
    backend = context.backend
    if "memory_stats" in backend.capabilities:
        backend.memory.empty_cache()  # what it holds would be free once something is refused
    here, free = backend.current_device(), backend.memory.info(index).free
    try:
        return backend.memory.allocate(nbytes, index)
    except torch.OutOfMemoryError as error:
        numbers = [float(n) for n in re.findall(r"\d+(?:\.\d+)?", str(error))]
        for name, size, share in (("asked for", nbytes, 0.01), ("free", free, 0.05)):
            near = (abs(n * 1024**k - size) <= share * size for n in numbers for k in range(5))
            check(any(near), f"the size {name}, {size}, expected, the message is: {error}")
    now = backend.current_device()
    check(now == here, f"a refusal on {index} moved the current device from {here} to {now}")
    return None


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
    """``allocated`` grows by what is allocated and by no more than that, and falls by as much."""
    memory = context.backend.memory
    sizes, held = (3 * MIB, 8 * MIB + 1, 5_123_457, 40 * MIB), list[torch.UntypedStorage]()
    grown = []
    for nbytes in sizes:
        grown.append(change_by(memory, lambda: held.append(memory.allocate(nbytes))))  # noqa: B023
        least, most = nbytes - NOISE // 16, (1 << (nbytes - 1).bit_length()) + 2 * NOISE
        right = least <= grown[-1] <= most
        check(right, f"{nbytes} bytes allocated, `allocated` grew by {grown[-1]}, at most {most}")
    for place in (2, 0, 1, 0):
        fallen = -change_by(memory, partial(held.pop, place))
        want = grown.pop(place)
        check(abs(fallen - want) <= NOISE, f"{want} bytes came, and {fallen} went")
    kept = [as_bytes(memory.allocate(8 * MIB))]
    fallen = -change_by(memory, kept.clear)
    check(fallen >= 8 * MIB - NOISE, f"a tensor of 8 MiB is gone, `allocated` fell by {fallen}")


def nothing_leaks(context: Context) -> None:
    """As many bytes after many cycles as before: of each size alone, freed in any order."""
    memory, order = context.backend.memory, random.Random(17 + context.seed)
    traffic = (128 if context.level == "full" else 32) * MIB
    for nbytes in (0, 1, 1000, 4097, 70_001, 256 * 1024, 3 * MIB + 1):
        held: list[torch.UntypedStorage] = []
        start = memory.stats().allocated
        cycles = traffic // max(nbytes, 4096) + 100
        for _ in range(cycles):
            held.append(memory.allocate(nbytes))
            if len(held) > 5:
                held.pop(order.randrange(len(held)))
        held.clear()
        left = memory.stats().allocated - start
        text = f"{cycles} blocks of {nbytes} bytes came and went, `allocated` is {left} higher"
        check(abs(left) <= 2 * NOISE, text)


def small_blocks(context: Context) -> None:
    """Small blocks count like large ones: what thousands of them take."""
    memory, count = context.backend.memory, 8192
    for nbytes in (1000, 1024, 4097):
        before = memory.stats().allocated
        held = [memory.allocate(nbytes) for _ in range(count)]
        grown = memory.stats().allocated - before
        least, most = count * nbytes - NOISE, 2 * count * nbytes + NOISE
        text = f"{count} times {nbytes} bytes allocated, `allocated` grew by {grown}"
        check(least <= grown <= most, text)
        del held


def check_bounds(context: Context, found: MemoryStats) -> None:
    """What holds at every moment: 0 <= allocated <= reserved <= total, allocated <= peak."""
    total = context.backend.memory.info().total
    right = 0 <= found.allocated <= found.reserved <= total
    check(right, f"0 <= allocated <= reserved <= {total} expected, got {found}")
    peak = found.peak_allocated
    check(peak is None or peak >= found.allocated, f"the peak is below allocated: {found}")


def history(context: Context, *, look: bool) -> tuple[int, int]:
    """A random history from a seed: by how much the peak and ``allocated`` rose, in its course.

    Blocks of up to 12 MiB, at most four at once; both are above where the history began.

    Args:
        look: whether somebody reads the statistics at every step.
    """
    memory, order = context.backend.memory, random.Random(11 + context.seed)
    has_peak = "memory_peak" in context.backend.capabilities
    if has_peak:
        memory.reset_peak()
    start = memory.stats().allocated
    held: list[torch.UntypedStorage] = []
    live = highest = 0
    for _ in range(60):
        if held and (len(held) == 4 or order.random() < 0.4):
            held.pop(order.randrange(len(held)))
        else:
            held.append(memory.allocate(order.randrange(1, 12 * MIB)))
        live = sum(storage.nbytes() for storage in held)
        if look:
            found = memory.stats()
            check_bounds(context, found)
            above = found.allocated - start
            text = f"{live} bytes in {len(held)} storages are live, `allocated` rose by {above}"
            check(live - NOISE <= above <= 2 * live + 3 * NOISE, text)
            highest = max(highest, above)
    held.clear()
    end = memory.stats()
    rose = 0 if end.peak_allocated is None else end.peak_allocated - start
    return rose, highest


def stats_history(context: Context) -> None:
    """Statistics agree with each other, and with what is live, at every step of a history."""
    history(context, look=True)


def stats_of_threads(context: Context) -> None:
    """Statistics are the device's, not a thread's: allocated there, seen and freed here."""
    memory, here = context.backend.memory, context.backend.current_device()
    before, nbytes = memory.stats().allocated, 256 * 70_001

    def many(_: int) -> list[torch.UntypedStorage]:
        return [memory.allocate(70_001, here) for _ in range(64)]

    with ThreadPoolExecutor(4) as threads:
        held = list(threads.map(many, range(4)))
    grown = memory.stats().allocated - before
    text = f"four threads allocated {nbytes} bytes at once, `allocated` grew by {grown}"
    check(nbytes - NOISE <= grown <= 2 * nbytes, text)
    held.clear()
    left = memory.stats().allocated - before
    check(abs(left) <= NOISE, f"that of four threads was freed here, and {left} bytes are left")
    held.append([memory.allocate(12 * MIB)])
    in_thread(held.clear)
    left = memory.stats().allocated - before
    check(abs(left) <= NOISE, f"12 MiB from here were freed in another thread, {left} are left")


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
    kept = [as_bytes(memory.allocate(n)).fill_(77) for n in (1, 100, 512, 4096, 70_001, MIB)]
    start = memory.stats()
    memory.allocate(48 * MIB)
    before = memory.stats()
    result: Any = memory.empty_cache()  # type: ignore[func-returns-value]
    check(result is None, f"empty_cache returns None, got {result!r}")
    after = memory.stats()
    check_bounds(context, after)
    text = f"48 MiB came and went, and are kept: {start}, {before}, then {after}"
    check(after.reserved <= start.reserved + 2 * NOISE, text)
    moved = abs(after.allocated - before.allocated)
    check(moved <= NOISE, f"allocated changed by {moved} bytes: {before}, then {after}")
    lower = (before.peak_allocated or 0) - (after.peak_allocated or 0)
    check(lower <= 0, f"the peak is {lower} bytes lower: {before}, then {after}")
    for tensor in kept:
        check_pattern(77, tensor)
    small = [memory.allocate(4096) for _ in range(300)]
    check_bounds(context, memory.stats())
    del small


# Peak


def peak_rises(context: Context) -> None:
    """The peak is the highest ``allocated`` since the reset, whether or not somebody looked."""
    _, highest = history(context, look=True)
    for look in (True, False):
        rose, _ = history(context, look=look)
        # A cached block may be larger than what is asked of it, by up to 1 MiB in usual allocators.
        text = f"`allocated` rose by {highest}, the peak by {rose}, read {'' if look else 'not '}"
        check(abs(rose - highest) <= 5 * NOISE, f"{text}at every step")
    high = peak(context)
    for nbytes in (MIB, 4 * MIB, 2 * MIB):
        context.backend.memory.allocate(nbytes)
        now = peak(context)
        check(now >= high, f"the peak fell from {high} to {now} without a reset")
    for nbytes in (1000, 4097, 70_001, 512 * 1024):
        context.backend.memory.reset_peak()
        start = peak(context)
        held = [context.backend.memory.allocate(nbytes) for _ in range(8 * MIB // nbytes)]
        held.clear()
        rose = peak(context) - start
        text = f"8 MiB in blocks of {nbytes} came and went, the peak rose by {rose}"
        check(8 * MIB - NOISE <= rose <= 16 * MIB + 2 * NOISE, text)


def peak_resets(context: Context) -> None:
    """After a reset the peak is what is allocated now, however often; nothing else changes."""
    memory, here = context.backend.memory, context.backend.current_device()
    memory.allocate(32 * MIB)
    held = [memory.allocate(nbytes) for nbytes in (2 * MIB, 9 * MIB + 1)]
    for _ in range(3):
        before = memory.stats()
        result: Any = memory.reset_peak()  # type: ignore[func-returns-value]
        check(result is None, f"reset_peak returns None, got {result!r}")
        found = memory.stats()
        assert found.peak_allocated is not None
        above = found.peak_allocated - found.allocated
        check(abs(above) <= NOISE, f"right after a reset the peak is {above} bytes above: {found}")
        moved = max(abs(a - b) for a, b in zip(before[:2], found[:2], strict=True))
        check(moved <= NOISE, f"a reset changed more than the peak: {before}, then {found}")
        if held:
            held.pop()
        high = peak(context)
        check(high >= found.peak_allocated, f"freeing lowered the peak to {high}: {found}")
        in_thread(lambda: memory.allocate(20 * MIB, here))
        rose = peak(context) - memory.stats().allocated
        text = f"20 MiB came and went in a thread, the peak is {rose} bytes above what is allocated"
        check(20 * MIB - NOISE <= rose <= 20 * MIB + 3 * NOISE, text)


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
        memory_copies.copy(context, there, tensor)
        check_pattern(nbytes, there)
    part = context.backend.memory.pinned(4096)[64:].view(torch.float32).fill_(7.0)  # alone is held
    others = [context.backend.memory.pinned(4096).fill_(0) for _ in range(8)]
    check(bool((part == 7.0).all()), "memory of which a part is held was given out again")
    del others


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
        "allocate/sizes": allocate, "allocate/negative": allocate_negative,
        "allocate/apart": storages_apart, "info": info, "info/devices": info_of_devices,
        "out_of_memory/raised": out_of_memory, "out_of_memory/by_hand": out_of_memory_by_hand,
        "copy_async/bytes": memory_copies.of_bytes, "copy_async/values": memory_copies.of_values,
        "copy_async/types": memory_copies.of_types, "copy_async/layouts": memory_copies.of_layouts,
        "copy_async/order": memory_copies.in_order,
    },
    "streams": {"copy_async/on_stream": memory_copies.on_stream},
    "memory_stats": {
        "stats/empty_cache": empty_cache,  # first: what others leave in the cache hides it
        "stats/types": stats_types, "stats/follow": stats_follow, "stats/history": stats_history,
        "stats/leaks": nothing_leaks, "stats/small": small_blocks,
        "stats/threads": stats_of_threads, "stats/tensors": stats_of_tensors,
        "stats/devices": stats_of_devices,
    },
    "memory_peak": {"peak/rises": peak_rises, "peak/resets": peak_resets},
    "pinned_memory": {"pinned/sizes": pinned, "pinned/copies": pinned_copies},
}  # fmt: skip
ONCE = {f"memory/{name}" for name in (
    "copy_async/bytes", "copy_async/types",
    "stats/follow", "stats/leaks", "stats/small", "stats/tensors",
)}  # fmt: skip
"""Sizes and numbers of blocks, which are not asked again from elsewhere."""
