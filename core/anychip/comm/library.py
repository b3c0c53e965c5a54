"""Collectives of a chip that has its own: its torch.distributed backend moves and sums.

What is ours around it: parts of uneven sizes are padded to even ones, and the host's connections
serve barriers, which need no device.
"""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anychip.comm.store import part_of
from anychip.contract import (
    CALLS,
    Capabilities,
    CollectiveCall,
    CommunicationError,
    Job,
    Membership,
    Reduction,
    Transfer,
    Transport,
    UnsupportedError,
    Work,
)

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_CALL_S = 5.0
"""Seconds that an abort gives a call that is being made: one that takes longer waits for ranks."""
# The names of torch 2.13, and those before.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def _in_turn(method: Callable[..., Work]) -> Callable[..., Work]:
    """A call to the library that an abort in another thread comes before or after, not amid."""

    @functools.wraps(method)
    def call(self: Library, argument: Any) -> Work:
        with self._turn:
            if self._is_aborted:
                raise RuntimeError(f"{self.description}: the group has been given up")
            return method(self, argument)

    return call


class Library(Transport):
    """One rank's end of a group whose tensors are on the chip.

    The order of sums is the library's: the same on all ranks, and on every run only if its
    documentation says so; another world size, size or cut may give other bits. ``avg`` is the sum
    divided by the number of ranks, in the tensor's type. Messages of a pair are matched by order;
    tags need not be known to the library. ``wait`` orders the current stream, and an error of the
    chip may show later, when the host waits for the stream.

    Args:
        name, device, and what follows: see :meth:`anychip.contract.Job.library`.
    """

    def __init__(
        self,
        job: Job,
        group: Membership,
        name: str,
        device: str,
        capabilities: Capabilities | None = None,
        connect: Callable[[Any], object] | None = None,
        abort: Callable[[Any], object] | None = None,
    ) -> None:
        ranks = group.ranks
        if list(ranks) != sorted(ranks):
            raise UnsupportedError(
                f"group {group.name!r} with {name}: ranks in ascending order expected, got "
                f"{list(ranks)}; torch.distributed sorts them"
            )
        self._job, self._group, self._size, self.device = job, group, len(ranks), device
        self._how, self._abort = (name, device, capabilities, connect, abort), abort
        self.capabilities = capabilities or _expected()
        self.description = f"{name}, in its own order of sums"
        limit = timedelta(seconds=job.timeout_s)
        self._turn, self._is_aborted = threading.RLock(), False
        self._made_default = not dist.is_initialized()
        if self._made_default:
            store = part_of(job.store, "default")
            dist.init_process_group(
                name, store=store, rank=job.rank, world_size=job.world_size, timeout=limit
            )
        self._process_group: Any = dist.new_group(
            list(ranks), backend=name, timeout=limit, use_local_synchronization=True
        )
        if connect is not None:
            connect(self._process_group)

    def part(self, group: Membership) -> Transport:
        return Library(self._job, group, *self._how)

    @_in_turn
    def all_reduce(self, call: CollectiveCall) -> Work:
        (tensor,) = call.outputs
        work = dist.all_reduce(
            tensor, _OPERATIONS[call.reduction], group=self._process_group, async_op=True
        )
        return _Queued([work], lambda: self._divide(tensor, call.reduction))

    @_in_turn
    def all_gather(self, call: CollectiveCall) -> Work:
        (tensor,), (output,), largest = call.inputs, call.outputs, max(call.sizes)
        if min(call.sizes) == largest:
            work = _all_gather(
                output.view(-1), tensor.view(-1), group=self._process_group, async_op=True
            )
            return _Queued([work])
        padded = tensor.new_empty(largest)  # what is behind is sent, and looked at by nobody
        padded[: tensor.numel()].copy_(tensor.view(-1))
        room = tensor.new_empty(largest * self._size)
        work = _all_gather(room, padded, group=self._process_group, async_op=True)

        def finish() -> None:
            parts = [row[:size] for row, size in zip(room.split(largest), call.sizes, strict=True)]
            output.view(-1).copy_(torch.cat(parts))

        return _Queued([work], finish)

    @_in_turn
    def reduce_scatter(self, call: CollectiveCall) -> Work:
        (tensor,), (output,), largest = call.inputs, call.outputs, max(call.sizes)
        source, room = tensor.view(-1), output.view(-1)
        if min(call.sizes) != largest:
            source = tensor.new_empty(largest * self._size)
            for row, part in zip(
                source.split(largest), tensor.view(-1).split(list(call.sizes)), strict=True
            ):
                row[: part.numel()].copy_(part)
            room = tensor.new_empty(largest)
        work = _reduce_scatter(
            room, source, _OPERATIONS[call.reduction], group=self._process_group, async_op=True
        )

        def finish() -> None:
            if room.data_ptr() != output.data_ptr():
                output.view(-1).copy_(room[: output.numel()])
            self._divide(output, call.reduction)

        return _Queued([work], finish)

    @_in_turn
    def broadcast(self, call: CollectiveCall) -> Work:
        (tensor,), first = call.inputs or call.outputs, self._group.ranks[call.source]
        return _Queued([dist.broadcast(tensor, first, group=self._process_group, async_op=True)])

    @_in_turn
    def all_to_all(self, call: CollectiveCall) -> Work:
        room = torch.cat([torch.empty_like(tensor).view(-1) for tensor in call.outputs])
        taken = [tensor.numel() for tensor in call.outputs]
        given = [tensor.numel() for tensor in call.inputs]
        sent = torch.cat([tensor.view(-1) for tensor in call.inputs])
        work = dist.all_to_all_single(
            room, sent, taken, given, group=self._process_group, async_op=True
        )

        def finish() -> None:
            for output, part in zip(call.outputs, room.split(taken), strict=True):
                output.view(-1).copy_(part)

        return _Queued([work], finish)

    @_in_turn
    def exchange(self, transfers: Sequence[Transfer]) -> Work:
        group, calls = self._process_group, {"send": dist.isend, "recv": dist.irecv}
        operations = [
            dist.P2POp(calls[kind], tensor, self._group.ranks[peer], group, tag)
            for kind, tensor, peer, tag in transfers
        ]
        return _Queued(dist.batch_isend_irecv(operations))

    def barrier(self, call: CollectiveCall) -> Work:
        return self._job.host(self._group).barrier(call)

    def drain(self) -> None:
        """Waits for what the current stream still has to do, as closing would break it off.

        Who has waited for a collective has only told the stream to, and may read the result after
        close(). A rank that is lost ends this; one that never comes does so with the time limit.
        """
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != self.device:
            return
        stream = torch.accelerator.current_stream()
        deadline = time.monotonic() + self._job.timeout_s
        while not (self._job.has_failed or _is_done(stream)) and time.monotonic() < deadline:
            time.sleep(0.001)

    def abort(self) -> None:
        is_mine = self._turn.acquire(timeout=_CALL_S)
        self._is_aborted = True
        try:
            if self._abort is None:
                self._process_group.abort()
            else:
                self._abort(self._process_group)
        finally:
            if is_mine:
                self._turn.release()

    def close(self) -> None:
        if self._made_default:
            dist.destroy_process_group()

    def _divide(self, tensor: Tensor, reduction: Reduction) -> None:
        if reduction == "avg":
            tensor.div_(self._size)


