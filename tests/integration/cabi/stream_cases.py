"""Is memory given out again only when no stream uses it? Asked of ``asyncchip``, whose streams are
threads: what is queued on a side stream happens while it is not held, and late then.
"""

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from anychip.cabi import Library

CHIP = os.environ["ANYCHIP_TEST_CHIP"]
LIBRARY = ctypes.CDLL(CHIP)
MB = 1 << 20


@pytest.fixture
def device(chip: Library) -> Iterator[torch.device]:
    before = LIBRARY.asyncchip_misuses()
    yield chip.device(0)
    LIBRARY.asyncchip_hold(0)
    chip.synchronize(0)
    chip.memory.empty_cache()
    assert LIBRARY.asyncchip_misuses() == before, "what queued work uses was freed"


def full(value: float, device: torch.device, n: int = 1000) -> torch.Tensor:
    return torch.full((n,), float(value), device=device)


@pytest.mark.parametrize("wait", ["none", "stream", "event", "host"])
def test_missing_wait_reads_old_numbers(chip: Library, device: torch.device, wait: str) -> None:
    x, y, side, event = full(2, device), full(5, device), chip.stream(), chip.event()
    chip.synchronize()
    LIBRARY.asyncchip_hold(1)
    with chip.use_stream(side):
        torch.add(x, x, out=y)
        event.record(side)
    assert not event.query()
    assert not side.query()
    if wait != "none":
        LIBRARY.asyncchip_hold(0)
    if wait == "stream":
        chip.current_stream().wait_stream(side)
    elif wait == "event":
        event.wait(chip.current_stream())
    elif wait == "host":
        event.synchronize()
    assert (y * x)[0].item() == (10 if wait == "none" else 8)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_freed_memory_waits_for_recorded_streams(
    chip: Library, device: torch.device, is_recorded: bool
) -> None:
    x, out, side = full(2, device, MB), full(0, device, MB), chip.stream()
    first = x.data_ptr()
    chip.synchronize()
    LIBRARY.asyncchip_hold(1)
    with chip.use_stream(side):
        torch.add(x, x, out=out)
    if is_recorded:
        x.record_stream(side)
    del x
    other = full(9, device, MB)
    assert (other.data_ptr() == first) is not is_recorded
    chip.current_stream().synchronize()
    LIBRARY.asyncchip_hold(0)
    chip.synchronize()
    assert out[-1].item() == (4 if is_recorded else 18)
    assert not is_recorded or full(0, device, MB).data_ptr() == first  # reused afterwards


def test_pending_block_does_not_keep_back_those_that_are_free(
    chip: Library, device: torch.device
) -> None:
    held, free = full(1, device, MB), full(1, device, MB)
    addresses, side = (held.data_ptr(), free.data_ptr()), chip.stream()
    LIBRARY.asyncchip_hold(1)
    with chip.use_stream(side):
        _ = held + held
    held.record_stream(side)
    del held
    with chip.use_stream(idle := chip.stream()):
        pass
    free.record_stream(idle)
    del free  # its event is on a stream that is held too, and empty otherwise
    assert full(0, device, MB).data_ptr() not in addresses
    LIBRARY.asyncchip_hold(0)
    idle.synchronize()
    side.synchronize()
    assert {full(0, device, MB).data_ptr(), full(0, device, MB).data_ptr()} & set(addresses)


def test_stream_has_its_own_cache(chip: Library, device: torch.device) -> None:
    x = full(1, device, MB)
    first = x.data_ptr()
    del x
    with chip.use_stream(chip.stream()):
        assert full(1, device, MB).data_ptr() != first
    assert full(1, device, MB).data_ptr() == first


def test_full_memory_is_emptied_of_caches_while_streams_work(
    chip: Library, device: torch.device
) -> None:
    """700 MB fit once into a device of 1 GiB; what is freed first waits for a side stream."""
    chip.memory.empty_cache()
    side = chip.stream()
    for size in (700, 650, 900):
        x, y = torch.empty(size * MB, dtype=torch.uint8, device=device), full(0, device)
        with chip.use_stream(side):
            for _ in range(20):
                y.add_(x[:4000].view(torch.float32))
        x.record_stream(side)
        y.record_stream(side)
        del x, y
    with pytest.raises(torch.OutOfMemoryError, match="were asked for on device 0"):
        torch.empty(1100 * MB, dtype=torch.uint8, device=device)
    assert full(3, device).sum().item() == 3000


