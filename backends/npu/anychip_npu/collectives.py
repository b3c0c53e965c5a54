"""Collectives by HCCL: what it takes, said before the call, and how a lost rank ends it.

Calls are the contract's (:mod:`anychip.comm.native`): ranks compare them on the
host before anything is sent, and a rank that is lost is noticed there.

torch_npu's watchdog thread ends the whole process by default when a collective fails. Here it is
asked to give up the communicator only, so that the host finds the error and says which rank is to
blame.

Source: HCCL API reference, HcclAllReduce, HcclReduceScatter, HcclAllGather, HcclBroadcast,
https://www.hiascend.com/document/detail/en/canncommercial/850/API/hcclapiref/hcclcpp_07_0020.html
and its neighbours, the columns for Atlas A2 training products; torch_npu, Environment Variables.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from anychip.comm.job import Failure, Job
from anychip.comm.ledger import ranks_text
from anychip.comm.native import NativeCommunicator, compare_devices
from anychip.contract import (
    CALLS,
    AnychipError,
    Capabilities,
    CommunicationError,
    DeviceError,
    Reduction,
    Transfer,
    Work,
)
from anychip_npu import errors

ABORT_ONLY = "2"
"""Value of TORCH_HCCL_ASYNC_ERROR_HANDLING: give up the communicator, and leave the process."""
_NEWS_S = 1.0
"""Seconds in which the news of a lost rank arrive, after its collective has failed."""


class HcclCommunicator(NativeCommunicator):
    """One process's end of a group whose tensors are on Ascend devices, one device per rank."""

    def __init__(self, job: Job, group: int, ranks: tuple[int, ...], name: str, **how: Any) -> None:
        # Read when torch_npu makes its process group. Who has set it has decided otherwise.
        os.environ.setdefault("TORCH_HCCL_ASYNC_ERROR_HANDLING", ABORT_ONLY)
        if group == 0:
            compare_devices(job, _device(), "HCCL")
        self._entered: int | None = None
        self._peers: tuple[int, ...] = ()
        super().__init__(job, group, ranks, name, **how)
        # HCCL connects at the first collective, and waits for all ranks there: on the host, where
        # nothing can end it. Here all of them come.
        dist.all_reduce(torch.zeros(1, device=self.device), group=self._process_group)
        errors.reasons.append(self._why)
        job.at_close(lambda: errors.reasons.remove(self._why))

    def _why(self, where: str, error: DeviceError) -> AnychipError | None:
        """The ranks at fault, when a collective of this group has failed on the device.

        HCCL's works do not raise when they are waited for: the stream has the error.
        """
        known = self.job.liveness.failure
        if known is None and "hccl" not in error.detail.lower():
            return None
        known = known or self.job.liveness.verdict(_NEWS_S)
        if known is not None:
            return CommunicationError(where, known.reason, ranks=known.ranks)
        with contextlib.suppress(RuntimeError):  # the store goes with the rank that holds it
            late = self._ledger.missing(self._entered) if self._entered is not None else ()
            if late:
                return self._late(where, late)
        last = error.detail.strip().splitlines()[-1]
        peers = tuple(self.ranks[rank] for rank in self._peers)
        said = f"{self.name}: messages with {ranks_text(peers)}" if peers else self.name
        failure = Failure(peers, f"{said} failed with {error.label}: {last}")
        return self.job.fail(where, failure)

    def _enter(self, call: str, what: str) -> tuple[int, str]:
        self._entered, self._peers = None, ()
        number, where = super()._enter(call, what)
        self._entered = number
        return number, where

    def _exchange(self, transfers: Sequence[Transfer]) -> Work:
        self._entered, self._peers = None, tuple(sorted({t.peer for t in transfers}))
        return super()._exchange(transfers)

    def _give_up(self) -> None:
        # torch_npu does not implement torch's abort().
        self._hccl().abort_hccl_comm(f"{self.name}: the job has failed")

    def _hccl(self) -> Any:
        """torch_npu's process group below torch's."""
        return self._process_group._get_backend(torch.device(self.device))

    @cached_property
    def capabilities(self) -> Capabilities:
        return capabilities()


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