class _Queued(Work):
    """Works of torch.distributed, and what is left to do with their outputs."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], None] = lambda: None) -> None:
        self._works, self._finish = list(works), finish

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        with torch.no_grad():
            self._finish()
        self._works, self._finish = [], lambda: None


def _expected() -> Capabilities:
    """What every backend of torch.distributed is expected to take."""
    floats = {torch.float32, torch.bfloat16, torch.float16}
    integers = {torch.int8, torch.uint8, torch.int32, torch.int64}
    every = frozenset(floats | integers)
    reductions: dict[torch.dtype, frozenset[Reduction]] = {
        **dict.fromkeys(floats, frozenset(_OPERATIONS)),  # type: ignore[arg-type]
        **dict.fromkeys(integers, frozenset(("sum", "max", "min"))),
    }
    return Capabilities({call: every for call in CALLS}, reductions)


def _is_done(stream: torch.Stream) -> bool:
    try:
        return stream.query()
    except RuntimeError:  # the device has failed, and whoever reads from it is told
        return True


def refuse_shared(job: Job, device: str, library: str) -> None:
    """Raises CommunicationError on all ranks, which call this, when two have one device.

    Args:
        device: this rank's; the same words on one host are the same device.
    """
    job.store.set(f"device/{job.rank}", f"{device} on {socket.gethostname()}")
    users: dict[str, list[int]] = {}
    for rank in range(job.world_size):
        users.setdefault(job.store.get(f"device/{rank}").decode(), []).append(rank)
    for place, ranks in users.items():
        if len(ranks) > 1:
            raise CommunicationError(
                f"world, rank {job.rank} of {job.world_size}: start",
                f"{library} needs one device per rank, and ranks {' and '.join(map(str, ranks))} "
                f"have device {place}; call backend.set_device(local rank) before communicator()",
                ranks=tuple(ranks),
            )
