"""What ranks are told when one of them aborts, calls something else, does not come, or dies.

It is the rank :func:`odd_one_out`: the last of two, and one amid more, whom no guess names.

Errors are not caught here: the asker compares what each rank was told. These functions run in the
processes of :mod:`.ranks`, as those of :mod:`.rank_questions` do.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anychip.conformance.case import expect_error
from anychip.conformance.rank_questions import RankJob
from anychip.contract import CommunicationError, Communicator


def odd_one_out(world_size: int) -> int:
    """The rank that does what the others do not."""
    return world_size // 2


@contextmanager
def communicating(job: RankJob, *timeout_s: float) -> Iterator[Communicator]:
    """A communicator that is not used afterwards; an error of the chip shows here at the latest."""
    comm = job.communicator(*timeout_s)
    try:
        yield comm
        job.backend.synchronize()
    finally:
        comm.close()


def ask_abort(job: RankJob, number: int) -> None:
    """One rank aborts while the others wait; those raise what they are told."""
    word = f"abort/{number}"
    with communicating(job) as comm:
        if job.rank == odd_one_out(job.world_size):
            job.wait_for(word)
            time.sleep(0.1)
            comm.abort("on purpose, says the odd one out")
            comm.abort("a second reason, of which nobody is told")
            x, words = torch.zeros(3, device=job.backend.device()), ("says the odd one out",)
            text = "all_reduce after abort()"
            expect_error(CommunicationError, text, comm.all_reduce, x, mentions=words)
        else:
            work = comm.all_reduce(torch.zeros(48, device=job.backend.device()), async_op=True)
            job.say(word)
            work.wait()


def ask_ready(job: RankJob, timeout_s: float) -> None:
    """Makes the communicator, which may take longer than anything that is asked of it."""
    job.communicator(timeout_s).barrier()


def ask_disagreement(job: RankJob, what: str, timeout_s: float) -> None:
    """One rank calls something else; raises what every rank is told."""
    odd = what if job.rank == odd_one_out(job.world_size) else ""
    x = torch.zeros(40 if odd == "shape" else 48, device=job.backend.device())
    if what == "order_of_dims":
        x = x.view(6, 8) if odd else x.view(8, 6)
    with communicating(job, timeout_s) as comm:
        averages = comm.capabilities.supports("all_reduce", x.dtype, "avg")
        calls: dict[str, Callable[[], Any]] = {
            "dtype": lambda: comm.all_reduce(x.to(torch.int32)),
            "call": lambda: comm.broadcast(x, 0),
            "reduction": lambda: comm.all_reduce(x, "max"),
            "average": lambda: comm.all_reduce(x, "avg" if averages else "min"),
        }
        if what == "type_to_receive":
            comm.broadcast(x.int() if odd else x, 0)
        else:
            calls.get(odd, lambda: comm.all_reduce(x))()


def ask_absence(job: RankJob, call: str, number: int, timeout_s: float) -> None:
    """One rank does not make the call, and is there; the others raise what they are told."""
    comm, word = job.communicator(timeout_s), f"absent/{number}"
    odd = odd_one_out(job.world_size)
    x = torch.zeros(48, device=job.backend.device())
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(x),
        "barrier": comm.barrier,
        "recv": lambda: comm.recv(x, odd),
    }
    try:
        if job.rank == odd:
            for rank in range(job.world_size):
                if rank != odd:
                    job.wait_for(f"{word}/{rank}")
            return
        calls[call]()
        job.backend.synchronize()  # told before that rank leaves
    finally:
        job.say(f"{word}/{job.rank}")
        comm.close()


def ask_death(job: RankJob, timeout_s: float) -> None:
    """One rank is killed while the others wait for it; those raise what they are told."""
    with communicating(job, timeout_s) as comm:
        comm.barrier()
        if job.rank == odd_one_out(job.world_size):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(torch.zeros(48, device=job.backend.device()))
