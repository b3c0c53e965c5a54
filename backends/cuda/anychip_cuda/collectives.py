"""Collectives by NCCL: what it takes, and what has to be true before the first call.

torch's process group moves the bytes. Ranks compare their calls on the host before anything is
sent, and a rank that is lost is noticed there: both are the core's.

NCCL's own kernels wait on the device for ever when a rank does not come. torch's watchdog thread
ends that after the time limit, by default together with the whole process. Here it is asked to
give up the communicator only, so that the host finds the error and says which rank is to blame.
Source: PyTorch, ProcessGroupNCCL Environment Variables; NCCL user guide, Types.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from anychip.contract import CALLS, Capabilities, Job, Reduction, Transport

ABORT_ONLY = "2"
"""Value of TORCH_NCCL_ASYNC_ERROR_HANDLING: give up the communicator, and leave the process."""


def transport(job: Job) -> Transport | None:
    """NCCL, with one device per rank."""
    # Read when torch makes its process group. Who has set it has decided otherwise.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", ABORT_ONLY)
    return job.library("nccl", "cuda", capabilities=capabilities(), identity=_uuid())


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


def _uuid() -> str:
    """Of the current device: ranks may see different devices as number 0."""
    known: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(known.uuid)