def test_peaks_are_of_allocated_and_reserved_bytes(chip: Library, device: torch.device) -> None:
    chip.memory.empty_cache()
    torch.accelerator.reset_peak_memory_stats(0)
    start = torch.accelerator.memory_stats(0)
    x = full(1, device, MB)
    del x
    chip.memory.empty_cache()
    now = torch.accelerator.memory_stats(0)
    for kind in ("allocated_bytes", "reserved_bytes"):
        assert now[f"{kind}.all.current"] == start[f"{kind}.all.current"]
        assert now[f"{kind}.all.peak"] >= start[f"{kind}.all.current"] + 4 * MB
    torch.accelerator.reset_peak_memory_stats(0)
    now = torch.accelerator.memory_stats(0)
    assert now["reserved_bytes.all.peak"] == now["reserved_bytes.all.current"]


def test_pinned_memory_outlives_its_tensor_while_copies_are_queued(
    chip: Library, device: torch.device
) -> None:
    target, side = full(0, device), chip.stream()
    chip.synchronize()
    LIBRARY.asyncchip_hold(1)
    source = torch.full((1000,), 6.0).pin_memory()
    into = torch.zeros(1000, pin_memory=True)
    with chip.use_stream(side):
        target.copy_(source, non_blocking=True)
        into.copy_(target, non_blocking=True)
    del source  # at once, and the next one must have other memory
    assert torch.full((1000,), 7.0).pin_memory().sum() == 7000
    assert into.sum() == 0
    LIBRARY.asyncchip_hold(0)
    side.synchronize()
    assert (into.sum(), target.sum().item()) == (6000, 6000)


def test_storage_that_is_resized_on_another_stream_keeps_its_values(
    chip: Library, device: torch.device
) -> None:
    x, side = full(4, device, MB), chip.stream()
    chip.synchronize()
    LIBRARY.asyncchip_hold(1)
    with chip.use_stream(side):
        x.untyped_storage().resize_(8 * MB)
    other = full(9, device, MB)
    chip.current_stream().synchronize()
    LIBRARY.asyncchip_hold(0)
    chip.synchronize()
    assert (x[-1].item(), other[-1].item()) == (4, 9)


def test_events_time_the_streams_work(chip: Library, device: torch.device) -> None:
    side, start, end = chip.stream(), chip.event(timing=True), chip.event(timing=True)
    assert start.query()
    with chip.use_stream(side):
        start.record(side)
        x = full(1, device, 4 * MB)
        end.record(side)
    end.synchronize()
    assert 0 < start.elapsed_time(end) < 60_000
    assert x.device == device


def test_threads_on_streams_of_two_devices_compute_what_one_would(chip: Library) -> None:
    """Each piece of memory is another's a moment later: 8 threads, side streams, backward."""
    all_run = threading.Barrier(8)

    def work(number: int) -> None:
        all_run.wait()
        place = chip.device(number % 2)
        chip.set_device(number % 2)
        main, side = chip.stream(), chip.stream()
        with chip.use_stream(main):
            w = torch.full((32, 32), 1.0, device=place, requires_grad=True)
            for step in range(12):
                x = torch.full((32, 32), float(step), device=place)
                side.wait_stream(main)
                with chip.use_stream(side):
                    y = x @ w  # the graph's backward runs on this stream, too
                    x.record_stream(side)
                main.wait_stream(side)
                y.record_stream(main)
                (y * y).backward(torch.full((32, 32), 1.0, device=place))
                del x, y
            got = w.grad.cpu()
        want = sum(2 * 32.0 * (32 * s) * s for s in range(12))
        assert bool((got == want).all()), f"thread {number}: {got[0, :3]}, expected {want}"

    before = LIBRARY.asyncchip_misuses()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert LIBRARY.asyncchip_misuses() == before


LATE = """
import anychip, ctypes, sys, pytest
chip = anychip.use(sys.argv[1])
import torch
x = torch.ones(9, device=chip.device(0))
kept = torch.ones(9).pin_memory()
ctypes.CDLL(sys.argv[1]).asyncchip_fail(-4)
y = x + x  # is queued, and fails behind
x.copy_(kept, non_blocking=True)
for _ in range(2):
    with pytest.raises(RuntimeError, match="ANYCHIP_EDEVICE .-4.: the kernel hit a wall"):
        torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match="the kernel hit a wall"):
        y.cpu()
x.record_stream(chip.stream())
del kept, x, y  # nothing is thrown where memory is freed
assert torch.ones(9, device=chip.device(1)).sum().item() == 9
print("as it should be")
"""


def test_failure_of_queued_work_is_told_by_every_wait_and_ends_nothing(chip: Library) -> None:
    """In a process of its own: its first device stays broken."""
    done = subprocess.run(
        [sys.executable, "-c", LATE, CHIP], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "as it should be\n"), done.stderr[-2000:]
