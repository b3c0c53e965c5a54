"""Calls of ranks on one host, through memory that they share: natively, and past the interpreter.

A collective is one native call of each rank (csrc/comm/collectives.h), which copies, waits and
reduces by itself; those of a group are made one after the other. Messages are matched and moved by
whoever waits (csrc/comm/point_to_point.h).
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections.abc import Callable, Sequence
from ctypes import c_double, c_int, c_int64, c_uint32, c_uint64, c_void_p
from datetime import timedelta
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from anychip.comm import native
from anychip.comm.messages import GROUPS, Messages
from anychip.comm.progress import Driven
from anychip.contract import DONE, REDUCTIONS, CollectiveCall, Membership, TransportError, Work

_ABI = 1
_LATE, _LOST, _WRONG = 1, 2, 3
_DTYPES = {
    torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.int8: 4,
    torch.uint8: 5, torch.int16: 6, torch.int32: 7, torch.int64: 8,
}  # fmt: skip
_REDUCTIONS = {reduction: code for code, reduction in enumerate(REDUCTIONS)}
_TURN = (c_void_p, c_uint64, c_uint32, c_double)
"""What every collective begins with: group, ticket, tag, seconds."""
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "nbytes": (c_int64, c_int, c_int), "new": (c_void_p, c_int, c_int, c_int),
    "group": (c_void_p, c_void_p, c_int, c_void_p, c_int, c_int), "abort": (None, c_void_p),
    "close": (None, c_void_p), "free": (None, c_void_p), "barrier": (c_int64, *_TURN),
    "all_reduce": (c_int64, *_TURN, c_void_p, c_int64, c_int, c_int, c_int),
    "reduce_scatter": (c_int64, *_TURN, c_void_p, c_void_p, c_void_p, c_int, c_int, c_int),
    "all_gather": (c_int64, *_TURN, c_void_p, c_void_p, c_void_p),
    "broadcast": (c_int64, *_TURN, c_void_p, c_int64, c_int),
    "all_to_all": (c_int64, *_TURN, *[c_void_p] * 5),
    "post": (c_void_p, c_void_p, c_int, c_int, c_uint32, c_void_p, c_int64),
    "wait": (c_int, c_void_p, c_void_p, c_double),
}  # fmt: skip


@cache
def load() -> tuple[Any, str]:
    """The library, or None and why there is none."""
    library, missing = native.load("_shared_memory", "anychip_shared_abi", _ABI)
    if library is not None:
        for name, (result, *arguments) in _SIGNATURES.items():
            function = library[f"anychip_shared_{name}"]
            function.restype, function.argtypes = result, arguments
            setattr(library, name, function)
    return library, missing


def nbytes(world_size: int) -> int:
    """Of the file that so many ranks share. Most of it never has pages."""
    return int(load()[0].nbytes(world_size, GROUPS))


class SharedMemory:
    """One rank's end of the memory: messages between the ranks of a job, and its groups' places.

    Args:
        descriptor: of the file, of which a host has one per job; it is closed with the rest.
        ranks: of the host, in the world.

    Attributes:
        description: for reports.
        send, recv: as of :class:`~anychip.comm.gloo.Gloo`.
    """

    description = "shared memory of one host, reduced there pairwise in rank order"

    def __init__(self, descriptor: int, rank: int, ranks: Sequence[int]) -> None:
        self.library, self._descriptor = load()[0], descriptor
        self.places = {other: place for place, other in enumerate(ranks)}
        self.handle: int | None = self.library.new(descriptor, self.places[rank], len(ranks))
        if self.handle is None:
            raise OSError(f"no room for {nbytes(len(ranks))} bytes in this process's addresses")

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Message:
        return _Message(self, tensors[0], peer, tag, is_send=True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Message:
        return _Message(self, tensors[0], peer, tag, is_send=False)

    def transport(self, group: Membership, timeout_s: float) -> SharedCollectives:
        """This rank's end of a group of ranks of this host."""
        return SharedCollectives(self, group, timeout_s)

    def group(self, group: Membership) -> int:
        """This rank's end of a group; other ranks' ends are made whenever they like."""
        size = len(group.ranks)
        ranks = (c_int * size)(*map(self.places.__getitem__, group.ranks))
        found: int | None = self.library.group(self.handle, group.number, ranks, group.rank, size)
        if found is None:
            raise RuntimeError(f"group {group.name!r}: no room for it in this process's addresses")
        return found

    def abort(self) -> None:
        """Makes calls under way fail, here and, once this rank closes, where they wait for it."""
        self.library.abort(self.handle)

    def close(self) -> None:
        """Gives the memory back."""
        self.library.close(self.handle)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        # Who has a group or a message has this, so that the handle is used by nobody any more.
        if getattr(self, "handle", None) is not None:
            self.close()
            self.library.free(self.handle)


