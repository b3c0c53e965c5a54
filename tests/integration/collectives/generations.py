"""What ranks do that meet again: called in each process that a launcher has started."""

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import anychip.registry  # noqa: F401 - backends made by hand find their job
from anychip.comm import Meeting, meet_again, num_waiting
from anychip.contract import CommunicationError, Communicator


def generations(number: int, lost: int, folder: str) -> list[Any]:
    """Ranks 0 to 3, of which one is killed; those that are left; those and process 4.

    Of each generation: rank, the numbers of all processes, a sum of a pair, and what is left of
    this process's connections and threads after it.
    """
    from anychip_cpu.backend import CpuBackend

    chip, limits, seen = CpuBackend(), {"timeout_s": 20.0, "heartbeat_s": 20.0}, []
    met = Path(folder) / "met"

    def look(comm: Communicator) -> None:
        whole = torch.zeros(comm.world_size)
        comm.all_gather(whole, torch.tensor([float(number)]))
        total, part = torch.ones(300_000), comm.split(_pairs(comm.world_size), name="pair")
        comm.all_reduce(total, async_op=True).wait()
        mine = torch.tensor([float(comm.rank)])
        part.all_reduce(mine)
        assert bool((total == comm.world_size).all())
        seen.append([comm.rank, whole.tolist(), mine.item()])

    def leave(comm: Communicator) -> None:
        comm.close()
        seen[-1] += left_open()

    if number < 4:
        comm = chip.communicator(**limits)  # type: ignore[arg-type]
        look(comm)
        with contextlib.suppress(CommunicationError):
            while True:
                comm.barrier()
                if number == lost:
                    os.kill(os.getpid(), signal.SIGKILL)
        lost_one, meeting = comm, Meeting(at_least=3, at_most=3)
        comm = meet_again(chip, meeting, **limits)  # type: ignore[arg-type]
        seen[-1] += [lost_one.is_closed, comm.job.generation]  # type: ignore[attr-defined]
        del lost_one
        look(comm)
        met.touch()
        wait_for_new(comm, partial(num_waiting, chip))
        leave(comm)
    while not met.exists():
        time.sleep(0.01)
    comm = meet_again(chip, Meeting(at_least=2, at_most=4, settle_s=20), **limits)  # type: ignore[arg-type]
    look(comm)
    leave(comm)
    with contextlib.suppress(ValueError):
        seen.append(chip.communicator(**limits).description)  # type: ignore[arg-type]
    return seen


def wait_for_new(comm: Communicator, num_waiting: Callable[[], int]) -> None:
    """Returns on all ranks at once when a process waits to be met."""
    waiting = torch.zeros(1)
    while not waiting.item():
        waiting.fill_(num_waiting())
        comm.broadcast(waiting, 0)


def _pairs(world_size: int) -> list[list[int]]:
    return [list(range(i, min(i + 2, world_size))) for i in range(0, world_size, 2)]


def left_open() -> list[list[Any]]:
    """Numbers of file descriptors and threads once garbage is collected; names of our threads."""
    gc.collect()
    counts = [len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")]
    return [counts, [t.name for t in threading.enumerate() if "anychip" in t.name]]


def left_memory() -> list[str]:
    """What this process has mapped or open of memory that ranks share."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    lines += [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return [line for line in lines if "memfd:anychip" in line]
