"""Collectives of a chip that has its own: its torch.distributed backend does the work.

What is ours around it: calls are compared before they are sent, losses are noticed on the host,
and parts of uneven sizes are padded to even ones.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from anychip.comm.c10d import ProcessGroupCommunicator
from anychip.comm.job import Job, part_of
from anychip.contract.communicator import (
    CALLS,
    Capabilities,
    Communicator,
    Reduction,
    Transfer,
    Work,
)
from anychip.contract.errors import CommunicationError, UnsupportedError

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
# The names of torch 2.13, and those before.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


class NativeCommunicator(ProcessGroupCommunicator):
    """One process's end of a group whose tensors are on the chip.

    The order of sums is the backend's: the same on all ranks, and on every run only if its
    documentation says so; another world size, size or cut may give other bits. ``avg`` is the sum
    divided by the number of ranks, in the tensor's type. Messages of a pair are matched by order;
    tags need not be known to the backend. ``wait`` orders the current stream, and an error of the
    chip may show later, when the host waits for the stream.

    Args:
        job: this process's part in the job.
        backend: the name for torch.distributed.
        device: torch's device type.
    """

    def __init__(
        self,
        job: Job,
        group: int,
        ranks: tuple[int, ...],
        name: str,
        *,
        backend: str,
        device: str,
    ) -> None:
        if list(ranks) != sorted(ranks):
            raise UnsupportedError(
                f"group {name!r} with {backend}: ranks in ascending order expected, got "
                f"{list(ranks)}; torch.distributed sorts them"
            )
        super().__init__(job, group, ranks, name)
        self.backend, self.device = backend, device
        self.description = f"{backend}, in its own order of sums"
        limit = timedelta(seconds=job.timeout_s)
        if not dist.is_initialized():
            store = part_of(job.store, "default")
            dist.init_process_group(
                backend, store=store, rank=job.rank, world_size=job.world_size, timeout=limit
            )
            job.at_close(dist.destroy_process_group)
        self._process_group: Any = dist.new_group(
            list(ranks), backend=backend, timeout=limit, use_local_synchronization=True
        )
        job.at_failure(self._give_up)
        job.before_close(self._let_end)

    @cached_property
    def capabilities(self) -> Capabilities:
        """What every backend of torch.distributed is expected to take."""
        floats = {torch.float32, torch.bfloat16, torch.float16}
        integers = {torch.int8, torch.uint8, torch.int32, torch.int64}
        every = frozenset(floats | integers)
        reductions: dict[torch.dtype, frozenset[Reduction]] = {
            **dict.fromkeys(floats, frozenset(_OPERATIONS)),  # type: ignore[arg-type]
            **dict.fromkeys(integers, frozenset(("sum", "max", "min"))),
        }
        return Capabilities({call: every for call in CALLS}, reductions)

    def _all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> Work:
        where = self._enter("all_reduce", f"{reduction} {tuple(tensor.shape)} {tensor.dtype}")[1]
        work = dist.all_reduce(
            tensor, _OPERATIONS[reduction], group=self._process_group, async_op=True
        )
        return _Native(self, where, [work], lambda: self._divide(tensor, reduction))

    def _all_gather(self, output: torch.Tensor, tensor: torch.Tensor, sizes: Sequence[int]) -> Work:
        where = self._enter("all_gather", f"{list(sizes)} {tensor.dtype}")[1]
        largest = max(sizes)
        if min(sizes) == largest:
            work = _all_gather(
                output.view(-1), tensor.view(-1), group=self._process_group, async_op=True
            )
            return _Native(self, where, [work])
        padded = tensor.new_zeros(largest)
        padded[: tensor.numel()].copy_(tensor.view(-1))
        room = tensor.new_empty(largest * self.world_size)
        work = _all_gather(room, padded, group=self._process_group, async_op=True)

        def finish() -> None:
            rows = room.split(largest)
            parts = [row[:size] for row, size in zip(rows, sizes, strict=True)]
            output.view(-1).copy_(torch.cat(parts))

        return _Native(self, where, [work], finish)

    def _reduce_scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        reduction: Reduction,
        sizes: Sequence[int],
    ) -> Work:
        where = self._enter("reduce_scatter", f"{reduction} {list(sizes)} {tensor.dtype}")[1]
        largest = max(sizes)
        source, room = tensor.view(-1), output.view(-1)
        if min(sizes) != largest:
            source = tensor.new_zeros(largest * self.world_size)
            for row, part in zip(
                source.split(largest), tensor.view(-1).split(list(sizes)), strict=True
            ):
                row[: part.numel()].copy_(part)
            room = tensor.new_empty(largest)
        work = _reduce_scatter(
            room, source, _OPERATIONS[reduction], group=self._process_group, async_op=True
        )

        def finish() -> None:
            if room.data_ptr() != output.data_ptr():
                output.view(-1).copy_(room[: output.numel()])
            self._divide(output, reduction)

        return _Native(self, where, [work], finish)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        what = f"from rank {self.ranks[source]} {tuple(tensor.shape)} {tensor.dtype}"
        where = self._enter("broadcast", what)[1]
        work = dist.broadcast(tensor, self.ranks[source], group=self._process_group, async_op=True)
        return _Native(self, where, [work])

    def _all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Work:
        where = self._enter("all_to_all", str(outputs[0].dtype))[1]
        room = torch.cat([torch.empty_like(tensor).view(-1) for tensor in outputs])
        given, taken = [t.numel() for t in inputs], [t.numel() for t in outputs]
        work = dist.all_to_all_single(
            room,
            torch.cat([tensor.view(-1) for tensor in inputs]),
            taken,
            given,
            group=self._process_group,
            async_op=True,
        )

        def finish() -> None:
            for output, part in zip(outputs, room.split(taken), strict=True):
                output.view(-1).copy_(part)

        return _Native(self, where, [work], finish)

    def _exchange(self, transfers: Sequence[Transfer]) -> Work:
        where = self._where("exchange")
        self._refuse(where)
        for transfer in transfers:
            self._compare_message(where, transfer)
        operations = [
            dist.P2POp(
                dist.isend if kind == "send" else dist.irecv,
                tensor,
                self.ranks[peer],
                self._process_group,
                tag,
            )
            for kind, tensor, peer, tag in transfers
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Native(self, where, works)

    def _let_end(self) -> None:
        """Waits for what the current stream still has to do, as closing would break it off.

        Who has waited for a collective has only told the stream to, and may read the result after
        close(). A rank that is lost ends this; one that never comes does so with the time limit.
        """
        if self.device == "cpu":
            return
        stream, liveness = torch.accelerator.current_stream(), self.job.liveness
        deadline = time.monotonic() + self.job.timeout_s
        while liveness.failure is None and time.monotonic() < deadline and not _is_done(stream):
            time.sleep(0.001)

    def _give_up(self) -> None:
        """Ends what the chip's library still waits for, after the job has failed."""
        self._process_group.abort()

    def _of_group(self, number: int, ranks: tuple[int, ...], name: str) -> Communicator:
        return type(self)(self.job, number, ranks, name, backend=self.backend, device=self.device)

    def _divide(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        if reduction == "avg":
            tensor.div_(self.world_size)


class _Native(Work):
    """Works of torch.distributed, and what is left to do with their outputs."""

    def __init__(
        self,
        comm: NativeCommunicator,
        where: str,
        works: Sequence[Any],
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._comm, self._where, self._finish = comm, where, finish
        self._works: list[Any] = list(works)

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            comm = self._comm
            everyone = tuple(rank for rank in comm.ranks if rank != comm.job.rank)
            raise comm.job.explain(self._where, error, lambda: everyone) from error
        with torch.no_grad():
            self._finish()
        self._works, self._finish = [], lambda: None


def _is_done(stream: torch.Stream) -> bool:
    try:
        return stream.query()
    except RuntimeError:  # the device has failed, and whoever reads from it is told
        return True


def compare_devices(job: Job, device: str, library: str) -> None:
    """Raises CommunicationError on all ranks when two of them have one device.

    Chips' libraries say little of it, or wait for ever. Every rank of the job calls this.

    Args:
        device: this rank's, in words that only the same device of the same host has.
        library: as of :func:`refuse_shared`.
    """
    job.store.set(f"device/{job.rank}", f"{device} on {socket.gethostname()}")
    places = [job.store.get(f"device/{rank}").decode() for rank in range(job.world_size)]
    refuse_shared(places, job.where, library)


def refuse_shared(places: Sequence[str], where: str, library: str) -> None:
    """Raises CommunicationError unless every rank has a device of its own.

    Args:
        places: device and host of each rank.
        where: group and rank, for the message.
        library: that wants it so, for the message.
    """
    users = defaultdict(list)
    for rank, place in enumerate(places):
        users[place].append(rank)
    for place, ranks in users.items():
        if len(ranks) > 1:
            listed = " and ".join(map(str, ranks))
            raise CommunicationError(
                f"{where}: start",
                f"{library} needs one device per rank, and ranks {listed} have device {place}; "
                "call backend.set_device(local rank) before communicator()",
                ranks=tuple(ranks),
            )
