"""Collectives by HCCL: what it takes, said before the call, and how a lost rank ends it.

torch's process group moves the bytes. Ranks compare their calls on the host before anything is
sent, and a rank that is lost is noticed there: both are the core's.

torch_npu's watchdog thread ends the whole process by default when a collective fails. Here it is
asked to give up the communicator only, so that the host finds the error and says which rank is to
blame.

Source: HCCL API reference, HcclAllReduce, HcclReduceScatter, HcclAllGather, HcclBroadcast,
https://www.hiascend.com/document/detail/en/canncommercial/850/API/hcclapiref/hcclcpp_07_0020.html
and its neighbours, the columns for Atlas A2 training products; torch_npu, Environment Variables.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from anychip.contract import (
    CALLS,
    AnychipError,
    Capabilities,
    DeviceError,
    Job,
    Reduction,
    Transport,
)
from anychip_npu import errors

ABORT_ONLY = "2"
"""Value of TORCH_HCCL_ASYNC_ERROR_HANDLING: give up the communicator, and leave the process."""
_ISSUE_S = 5.0
"""Seconds that torch_npu's queue gets to give HCCL the calls that were made before an abort."""


def transport(job: Job) -> Transport | None:
    """HCCL, with one device per rank."""
    # Read when torch_npu makes its process group. Who has set it has decided otherwise.
    os.environ.setdefault("TORCH_HCCL_ASYNC_ERROR_HANDLING", ABORT_ONLY)

    def why(where: str, error: DeviceError) -> AnychipError | None:
        """The ranks at fault, when a collective has failed on the device.

        HCCL's works do not raise when they are waited for: the stream has the error.
        """
        is_of_call = job.has_failed or "hccl" in error.detail.lower()
        return job.blame(where, error) if is_of_call else None

    device = torch.accelerator.current_device_index()

    def abort(group: Any) -> None:
        # torch_npu calls HCCL from a thread of its own, with the bare handle of a communicator that
        # an abort destroys: a call that is still in its queue would use freed memory.
        if _has_issued(device, _ISSUE_S):
            # torch_npu does not implement torch's abort(): it is asked for its own, below
            # torch's group.
            group._get_backend(torch.device("npu")).abort_hccl_comm("the job has failed")

    errors.reasons.append(why)
    job.at_close(lambda: errors.reasons.remove(why))
    return job.library(
        "hccl", "npu",
        capabilities=capabilities(), identity=_device(), connect=_connect, abort=abort,
    )  # fmt: skip


def _connect(group: Any) -> None:
    # HCCL connects at the first collective, and waits for all ranks there: on the host, where
    # nothing can end it. Here all of them come.
    dist.all_reduce(torch.zeros(1, device="npu"), group=group)


def _has_issued(device: int, limit_s: float) -> bool:
    """Whether the device has been given, within ``limit_s``, every call that was made until now.

    An event of a stream that has nothing else to do is over as soon as the queue has come to it,
    however long the device is busy with what was queued before.
    """
    npu: Any = torch.get_device_module("npu")
    deadline = time.monotonic() + limit_s
    try:
        # Of this rank's device: another is current in the thread that hears of a lost rank.
        with npu.device(device):
            event = npu.Event()
            event.record(npu.Stream())
            while not event.query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
    except RuntimeError:  # the queue has ended with an error, and calls nothing more
        pass
    return True


def capabilities() -> Capabilities:
    """What HCCL moves and reduces through torch_npu.

    bool travels as a byte. torch_npu makes int32 of the unsigned byte for all_reduce, and for
    nothing else that reduces. float64 would travel, but torch_npu has no such tensors: it makes
    them float32. The 8-bit floats need a later part than Atlas A2; 16-bit integers travel on no
    other chip, and are not declared.
    """
    floats = {torch.float32, torch.bfloat16, torch.float16}
    integers = {torch.int8, torch.int32, torch.int64}
    joined = frozenset(floats | integers)
    moved = joined | {torch.uint8, torch.bool}
    dtypes = {call: moved for call in CALLS if call != "barrier"}
    dtypes |= {"all_reduce": joined | {torch.uint8}, "reduce_scatter": joined}
    every: frozenset[Reduction] = frozenset(("sum", "avg", "max", "min"))
    reductions: Mapping[torch.dtype, frozenset[Reduction]] = {
        **dict.fromkeys(floats, every),
        **dict.fromkeys(integers | {torch.uint8}, every - {"avg"}),
    }
    return Capabilities({**dtypes, "barrier": frozenset()}, reductions)


def _device() -> str:
    """The current device. Two processes may see different ones as number 0, by the variable."""
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "all")
    return f"{torch.accelerator.current_device_index()} of {visible}"
