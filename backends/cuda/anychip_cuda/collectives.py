"""Collectives by NCCL: what it takes, and what has to be true before the first call.

Calls are the contract's (:mod:`anychip.contract.collectives.native`): ranks compare them on the
host before anything is sent, and a rank that is lost is noticed there.

NCCL's own kernels wait on the device for ever when a rank does not come. torch's watchdog thread
ends that after the time limit, by default together with the whole process. Here it is asked to
give up the communicator only, so that the host finds the error and says which rank is to blame.
Source: PyTorch, ProcessGroupNCCL Environment Variables; NCCL user guide, Types.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from anychip.contract import Capabilities, CommunicationError, Reduction
from anychip.contract.collectives import CALLS
from anychip.contract.collectives.job import Job
from anychip.contract.collectives.native import NativeCommunicator

ABORT_ONLY = "2"
"""Value of TORCH_NCCL_ASYNC_ERROR_HANDLING: give up the communicator, and leave the process."""


class NcclCommunicator(NativeCommunicator):
    """One process's end of a group whose tensors are on CUDA devices, one device per rank."""

    def __init__(self, job: Job, group: int, ranks: tuple[int, ...], name: str, **how: Any) -> None:
        # Read when torch makes its process group. Who has set it has decided otherwise.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", ABORT_ONLY)
        if group == 0:
            _compare_devices(job)
        super().__init__(job, group, ranks, name, **how)

    @cached_property
    def capabilities(self) -> Capabilities:
        return capabilities()


def capabilities() -> Capabilities:
    """What NCCL moves and reduces through torch.

    bool and the 8-bit floats travel as bytes, and are not reduced. 16-bit integers do not travel.
    """
    floats = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
    integers = {torch.int8, torch.uint8, torch.int32, torch.int64}
    joined = frozenset(floats | integers)
    moved = joined | {torch.bool, torch.float8_e4m3fn, torch.float8_e5m2}
    dtypes = {call: moved for call in CALLS if call != "barrier"}
    dtypes |= {call: joined for call in ("all_reduce", "reduce_scatter")}
    every: frozenset[Reduction] = frozenset(("sum", "avg", "max", "min"))
    reductions: Mapping[torch.dtype, frozenset[Reduction]] = {
        **dict.fromkeys(floats, every),
        **dict.fromkeys(integers, every - {"avg"}),
    }
    return Capabilities({**dtypes, "barrier": frozenset()}, reductions)


def _compare_devices(job: Job) -> None:
    """Raises CommunicationError when two ranks have one device, of which NCCL says little."""
    known: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    job.store.set(f"device/{job.rank}", f"{known.uuid} on {socket.gethostname()}")
    places = [job.store.get(f"device/{rank}").decode() for rank in range(job.world_size)]
    refuse_shared(places, job.where)


def refuse_shared(places: Sequence[str], where: str) -> None:
    """Raises CommunicationError unless every rank has a device of its own.

    Args:
        places: device and host of each rank.
        where: group and rank, for the message.
    """
    users = defaultdict(list)
    for rank, place in enumerate(places):
        users[place].append(rank)
    for place, ranks in users.items():
        if len(ranks) > 1:
            listed = " and ".join(map(str, ranks))
            raise CommunicationError(
                f"{where}: start",
                f"NCCL needs one device per rank, and ranks {listed} have device {place}; call "
                "backend.set_device(local rank) before communicator()",
                ranks=tuple(ranks),
            )