class _Message:
    """One end of a message under way."""

    def __init__(
        self, memory: SharedMemory, tensor: Tensor, peer: int, tag: int, *, is_send: bool
    ) -> None:
        self._memory, self._tensor = memory, tensor
        self._handle = memory.library.post(
            memory.handle, is_send, memory.places[peer], tag, tensor.data_ptr(), tensor.nbytes
        )

    def wait(self, timeout: timedelta) -> bool:
        status = self._memory.library.wait(
            self._memory.handle, self._handle, timeout.total_seconds()
        )
        if status:
            raise RuntimeError(_TEXTS[status])
        return True


_TEXTS = {_LATE: "the time is over", _LOST: "the memory was given up, here or by the other rank"}


class SharedCollectives(Messages):
    """One rank's end of a group on one host. Further than the interface promises: as Messages."""

    def __init__(self, connections: SharedMemory, group: Membership, timeout_s: float) -> None:
        super().__init__(connections, group, timeout_s)
        self._native, self._tickets = connections.group(group), itertools.count()
        self._library = connections.library

    def all_reduce(self, call: CollectiveCall) -> Work:
        (tensor,) = call.outputs
        numel = tensor.numel()
        if not numel:
            return DONE
        how = (tensor.itemsize, _DTYPES[tensor.dtype], _REDUCTIONS[call.reduction])
        return self._make("all_reduce", call, tensor.data_ptr(), numel, *how)

    def all_gather(self, call: CollectiveCall) -> Work:
        (tensor,), (output,) = call.inputs, call.outputs
        if not output.numel():
            return DONE
        sizes = _int64s(tuple(call.sizes), output.itemsize)
        return self._make("all_gather", call, output.data_ptr(), tensor.data_ptr(), sizes)

    def reduce_scatter(self, call: CollectiveCall) -> Work:
        (tensor,), (output,) = call.inputs, call.outputs
        if not tensor.numel():
            return DONE
        how = (tensor.itemsize, _DTYPES[tensor.dtype], _REDUCTIONS[call.reduction])
        sizes = _int64s(tuple(call.sizes), 1)
        ends = (output.data_ptr(), tensor.data_ptr())
        return self._make("reduce_scatter", call, *ends, sizes, *how)

    def broadcast(self, call: CollectiveCall) -> Work:
        (tensor,) = call.inputs or call.outputs
        if not tensor.numel():
            return DONE
        return self._make("broadcast", call, tensor.data_ptr(), tensor.nbytes, call.source)

    def all_to_all(self, call: CollectiveCall) -> Work:
        arguments: list[Any] = []
        for tensors in (call.outputs, call.inputs):
            pointers = (c_void_p * self._size)(*[t.data_ptr() for t in tensors])
            arguments += [pointers, _int64s(tuple(t.nbytes for t in tensors), 1)]
        sent = c_int64()
        outputs = list(call.outputs)

        def compare(peer: int) -> None:
            self._compare_sizes([(peer, sent.value // outputs[peer].itemsize)], outputs)

        return self._make("all_to_all", call, *arguments, ctypes.byref(sent), wrong=compare)

    def barrier(self, call: CollectiveCall) -> Work:
        return self._make("barrier", call)

    def _make(
        self,
        name: str,
        call: CollectiveCall,
        *arguments: Any,
        wrong: Callable[[int], None] | None = None,
    ) -> Work:
        begin = (self._native, next(self._tickets), call.tag + 1)
        function = getattr(self._library, name)
        return _Collective(self, function, begin, arguments, call, wrong, self._timeout_s)


class _Collective(Driven):
    """A native call, made when it is waited for."""

    def __init__(
        self,
        group: SharedCollectives,
        function: Callable[..., int],
        begin: tuple[int, int, int],
        arguments: tuple[Any, ...],
        call: CollectiveCall,
        wrong: Callable[[int], None] | None,
        timeout_s: float,
    ) -> None:
        super().__init__(call.outputs, timeout_s)
        self._what = group, function, begin, arguments, call.inputs, wrong

    def _run(self) -> None:
        _, function, begin, arguments, _, wrong = self._what
        answer = function(*begin, max(0.0, self._deadline - time.monotonic()), *arguments)
        if not answer:
            return
        status, peer = answer & 255, answer >> 8
        if status == _WRONG and wrong is not None:
            wrong(peer)
        raise TransportError(_TEXTS[status], (peer,), "late" if status == _LATE else "lost")

    def _finish(self) -> None:
        super()._finish()
        del self._what


@lru_cache(maxsize=256)
def _int64s(numbers: Sequence[int], factor: int) -> Any:
    """An array for native code, which only reads it."""
    return (c_int64 * len(numbers))(*[number * factor for number in numbers])
