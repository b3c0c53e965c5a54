"""What ranks are told when one of them aborts, calls something else, does not come, or dies.

Errors are not caught here: the asker compares what each rank was told. These functions run in the
processes of :mod:`.ranks`, as those of :mod:`.rank_questions` do.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from anychip.conformance.rank_questions import RankJob


def ask_abort(job: RankJob, number: int) -> None:
    """The last rank aborts while the others wait; those raise what they are told."""
    comm, word = job.communicator(), f"abort/{number}"
    try:
        if job.rank == job.world_size - 1:
            job.wait_for(word)
            time.sleep(0.1)
            comm.abort("on purpose, says the last rank")
            return
        work = comm.all_reduce(torch.zeros(48, device=job.backend.device()), async_op=True)
        job.say(word)
        work.wait()
        device_is_done(job)
    finally:
        comm.close()


def ask_disagreement(job: RankJob, what: str, timeout_s: float) -> None:
    """The last rank calls something else; raises what every rank is told."""
    comm, device = job.communicator(timeout_s), job.backend.device()
    odd = job.rank == job.world_size - 1
    x = torch.zeros(40 if what == "shape" and odd else 48, device=device)
    try:
        if what == "dtype" and odd:
            comm.all_reduce(x.to(torch.int32))
        elif what == "call" and odd:
            comm.broadcast(x, 0)
        elif what == "reduction" and odd:
            comm.all_reduce(x, "max")
        else:
            comm.all_reduce(x)
        device_is_done(job)
    finally:
        comm.close()


def device_is_done(job: RankJob) -> None:
    """An error of the chip shows here at the latest."""
    job.backend.synchronize()


def ask_absence(job: RankJob, call: str, number: int, timeout_s: float) -> None:
    """The last rank does not make the call, and is there; the others raise what they are told."""
    comm, word, last = job.communicator(timeout_s), f"absent/{number}", job.world_size - 1
    x = torch.zeros(48, device=job.backend.device())
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(x),
        "barrier": comm.barrier,
        "recv": lambda: comm.recv(x, last),
    }
    try:
        if job.rank == last:
            job.wait_for(word)
            return
        calls[call]()
        device_is_done(job)
    finally:
        job.say(word)
        comm.close()


def ask_death(job: RankJob, timeout_s: float) -> None:
    """The last rank is killed while the others wait for it; those raise what they are told."""
    comm = job.communicator(timeout_s)
    comm.barrier()
    if job.rank == job.world_size - 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.all_reduce(torch.zeros(48, device=job.backend.device()))
        device_is_done(job)
    finally:
        comm.close()
