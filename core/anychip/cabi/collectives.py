"""What moves the bytes of ranks' calls for a chip whose C library has collectives?

Calls are queued on the chip's current stream; a work's ``wait`` is an event that the current stream
waits for. What the library does not take goes through the host. Once, when the job starts, it is
asked for nothing (a count of 0) in each type and reduction, which it answers with ENOTSUP where it
does not take them; the same answer to a real call is an error, since it may come too late.

A device waits for ever for a rank that does not come. So a thread looks at what is under way: a
call that takes longer than the job's limit, and an error that the library tells later, end the job
on all ranks, whose calls are then aborted.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anychip.cabi.table import Table, interface
from anychip.contract import (
    CollectiveCall,
    DeviceError,
    Job,
    Membership,
    Transfer,
    Transport,
    TransportError,
    Work,
)

_CODES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4,
    torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bool: 11, torch.bfloat16: 15,
    torch.float8_e5m2: 23, torch.float8_e4m3fn: 24,
}  # fmt: skip
_REDUCTIONS = {"sum": 0, "avg": 1, "max": 2, "min": 3}
_REDUCING = ("all_reduce", "reduce_scatter")
_MOVING = ("all_gather", "broadcast", "all_to_all", "send", "recv")
_INTEGERS = ("int64_t", "uint64_t")
_ENOTSUP, _EABORTED = -1, -5
_LOOK_S = 0.05
_LEAVE_S = 5.0
"""Seconds that a call which was aborted is given to return, before its group is left as it is."""

Taken = frozenset[tuple[str, torch.dtype, str]]
"""Call, type, and the reduction or "", of what the library does itself."""


class Chip(NamedTuple):
    """What a transport needs of a library and the bridge."""

    table: Table
    functions: Any
    bridge: ctypes.CDLL
    device: int


class Collectives(Transport):
    """One rank's end of a group whose tensors are on the chip.

    The order of sums is the library's. Messages of a pair are matched by their order, so that those
    with a tag go through the host.

    Args:
        taken, watch: those of the job's first group, for its parts.
    """

    def __init__(
        self,
        job: Job,
        group: Membership,
        chip: Chip,
        taken: Taken | None = None,
        watch: _Watch | None = None,
    ) -> None:
        self.job, self._group, self._chip = job, group, chip
        self.device = chip.table.name
        self._staged = job.host(group, self.device)
        self.capabilities = self._staged.capabilities
        self._turn, self._ending, self._is_aborted = threading.Lock(), threading.Lock(), False
        self._comm = self._joined()
        self._taken = self._asked() if taken is None else taken
        self._watch = watch or _Watch(job, chip.table.said)
        self._watch.groups.append(self)
        self.description = (
            f"collectives of {chip.table.path.name}, in its own order of sums; through the host: "
            + ("; ".join(self.missing()) or "messages with tags")
        )

    def part(self, group: Membership) -> Transport:
        return Collectives(self.job, group, self._chip, self._taken, self._watch)

    def missing(self) -> list[str]:
        """What goes through the host, in words."""
        lines = []
        for call in (*_REDUCING, *_MOVING):
            for kind in _REDUCTIONS if call in _REDUCING else ("",):
                types = [
                    str(dtype).removeprefix("torch.")
                    for dtype in _CODES
                    if self.capabilities.supports(call, dtype, kind or None)  # type: ignore[arg-type]
                    and (call, dtype, kind) not in self._taken
                ]
                lines += [f"{call} {kind}".strip() + f" of {', '.join(types)}"] if types else []
        return lines

    def all_reduce(self, call: CollectiveCall) -> Work:
        (tensor,) = call.outputs
        if not self._takes("all_reduce", tensor, call.reduction):
            return self._staged.all_reduce(call)
        place = self._place(tensor)
        how = (tensor.numel(), _CODES[tensor.dtype], _REDUCTIONS[call.reduction])
        return self._queue(call, ("all_reduce", *place, *place, *how))

    def all_gather(self, call: CollectiveCall) -> Work:
        (tensor,), (output,) = call.inputs, call.outputs
        if len(set(call.sizes)) > 1 and self._takes("all_to_all", tensor):
            parts = output.view(-1).split(list(call.sizes))  # to each rank the same
            return self.all_to_all(call._replace(inputs=[tensor] * len(parts), outputs=parts))
        if len(set(call.sizes)) > 1 or not self._takes("all_gather", tensor):
            return self._staged.all_gather(call)
        places = (*self._place(tensor), *self._place(output))
        return self._queue(call, ("all_gather", *places, tensor.numel(), _CODES[tensor.dtype]))

    def reduce_scatter(self, call: CollectiveCall) -> Work:
        (tensor,), (output,), largest = call.inputs, call.outputs, max(call.sizes)
        if not self._takes("reduce_scatter", tensor, call.reduction):
            return self._staged.reduce_scatter(call)
        source, room = tensor, output
        if min(call.sizes) != largest:  # padded to parts that are alike
            source = tensor.new_zeros(largest * len(call.sizes))
            parts = tensor.view(-1).split(list(call.sizes))
            for row, part in zip(source.split(largest), parts, strict=True):
                row[: part.numel()].copy_(part)
            room = tensor.new_empty(largest)
        how = (largest, _CODES[tensor.dtype], _REDUCTIONS[call.reduction])
        what = ("reduce_scatter", *self._place(source), *self._place(room), *how)
        copies = [] if room is output else [(output, room[: output.numel()])]
        return self._queue(call, what, copies=copies)

    def broadcast(self, call: CollectiveCall) -> Work:
        (tensor,) = call.inputs or call.outputs
        if not self._takes("broadcast", tensor):
            return self._staged.broadcast(call)
        how = (tensor.numel(), _CODES[tensor.dtype], call.source)
        return self._queue(call, ("broadcast", *self._place(tensor), *how))

    def all_to_all(self, call: CollectiveCall) -> Work:
        if not self._takes("all_to_all", call.outputs[0]):
            return self._staged.all_to_all(call)
        given, rooms = self._in_one(call.inputs), self._in_one(call.outputs)
        for tensor, part in zip(call.inputs, given, strict=True):
            if tensor is not part:
                part.copy_(tensor.view(-1))
        copies = [(t, r) for t, r in zip(call.outputs, rooms, strict=True) if t is not r]
        what = (*self._ends(given), *self._ends(rooms), _CODES[rooms[0].dtype])
        return self._queue(call, ("all_to_all", *what), copies=copies)

    def exchange(self, transfers: Sequence[Transfer]) -> Work:
        own = [t for t in transfers if not t.tag and self._takes(t.kind, t.tensor)]
        others = [t for t in transfers if t.tag or not self._takes(t.kind, t.tensor)]
        works: list[Work] = [self._staged.exchange(others)] if others else []
        if own:
            outputs = [t.tensor for t in own if t.kind == "recv"]
            call = CollectiveCall("exchange", [t.tensor for t in own], outputs)
            calls = [
                (t.kind, *self._place(t.tensor), t.tensor.numel(), _CODES[t.tensor.dtype], t.peer)
                for t in own
                if t.tensor.numel()
            ]
            works.append(self._queue(call, *calls))
        return works[0] if len(works) == 1 else _Both(*works)

    def barrier(self, call: CollectiveCall) -> Work:
        return self._staged.barrier(call)

    def proceed(self, work: Work, on_error: Callable[[Exception], None]) -> None:
        staged = work.staged if isinstance(work, _Both) else work
        if not isinstance(staged, _Queued):
            self._staged.proceed(staged, on_error)

    def drain(self) -> None:
        """Waits for what is queued, as closing would break it off."""
        deadline = time.monotonic() + self.job.timeout_s
        while self._watch.is_busy() and not self.job.has_failed and time.monotonic() < deadline:
            time.sleep(0.001)

    def abort(self) -> None:
        with self._ending:
            if not self._is_aborted:
                self._is_aborted = True
                self._chip.functions.comm_abort(self._comm)
        self._staged.abort()

    def close(self) -> None:
        if self._turn.acquire(timeout=_LEAVE_S):
            with self._ending:
                self._watch.groups.remove(self)
                self._chip.functions.comm_destroy(self._comm)
            self._turn.release()
        self._staged.close()

    def has_failed(self) -> bool:
        """A call of this group, or of a part of it, is known to have failed."""
        return self._is_aborted or any(group.error() for group in self._watch.groups)

    def error(self) -> int:
        """The status of a call that has failed since, as the library tells it; 0: none has."""
        with self._ending:
            return 0 if self._is_aborted else self._chip.functions.async_error(self._comm)

    # What they have in common

    def _takes(self, call: str, tensor: Tensor, reduction: str = "") -> bool:
        if tensor.device.index != self._chip.device:
            raise ValueError(
                f"{call}: a tensor on device {self._chip.device} expected, which was current when "
                f"the communicator was made, got one on {tensor.device}"
            )
        return (call, tensor.dtype, reduction) in self._taken

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        """Memory and offset in bytes of a tensor."""
        memory, offset = ctypes.c_uint64(), ctypes.c_int64()
        if tensor.numel():
            where = ctypes.c_void_p(tensor.data_ptr())
            bridge = self._chip.bridge
            status = bridge.anychip_bridge_place(where, ctypes.byref(memory), ctypes.byref(offset))
            assert status == 0, bridge.anychip_bridge_error()
        return memory.value, offset.value

    def _in_one(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors, where they are in one memory; else room for them that is."""
        if len({self._place(tensor)[0] for tensor in tensors if tensor.numel()}) <= 1:
            return tensors
        sizes = [tensor.numel() for tensor in tensors]
        return list(tensors[0].new_empty(sum(sizes)).split(sizes))

    def _ends(self, tensors: Sequence[Tensor]) -> tuple[int, Any, Any]:
        """Memory, offsets and counts."""
        places = [self._place(tensor) for tensor in tensors]
        counts = [tensor.numel() for tensor in tensors]
        offsets = [offset for _, offset in places]
        new = interface().new
        return max(m for m, _ in places), new("int64_t[]", offsets), new("uint64_t[]", counts)

    def _queue(
        self, call: CollectiveCall, *calls: Any, copies: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> Work:
        """Makes calls of the library on the current stream, and copies behind them.

        Args:
            calls: name and arguments of each.
        """
        work = _Queued(self, call.name, time.monotonic() + self.job.timeout_s)
        if any(tensor.numel() for tensor in (*call.inputs, *call.outputs)):
            functions = self._chip.functions
            stream = self._chip.bridge.anychip_bridge_current_stream(self._chip.device)
            with self._turn:
                self.refuse_after_abort()
                self._watch.add(work)
                if len(calls) > 1:
                    self._tell("group_start", functions.group_start())
                for name, *what in calls:
                    self._tell(name, getattr(functions, name)(self._comm, *what, stream))
                if len(calls) > 1:
                    self._tell("group_end", functions.group_end())
        for tensor, part in copies:
            tensor.view(-1).copy_(part)
        work.mark()
        # Tensors are written past autograd, which has to know that saved values are old.
        torch.autograd.graph.increment_version([t for t in call.outputs if not t.is_inference()])
        return work

    def refuse_after_abort(self) -> None:
        if self._is_aborted:
            raise RuntimeError(f"{self.description.partition(',')[0]}: the group was given up")

    def _tell(self, name: str, status: int) -> None:
        """Raises what a status of a call means for the job."""
        if status == _EABORTED:
            raise RuntimeError(f"{name} was aborted")
        if status:
            text = f"{self.device}: {name} of rank {self.job.rank}: {self._chip.table.said(status)}"
            if status == _ENOTSUP:
                text += "; with a count of 0 it did not say ENOTSUP, as abi.h asks for"
            raise TransportError(text, (self._group.rank,), "wrong")

    # How a group begins

    def _joined(self) -> Any:
        """The library's group; returns when all ranks have come."""
        job, rank, number = self.job, self._group.rank, self._group.number
        functions, said = self._chip.functions, self._chip.table.said
        new, answer = interface().new, queue.SimpleQueue[tuple[int, str]]()
        unique, comm, key = new("uint8_t[128]"), new("anychip_comm *"), f"{self.device}/{number}"
        if rank == 0:
            status = functions.unique_id(unique)
            if status:
                raise self.failed("unique_id", status, said(status))
            job.store.set(key, bytes(unique).hex())
        try:
            interface().memmove(unique, bytes.fromhex(job.store.get(key).decode()), 128)
        except RuntimeError as error:  # the store, cut by a failure
            raise self.failed("unique_id", 0, str(error)) from error

        def init() -> None:
            size = len(self._group.ranks)
            status = functions.comm_init(self._chip.device, size, rank, unique, comm)
            answer.put((status, said(status) if status else ""))

        threading.Thread(target=init, daemon=True).start()
        deadline = time.monotonic() + job.timeout_s
        while True:
            try:
                status, text = answer.get(timeout=_LOOK_S)
            except queue.Empty:
                if job.has_failed or time.monotonic() > deadline:
                    text = f"not all ranks came within {job.timeout_s:g} s"
                    raise self.failed("comm_init", 0, text) from None
                continue
            if status:
                raise self.failed("comm_init", status, text)
            return comm[0]

    def failed(self, name: str, status: int, text: str) -> Exception:
        """Ends the job; the error to raise."""
        where = f"{self._group.name}: {name}"
        label = f"status {status}" if status else "no answer"
        return self.job.blame(where, DeviceError(where, status, label, text))

    def _asked(self) -> Taken:
        """What the library takes, the same on all ranks."""
        functions, comm, found = self._chip.functions, self._comm, set()
        stream, peer = 0, (self._group.rank + 1) % len(self._group.ranks)
        none = [interface().new(f"{kind}[]", len(self._group.ranks)) for kind in _INTEGERS]
        for dtype, code in _CODES.items():
            answers = {
                (name, kind): getattr(functions, name)(comm, 0, 0, 0, 0, 0, code, number, stream)
                for name in _REDUCING
                for kind, number in _REDUCTIONS.items()
            }
            answers["all_gather", ""] = functions.all_gather(comm, 0, 0, 0, 0, 0, code, stream)
            answers["broadcast", ""] = functions.broadcast(comm, 0, 0, 0, code, 0, stream)
            whole = (0, *none, 0, *none)
            answers["all_to_all", ""] = functions.all_to_all(comm, *whole, code, stream)
            for name in ("send", "recv"):
                answers[name, ""] = getattr(functions, name)(comm, 0, 0, 0, code, peer, stream)
            found |= {(name, dtype, kind) for (name, kind), status in answers.items() if not status}
        words, key = str(sorted(map(str, found))), f"{self.device}/taken"
        if self._group.rank == 0:
            self.job.store.set(key, words)
        elif self.job.store.get(key).decode() != words:
            raise self.failed("count of 0", _ENOTSUP, "ranks 0 and this one take other types")
        return frozenset(found)


class _Queued(Work):
    """A call that is on its stream, or on its way there.

    Attributes:
        deadline: of time.monotonic().
    """

    def __init__(self, group: Collectives, name: str, deadline: float) -> None:
        self._group, self.name, self.deadline = group, name, deadline
        self._event: torch.Event | None = None
        self._is_waited_for = False

    def mark(self) -> None:
        """What the current stream has now is the call."""
        event = torch.Event(self._group.device)
        event.record()
        self._event = event

    def is_done(self) -> bool:
        return self._is_waited_for or self.has_ended()

    def has_ended(self) -> bool:
        """The device is done with it."""
        try:
            return self._event is not None and self._event.query()
        except RuntimeError:  # the device has failed; who waits is told
            return True

    def wait(self) -> None:
        self._group.refuse_after_abort()
        assert self._event is not None
        self._event.wait()
        self._is_waited_for = True


class _Both(Work):
    """Messages through the host, and the library's."""

    def __init__(self, staged: Work, queued: Work) -> None:
        self.staged, self._queued = staged, queued

    def is_done(self) -> bool:
        return self.staged.is_done() and self._queued.is_done()

    def wait(self) -> None:
        self._queued.wait()
        self.staged.wait()


class _Watch:
    """The thread of a job that looks at calls under way, since no rank waits for them on the host.

    Attributes:
        groups: that are open.
    """

    def __init__(self, job: Job, said: Callable[[int], str]) -> None:
        self._said = said
        self.groups: list[Collectives] = []
        self.job, self._works = job, list[_Queued]()
        self._lock, self._ended = threading.Lock(), threading.Event()
        job.at_close(self._ended.set)
        threading.Thread(target=self._run, name="anychip collectives", daemon=True).start()

    def add(self, work: _Queued) -> None:
        with self._lock:
            self._works.append(work)

    def is_busy(self) -> bool:
        """Whether a call is under way."""
        with self._lock:
            self._works = [work for work in self._works if not work.has_ended()]
            return bool(self._works)

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S) and not self.job.has_failed:
            if self.is_busy() and (work := self._works[0]).deadline < time.monotonic():
                text = f"{work.name} was not done within {self.job.timeout_s:g} s"
                self.groups[0].failed(work.name, 0, text)
            for group in list(self.groups):
                if status := group.error():
                    group.failed("async_error", status, self._said(status))
