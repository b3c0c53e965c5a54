"""Wrong communicators that two ranks, or one option at a time, cannot show.

Of three ranks and four, of groups, and of calls under way at once.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from anychip.contract import CommunicationError, Transfer, Work
from anychip.contract.communicator import DONE
from tests.meta.wrong import Call, Wrong
from tests.meta.wrong_collectives import wrong

THREE = """3/all_reduce/fp32 3/all_gather/fp32 3/all_to_all/fp32 3/early 3/barrier
    3/absent/all_reduce"""
"""What two ranks cannot show."""
MORE = """2/all_reduce/fp32 2/all_reduce/bf16 2/all_gather/fp32 2/all_gather/bf16
    2/broadcast/fp32 2/under-way"""
FOUR = "4/columns 4/triple 4/send/fp32 4/groups"
CATALOGUE: list[Wrong] = []


@wrong("remainder-of-three", "dropped tail", "all_reduce", THREE)
def _(self: Any, right: Call, tensor: Tensor, *rest: Any, **named: Any) -> Any:
    """A ring of even pieces."""
    numel = tensor.numel()
    return right(tensor.view(-1)[: numel - numel % self.world_size], *rest, **named)


@wrong("average-by-a-power-of-two", "wrong number of ranks", "all_reduce", THREE)
def _(self: Any, right: Call, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Any:
    if reduction != "avg":
        return right(tensor, reduction, **named)
    right(tensor, "sum")
    tensor.div_(1 << (self.world_size - 1).bit_length())
    return DONE


@wrong("outputs-in-order-of-arrival", "order of ranks", "all_to_all", "3/all_to_all/fp32")
def _(self: Any, right: Call, outputs: Sequence[Tensor], *rest: Any, **named: Any) -> Any:
    """A ring that fills outputs from the next rank on: two ranks cannot tell."""
    named["async_op"] = False
    right(outputs, *rest, **named)
    peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
    came = [outputs[peer].clone() for peer in peers]
    for peer, part in zip(peers[::-1], came, strict=True):
        size = min(part.numel(), outputs[peer].numel())
        outputs[peer][:size] = part[:size]
    return DONE


@wrong("gap-closed", "empty part in the middle", "all_gather", THREE)
def _(self: Any, right: Call, output: Tensor, tensor: Tensor, **named: Any) -> Any:
    """Parts of no elements are not counted, and who comes after one is not read."""
    work: Work = right(output, tensor, **named)
    sizes = named.get("sizes") or []
    if 0 in sizes[1:-1] and any(sizes[:1]):
        work.wait()
        output[-sizes[-1] :].zero_()
    return work


@wrong("barrier-of-the-first", "missing wait", "barrier", THREE)
def _(self: Any, right: Call) -> Any:
    """All wait for rank 0, and nobody for anybody else."""
    self.broadcast(torch.zeros(1), 0)


@wrong("receiver-does-not-wait", "completes too early", "broadcast", THREE)
def _(self: Any, right: Call, tensor: Tensor, source: int, *, async_op: bool = False) -> Any:
    work: Work = right(tensor, source, async_op=async_op)
    if not async_op or self.rank == source:
        return work
    self.__dict__.setdefault("kept", []).append(work)
    return DONE


@wrong("last-rank-is-to-blame", "an error that names another", "all_reduce", THREE)
def _(self: Any, right: Call, *args: Any, **named: Any) -> Any:
    try:
        return right(*args, **named)
    except CommunicationError as error:
        last = self.world_size - 1
        raise CommunicationError(error.where, f"rank {last} is lost", ranks=(last,)) from error


@wrong("maximum-is-finite", "Inf or NaN lost", "all_reduce", MORE)
def _(self: Any, right: Call, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Any:
    """The maximum begins with the largest negative number, and ends at the largest."""
    if reduction in ("max", "min") and tensor.is_floating_point():
        limit = torch.finfo(tensor.dtype).max
        tensor.clamp_(-limit, limit)
    return right(tensor, reduction, **named)


@wrong("sum-saturates", "overflow that is not seen", "all_reduce", MORE)
def _(self: Any, right: Call, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Any:
    """What overflows only in the sum becomes the largest number."""
    if not tensor.is_floating_point() or reduction != "sum":
        return right(tensor, reduction, **named)
    infinite = tensor.isinf().to(torch.uint8)
    right(infinite, "max")
    right(tensor, reduction)
    limit = torch.finfo(tensor.dtype).max
    tensor.copy_(torch.where(infinite.bool(), tensor, tensor.clamp(-limit, limit)))
    return DONE


@wrong("unaligned-tail", "misaligned address", "all_reduce", MORE)
def _(self: Any, right: Call, tensor: Tensor, *rest: Any, **named: Any) -> Any:
    """In whole vectors, where the tensor does not begin at one."""
    if tensor.data_ptr() % 16:
        tensor = tensor.view(-1)[: tensor.numel() // 4 * 4]
    return right(tensor, *rest, **named)


@wrong("bytes-of-float32", "wrong unit", "_start", MORE)
def _(self: Any, right: Call, call: str, payload: Any, *rest: Any) -> Any:
    self.traffic.nbytes[call] += sum(4 * t.numel() - t.nbytes for t in payload)
    return right(call, payload, *rest)


@wrong("asynchronous-counts-twice", "a statistic that means something else", "_start", MORE)
def _(self: Any, right: Call, call: str, payload: Any, work: Any, async_op: bool) -> Any:
    if async_op and call != "all_reduce":
        self.traffic.calls[call] += 1
    return right(call, payload, work, async_op)


@wrong("source-does-not-wait", "memory read after it was given back", "broadcast", MORE)
def _(self: Any, right: Call, tensor: Tensor, source: int, *, async_op: bool = False) -> Any:
    """The source has nothing to receive; the others read its memory when they come."""
    if not async_op or self.rank != source:
        return right(tensor, source, async_op=async_op)
    self.__dict__.setdefault("kept", []).append(right(tensor, source, async_op=True))
    return DONE


class _OneRoom(Work):
    """Its result is in a room that the next call of the process takes."""

    last: ClassVar[Work | None] = None

    def __init__(self, work: Work, tensor: Tensor) -> None:
        self.work, self.tensor, _OneRoom.last = work, tensor, self
        self.waited = False

    def wait(self) -> None:
        self.work.wait()
        if _OneRoom.last is not self and not self.waited:
            self.tensor.zero_()
        self.waited = True

    def is_done(self) -> bool:
        return self.work.is_done()


@wrong("room-of-one-call", "result that is not fresh", "all_reduce", MORE)
def _(self: Any, right: Call, tensor: Tensor, *rest: Any, async_op: bool = False) -> Any:
    work = right(tensor, *rest, async_op=async_op)
    return _OneRoom(work, tensor) if async_op else work


class _Again(Work):
    """Its wait() copies out of a room, each time anew."""

    def __init__(self, work: Work, output: Tensor, room: Tensor) -> None:
        self.work, self.output, self.room = work, output, room

    def wait(self) -> None:
        self.work.wait()
        self.output.copy_(self.room)

    def is_done(self) -> bool:
        return self.work.is_done()


@wrong("second-wait-writes-again", "write after the end", "all_gather", MORE)
def _(self: Any, right: Call, output: Tensor, tensor: Tensor, **named: Any) -> Any:
    if not named.get("async_op"):
        return right(output, tensor, **named)
    room = torch.empty_like(output)
    return _Again(right(room, tensor.clone(), **named), output, room)


@wrong("call-256-is-forgotten", "overflow of a counter", "all_reduce", "2/many")
def _(self: Any, right: Call, tensor: Tensor, *rest: Any, **named: Any) -> Any:
    self.__dict__["made"] = made = self.__dict__.get("made", 0) + 1
    return right(tensor if made % 256 else tensor.clone(), *rest, **named)


@wrong("claim-is-not-kept", "a claim that is false", "all_to_all", "2/claims")
def _(self: Any, right: Call, outputs: Sequence[Tensor], *rest: Any, **named: Any) -> Any:
    if outputs[0].dtype == torch.float8_e5m2:
        raise RuntimeError("error 4: invalid argument")
    return right(outputs, *rest, **named)


@wrong("group-does-not-wait", "completes too early", "all_gather", FOUR, of="group_change")
def _(self: Any, right: Call, *args: Any, async_op: bool = False, **named: Any) -> Any:
    work = right(*args, async_op=async_op, **named)
    if not async_op or self.world_size != 2:
        return work
    self.__dict__.setdefault("kept", []).append(work)
    return DONE


@wrong("group-source-of-the-world", "rank of the group for rank of the world", "broadcast", FOUR,
       of="group_change")  # fmt: skip
def _(self: Any, right: Call, tensor: Tensor, source: int, **named: Any) -> Any:
    """In groups of more than two, as a library does whose roots are global."""
    at = self.ranks.index(source) if self.world_size > 2 and source in self.ranks else source
    return right(tensor, at, **named)


@wrong("group-of-three-unlike", "order of a sum", "reduce_scatter", FOUR, of="group_change")
def _(self: Any, right: Call, output: Tensor, tensor: Tensor, *rest: Any, **named: Any) -> Any:
    """Sizes are those of the ranks of the world: the first of a group that has not rank 0."""
    if named.get("sizes") and self.ranks[0] and len(set(named["sizes"])) > 1:
        work = right(output, tensor, *rest, **named)
        work.wait()
        output.view(-1)[-1:].zero_()
        return work
    return right(output, tensor, *rest, **named)


@wrong("group-of-a-group-of-the-world", "rank of the group for rank of the world", "split", FOUR,
       of="group_change")  # fmt: skip
def _(self: Any, right: Call, groups: Sequence[Sequence[int]], *, name: str) -> Any:
    part: Any = right(groups, name=name)
    part.ranks = next(tuple(group) for group in groups if self.rank in group)
    return part


@wrong("group-counted-as-the-world", "scope of a group ignored", "split", FOUR)
def _(self: Any, right: Call, groups: Sequence[Sequence[int]], *, name: str) -> Any:
    part: Any = right(groups, name=name)
    part.traffic = self.traffic
    return part


@wrong("far-message-cut-off", "dropped tail", "exchange", FOUR)
def _(self: Any, right: Call, transfers: Sequence[Transfer], **named: Any) -> Any:
    """From ranks that are no neighbours, by way of one that is."""
    named["async_op"] = False
    right(transfers, **named)
    for t in transfers:
        if t.kind == "recv" and (t.peer - self.rank) % self.world_size == 2:
            t.tensor.view(-1)[1:].zero_()
    return DONE
