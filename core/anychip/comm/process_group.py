"""torch.distributed's process group of a chip that has no backend there, over our communicators.

``init_process_group(backend=<device type>)`` makes it once the chip is in use, and ``cpu:gloo,...``
does too, so that DDP, FSDP2, DTensor and checkpoints run on the chip. It is a ProcessGroup of
Python, which torch puts in the place of the whole group: it serves the host's tensors as well. The
communicator of all ranks is the one that ``backend.communicator()`` gives; its time limit counts
for the groups of some ranks too. A call returns with work under way; who asks for the work's future
waits for it. Messages are not taken from "any" rank.

Source: PyTorch, torch.distributed.ProcessGroup, names up to 2.12 and from 2.13 on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anychip.contract import (
    HOST,
    Backend,
    CommunicationError,
    Communicator,
    Reduction,
    Transfer,
    UnsupportedError,
    Work,
)

_REDUCTIONS: dict[Reduction, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
# torch declares overloads for callers, which one that is called does not have.
_ProcessGroup: Any = dist.ProcessGroup
_TorchWork: Any = dist._Work  # type: ignore[attr-defined]
_chips: dict[str, Backend] = {}
_Copy = tuple[Tensor, Tensor]
"""Where a copy goes, and what is copied."""


def register(chip: Backend) -> None:
    """Tells torch.distributed of a chip, unless it has a backend there."""
    name, known = chip.device_type, dist.Backend.default_device_backend_map
    if chip.c10d_backend is not None or (name in known and name not in _chips):
        return
    if name not in _chips:
        dist.Backend.register_backend(name, _create(name), extended_api=True, devices=[HOST, name])
    _chips[name] = chip


def _create(name: str) -> Callable[[Any, Any], OverCommunicators]:
    """What torch calls on the members of each new group."""

    def create(given: Any, _: Any) -> OverCommunicators:
        ranks, key, place = list(given.global_ranks_in_group), given.group_id, None
        if not ranks:  # the group of all, which is made first
            ranks = list(range(given.group_size))
            place = (given.store, given.group_rank, given.group_size)
        limits = {"timeout_s": given.timeout.total_seconds(), "heartbeat_s": 30.0, "check": "step"}
        assert Backend.join is not None, "the registry has registered this"
        world: Any = Backend.join(_chips[name], given=place, **limits)
        if place is not None and (world.rank, world.world_size) != place[1:]:
            raise ValueError(
                f"init_process_group: rank {place[1]} of {place[2]} expected, and this process "
                f"has the communicator of rank {world.rank} of {world.world_size}"
            )
        own = world if place is not None else world.part(ranks, name=key, key=key)
        return OverCommunicators(own, world.part(ranks, name=key, key=f"{key}/host", on_host=True))

    return create


class OverCommunicators(_ProcessGroup):  # type: ignore[misc]
    """A process group that calls communicators of its ranks, by the device of a call's tensors."""

    def __init__(self, own: Communicator, host: Communicator) -> None:
        super().__init__(own.rank, own.world_size)
        self._own, self._comms = own, {HOST: host, own.device: own}
        self._name, self._description = own.name, ""
        self._coalesced: list[_Calls] | None = None

    # What torch asks of a group, in Python and in C++.

    def getBackendName(self) -> str:
        return self._own.device

    def getRank(self) -> int:
        return self._own.rank

    def getSize(self) -> int:
        return self._own.world_size

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self._comms]

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> _Calls:
        calls, self._coalesced = self._coalesced or [], None
        works, results, copies = zip(*(call.parts for call in calls), strict=True)
        return _Calls(*(list(chain(*parts)) for parts in (works, results, copies)))

    def shutdown(self) -> None:
        for comm in self._comms.values():
            comm.close()

    def abort(self) -> None:
        self._own.abort(f"the process group {self._name} was aborted")

    # Calls

    def allreduce(self, tensors: Any, opts: Any = None) -> _Calls:
        tensors, reduction = _list(tensors), _reduction(opts)
        works = [self._of(t).all_reduce(t, reduction, async_op=True) for t in tensors]
        return self._made(works, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> _Calls:
        """As all_reduce, which leaves the tensors of other ranks than the root as they were."""
        kept = _list(tensors)
        if opts.rootRank != self.getRank():
            kept = [tensor.clone() for tensor in kept]
        return self.allreduce(kept, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> _Calls:
        tensors, root = _list(tensors), 0 if opts is None else opts.rootRank
        return self._made([self._of(t).broadcast(t, root, async_op=True) for t in tensors], tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Calls:
        """Lists of one tensor per rank, whose sizes may differ."""
        works, copies = [], []
        for rooms, tensor in zip(outputs, _list(inputs), strict=True):
            sizes = [room.numel() for room in rooms]
            whole = tensor.new_empty(sum(sizes))
            works.append(self._gather(whole, tensor, sizes))
            copies += list(zip(rooms, whole.split(sizes), strict=True))
        return self._made(works, list(outputs), copies)

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> _Calls:
        works = [self._gather(*ends) for ends in zip(_list(output), _list(tensor), strict=True)]
        return self._made(works, output)

    allgather_into_tensor_coalesced = _allgather_base

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> _Calls:
        """Lists of one tensor per rank, whose sizes may differ."""
        works = []
        for output, parts in zip(_list(outputs), inputs, strict=True):
            whole = torch.cat([part.reshape(-1) for part in parts])
            works.append(self._scatter(output, whole, opts, [part.numel() for part in parts]))
        return self._made(works, _list(outputs))

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> _Calls:
        pairs = zip(_list(output), _list(tensor), strict=True)
        return self._made([self._scatter(*pair, opts) for pair in pairs], output)

    reduce_scatter_tensor_coalesced = _reduce_scatter_base

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> _Calls:
        sent = [tensor.contiguous() for tensor in inputs]
        work = self._of(outputs[0]).all_to_all(list(outputs), sent, async_op=True)
        return self._made([work], list(outputs))

    def alltoall_base(
        self, output: Any, tensor: Any, taken: Any = None, given: Any = None, opts: Any = None
    ) -> _Calls:
        """Sizes count rows; without them, the rows are cut evenly."""
        size = self.getSize()
        rooms = output.split(list(taken or [len(output) // size] * size))
        parts = tensor.contiguous().split(list(given or [len(tensor) // size] * size))
        return self._made([self._of(output).all_to_all(rooms, parts, async_op=True)], [output])

    def send(self, tensors: Any, destination: int, tag: int = 0) -> _Calls:
        sent = [Transfer("send", t.contiguous(), destination, tag) for t in _list(tensors)]
        return self._made([self._of(sent[0].tensor).exchange(sent, async_op=True)], tensors)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> _Calls:
        rooms = [Transfer("recv", tensor, source, tag) for tensor in _list(tensors)]
        return self._made([self._of(rooms[0].tensor).exchange(rooms, async_op=True)], tensors)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> _Calls:
        """One tensor of each rank, to lists of the root's; the other ranks give none."""
        return self._with_root("recv", outputs, inputs, opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> _Calls:
        """A tensor to each rank, of lists of the root's."""
        return self._with_root("send", inputs, outputs, opts.rootRank)

    def barrier(self, opts: Any = None) -> _Calls:
        self._own.barrier()
        return _Calls([], [])

    all_gather_single = all_gather_single_coalesced = _allgather_base
    reduce_scatter_single = reduce_scatter_single_coalesced = _reduce_scatter_base
    all_to_all_single = alltoall_base

    # What they have in common

    def _of(self, tensor: Tensor) -> Communicator:
        found = self._comms.get(tensor.device.type)
        if found is None:
            expected = " and ".join(self._comms)
            raise ValueError(f"tensors on {expected} expected, got one on {tensor.device}")
        return found

    def _gather(self, output: Tensor, tensor: Tensor, sizes: Any = None) -> Work:
        return self._of(tensor).all_gather(output, tensor.contiguous(), sizes=sizes, async_op=True)

    def _scatter(self, output: Tensor, tensor: Tensor, opts: Any, sizes: Any = None) -> Work:
        call, reduction = self._of(tensor).reduce_scatter, _reduction(opts)
        return call(output, tensor.contiguous(), reduction, sizes=sizes, async_op=True)

    def _with_root(self, kind: Any, lists: Any, singles: Any, root: int) -> _Calls:
        """Messages between the root, which has a tensor per rank, and the ranks, with one each."""
        rank, own = self.getRank(), _list(singles)[0]
        if rank != root:
            return self.send([own], root) if kind == "recv" else self.recv([own], root)
        parts = list(lists[0])
        source, room = (own, parts[rank]) if kind == "recv" else (parts[rank], own)
        room.copy_(source)
        parts = parts if kind == "recv" else [part.contiguous() for part in parts]
        transfers = [Transfer(kind, part, r) for r, part in enumerate(parts) if r != rank]
        return self._made([self._of(own).exchange(transfers, async_op=True)], parts)

    def _made(self, works: list[Work], results: Any, copies: Sequence[_Copy] = ()) -> _Calls:
        made = _Calls(works, _list(results), list(copies))
        if self._coalesced is not None:
            self._coalesced.append(made)
        return made


class _Calls(_TorchWork):  # type: ignore[misc]
    """Works under way, and the copies to make from what they have written."""

    def __init__(
        self, works: list[Work] | None = None, results: Any = (), copies: Sequence[_Copy] = ()
    ) -> None:
        super().__init__()
        self.parts = works or [], list(results), list(copies)

    def wait(self, timeout: Any = None) -> bool:
        """Returns when work of the current stream may use the outputs; the job has the limit."""
        works, _, copies = self.parts
        for work in works:
            work.wait()
        with torch.no_grad():
            for room, part in copies:
                room.copy_(part.view(room.shape))
        works.clear()
        copies.clear()
        return True

    def is_completed(self) -> bool:
        """When it is, the outputs are there as if it had been waited for."""
        is_done = all(work.is_done() for work in self.parts[0])
        if is_done:
            with contextlib.suppress(CommunicationError):  # told to who waits
                self.wait()
        return is_done

    def result(self) -> list[Any]:
        return self.parts[1]

    def get_future(self) -> Any:
        self.wait()
        found: torch.futures.Future[Any] = torch.futures.Future()
        found.set_result(self.parts[1])
        return found


def _list(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _reduction(opts: Any) -> Reduction:
    """The name of ours for the one in torch's options."""
    asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for name, operation in _REDUCTIONS.items():
        if asked == operation:
            return name
    names = dist.ReduceOp.RedOpType.__members__.items()
    called = next((name for name, operation in names if asked == operation), asked)
    raise UnsupportedError(f"reductions {', '.join(_REDUCTIONS)} expected, got {called}")
