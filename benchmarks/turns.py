"""What one of two processes is told when training is measured: make a candidate; take a turn."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from anychip.bench.rank import Place
from benchmarks import peers, trainees
from benchmarks.trainees import Sizes


def start(place: Place, candidate: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Makes a candidate and does one step with it.

    Returns:
        ``loss`` before any update, or None where it is not known; what is to be said of it.
    """
    made = {**trainees.CANDIDATES, **peers.CANDIDATES}[candidate]
    place.held = made(Sizes(**sizes), place)
    loss = place.held.step()
    place.chip.synchronize()
    return {"loss": None if loss is None else loss.item(), **place.held.facts}


def turn(place: Place, steps: int) -> dict[str, Any]:
    """Some steps.

    Returns:
        ``seconds``, ``cpu_seconds`` and ``slept``, for a late link, per step, ``loss`` before the
        last update or None, and ``peak``, the bytes of memory that this process has needed so far.
    """
    loss = None
    place.chip.synchronize()
    begin, cpu, slept = time.perf_counter(), time.process_time(), place.held.clock.slept_s
    for _ in range(steps):
        loss = place.held.step()
    place.chip.synchronize()
    return {
        "seconds": (time.perf_counter() - begin) / steps,
        "cpu_seconds": (time.process_time() - cpu) / steps,
        "slept": (place.held.clock.slept_s - slept) / steps,
        "loss": None if loss is None else loss.item(),
        "peak": peak_nbytes(place),
    }


def peak_nbytes(place: Place) -> int | None:
    """Of a host, the most memory that this process had; of a device, the most allocated there."""
    if place.device.type != "cpu":
        return place.chip.memory.stats(place.device.index).peak_allocated
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return None
