"""Wrong backends that the collectives chapter has to find.

Ranks are processes that import these classes by name, and mix the change into the communicator.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from anychip.contract import Capabilities, CommunicationError, Communicator, Transfer, Work
from anychip.contract.communicator import DONE
from tests.meta.honest import HonestBackend
from tests.meta.wrong import Wrong

Base: Any = Communicator
"""Of the changes, which are mixed into whatever communicator the job has."""


class RanksBackend(HonestBackend):
    """Honest; its communicator is changed by ``change``."""

    change: ClassVar[type] = type("Nothing", (Base,), {})

    def communicator(self, **settings: Any) -> Communicator:
        comm = super().communicator(**settings)
        if self.change not in type(comm).__mro__:
            comm.__class__ = type(self.change.__name__, (self.change, type(comm)), {})
        return comm


class AllReduceAverages(RanksBackend):
    class change(Base):
        def all_reduce(self, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Work:
            wrong = "avg" if tensor.is_floating_point() and reduction == "sum" else reduction
            return super().all_reduce(tensor, wrong, **named)  # type: ignore[misc,no-any-return]


class AllReduceInBfloat16(RanksBackend):
    class change(Base):
        def all_reduce(self, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Work:
            if tensor.dtype != torch.float32 or named.get("async_op"):
                return super().all_reduce(tensor, reduction, **named)  # type: ignore[misc,no-any-return]
            narrow = tensor.to(torch.bfloat16)
            super().all_reduce(narrow, reduction)  # type: ignore[misc]
            tensor.copy_(narrow)
            return DONE


class ReduceScatterNeighbour(RanksBackend):
    class change(Base):
        def reduce_scatter(self, output: Tensor, tensor: Tensor, *rest: Any, **named: Any) -> Work:
            half = tensor.numel() // self.world_size
            if named.get("sizes") is None and half:
                tensor = tensor.view(self.world_size, half).roll(1, 0).reshape(-1)
            return super().reduce_scatter(output, tensor, *rest, **named)  # type: ignore[misc,no-any-return]


class BroadcastFromFirst(RanksBackend):
    class change(Base):
        def broadcast(self, tensor: Tensor, source: int, **named: Any) -> Work:
            return super().broadcast(tensor, min(source, 0), **named)  # type: ignore[misc,no-any-return]


class DoneTooEarly(RanksBackend):
    class change(Base):
        def all_reduce(self, tensor: Tensor, *rest: Any, async_op: bool = False) -> Work:
            work: Work = super().all_reduce(tensor, *rest, async_op=async_op)  # type: ignore[misc]
            if not async_op:
                return work
            self.__dict__.setdefault("kept", []).append(work)
            return DONE


class BarrierIsNothing(RanksBackend):
    class change(Base):
        def barrier(self) -> None:
            return None


class GroupIsWorld(RanksBackend):
    class change(Base):
        def split(self, groups: Sequence[Sequence[int]], *, name: str) -> Communicator:
            super().split(groups, name=name)  # type: ignore[misc]
            return self  # type: ignore[return-value]


class RingTagsSwapped(RanksBackend):
    class change(Base):
        def exchange(self, transfers: Sequence[Transfer], **named: Any) -> Work:
            tags = [t.tag for t in transfers if t.kind == "recv"][::-1]
            swapped = [t._replace(tag=tags.pop(0)) if t.kind == "recv" else t for t in transfers]
            return super().exchange(swapped, **named)  # type: ignore[misc,no-any-return]


class AloneGathersNothing(RanksBackend):
    class change(Base):
        def all_gather(self, output: Tensor, tensor: Tensor, **named: Any) -> Work:
            return DONE


class AloneDividesByTwo(RanksBackend):
    class change(Base):
        def all_reduce(self, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Work:
            if reduction == "avg":
                tensor.div_(2)
            return DONE


class AloneAcceptsMistakes(RanksBackend):
    class change(Base):
        def _check_rank(self, call: str, what: str, rank: int) -> None:
            return None


class GathersBackwards(RanksBackend):
    class change(Base):
        def all_gather(self, output: Tensor, tensor: Tensor, **named: Any) -> Work:
            work: Work = super().all_gather(output, tensor, **named)  # type: ignore[misc]
            if named.get("sizes") is None and not named.get("async_op"):
                parts = output.view(self.world_size, -1).flip(0).reshape(-1)
                output.copy_(parts.view(output.shape))
            return work


class GathersPadded(RanksBackend):
    """Parts of uneven sizes go to where even ones would."""

    class change(Base):
        def all_gather(self, output: Tensor, tensor: Tensor, **named: Any) -> Work:
            work: Work = super().all_gather(output, tensor, **named)  # type: ignore[misc]
            sizes = named.get("sizes")
            if sizes is None or len(set(sizes)) == 1 or named.get("async_op"):
                return work
            whole, start, longest = output.clone(), 0, max(sizes)
            for rank, size in enumerate(sizes):
                room = output.view(-1)[rank * longest :][:size]
                room.copy_(whole.view(-1)[start : start + len(room)])
                start += size
            return work


class ScattersEvenParts(RanksBackend):
    class change(Base):
        def reduce_scatter(self, output: Tensor, tensor: Tensor, *rest: Any, **named: Any) -> Work:
            sizes = named.get("sizes")
            if sizes is not None and len(set(sizes)) > 1 and not named.get("async_op"):
                before = tensor.clone()
                self.all_reduce(before, *rest)
                start = min(self.rank * (tensor.numel() // self.world_size),
                            tensor.numel() - output.numel())  # fmt: skip
                output.copy_(before.view(-1)[start : start + output.numel()].view(output.shape))
                return DONE
            return super().reduce_scatter(output, tensor, *rest, **named)  # type: ignore[misc,no-any-return]


class EmptyPartStaysAway(RanksBackend):
    class change(Base):
        def reduce_scatter(self, output: Tensor, tensor: Tensor, *rest: Any, **named: Any) -> Work:
            if output.numel() == 0:
                return DONE
            return super().reduce_scatter(output, tensor, *rest, **named)  # type: ignore[misc,no-any-return]


class OwnPartForgotten(RanksBackend):
    class change(Base):
        def all_to_all(
            self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], **named: Any
        ) -> Work:
            kept = outputs[self.rank].clone()
            work: Work = super().all_to_all(outputs, inputs, **named)  # type: ignore[misc]
            if not named.get("async_op"):
                outputs[self.rank].copy_(kept)
            return work


class Int64InFloat(RanksBackend):
    """An adapter that has no 64-bit integers casts them."""

    class change(Base):
        def all_reduce(self, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Work:
            if tensor.dtype != torch.int64:
                return super().all_reduce(tensor, reduction, **named)  # type: ignore[misc,no-any-return]
            narrow = tensor.to(torch.float32)
            super().all_reduce(narrow, reduction)  # type: ignore[misc]
            tensor.copy_(narrow)
            return DONE


class BoolSumIsMax(RanksBackend):
    """Claims reductions of bool, and sums them as a maximum."""

    class change(Base):
        @property
        def capabilities(self) -> Capabilities:
            found: Capabilities = super().capabilities  # type: ignore[misc]
            bools = frozenset({torch.bool})
            calls = {c: found.dtypes[c] | bools for c in ("all_reduce", "reduce_scatter")}
            whole: Any = frozenset({"sum", "max", "min"})
            return Capabilities({**found.dtypes, **calls}, {**found.reductions, torch.bool: whole})

        def all_reduce(self, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Work:
            if tensor.dtype != torch.bool:
                return super().all_reduce(tensor, reduction, **named)  # type: ignore[misc,no-any-return]
            wide = tensor.to(torch.uint8)
            super().all_reduce(wide, "max" if reduction == "sum" else reduction)  # type: ignore[misc]
            tensor.copy_(wide)
            return DONE


class MaximumOfMagnitudes(RanksBackend):
    class change(Base):
        def all_reduce(self, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Work:
            if reduction == "max" and tensor.is_floating_point():
                tensor.abs_()
            return super().all_reduce(tensor, reduction, **named)  # type: ignore[misc,no-any-return]


class _Lazy(Work):
    def __init__(self, call: Callable[[], Work]) -> None:
        self.call, self.done = call, False

    def wait(self) -> None:
        if not self.done:
            self.call().wait()
        self.done = True

    def is_done(self) -> bool:
        return self.done


class AsyncReadsLate(RanksBackend):
    """The call begins in wait(): ranks that wait in different orders get each other's."""

    class change(Base):
        def all_reduce(self, tensor: Tensor, *rest: Any, async_op: bool = False) -> Work:
            if not async_op:
                return super().all_reduce(tensor, *rest)  # type: ignore[misc,no-any-return]
            begin = super().all_reduce  # type: ignore[misc]
            return _Lazy(lambda: begin(tensor, *rest))


class GroupInWorldOrder(RanksBackend):
    class change(Base):
        def split(self, groups: Sequence[Sequence[int]], *, name: str) -> Communicator:
            ordered = [sorted(group) for group in groups]
            return super().split(ordered, name=name)  # type: ignore[misc,no-any-return]


class GroupPeersOfTheWorld(RanksBackend):
    """broadcast within a group takes the source for a rank of the world."""

    class change(Base):
        def split(self, groups: Sequence[Sequence[int]], *, name: str) -> Communicator:
            part: Any = super().split(groups, name=name)  # type: ignore[misc]

            class OfWorld(type(part)):  # type: ignore[misc]
                def broadcast(self, tensor: Tensor, source: int, **named: Any) -> Work:
                    at = self.ranks.index(source) if source in self.ranks else source
                    return super().broadcast(tensor, at, **named)  # type: ignore[no-any-return]

            part.__class__ = OfWorld
            return part  # type: ignore[no-any-return]


class AverageOfTheWorld(RanksBackend):
    """avg within a group divides by the ranks of the world."""

    class change(Base):
        def split(self, groups: Sequence[Sequence[int]], *, name: str) -> Communicator:
            part: Any = super().split(groups, name=name)  # type: ignore[misc]
            world = self.world_size

            class ByWorld(type(part)):  # type: ignore[misc]
                def all_reduce(self, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Work:
                    if reduction != "avg":
                        return super().all_reduce(tensor, reduction, **named)  # type: ignore[no-any-return]
                    work: Work = super().all_reduce(tensor, "sum")
                    tensor.div_(world)
                    return work

            part.__class__ = ByWorld
            return part  # type: ignore[no-any-return]


class NothingCounted(RanksBackend):
    class change(Base):
        def _start(self, call: str, payload: Any, work: Work, async_op: bool) -> Work:
            if not async_op:
                work.wait()
            return work


class OpenAfterClose(RanksBackend):
    class change(Base):
        def close(self) -> None:
            super().close()  # type: ignore[misc]
            self.is_closed = False


class CloseBreaksOff(RanksBackend):
    """What was called last is in the device's queue when close() empties it."""

    class change(Base):
        def all_reduce(self, tensor: Tensor, *rest: Any, **named: Any) -> Work:
            self.__dict__["last"] = tensor, tensor.clone()
            return super().all_reduce(tensor, *rest, **named)  # type: ignore[misc,no-any-return]

        def close(self) -> None:
            super().close()  # type: ignore[misc]
            tensor, before = self.__dict__.pop("last", (None, None))
            if tensor is not None:
                tensor.copy_(before)


class AbortIsNothing(RanksBackend):
    class change(Base):
        def abort(self, reason: str) -> None:
            return None


class NobodyCompares(RanksBackend):
    """Ranks do not compare their calls: a mismatched shape hangs, or is read as it comes."""

    def communicator(self, **settings: Any) -> Communicator:
        return super().communicator(**{**settings, "check": "off"})


class WaitsForEver(RanksBackend):
    """The time limit is not handed on, nor the one for signs of life."""

    def communicator(self, **settings: Any) -> Communicator:
        return super().communicator(**{**settings, "timeout_s": 900.0, "heartbeat_s": 900.0})


class LossIsSwallowed(RanksBackend):
    """The status of the library's call is not looked at."""

    class change(Base):
        def all_reduce(self, *args: Any, **named: Any) -> Work:
            try:
                return super().all_reduce(*args, **named)  # type: ignore[misc,no-any-return]
            except CommunicationError:
                return DONE


class ErrorWithoutRanks(RanksBackend):
    """Says that something was lost, not who."""

    class change(Base):
        def all_reduce(self, *args: Any, **named: Any) -> Work:
            try:
                return super().all_reduce(*args, **named)  # type: ignore[misc,no-any-return]
            except CommunicationError as error:
                raise CommunicationError(error.where, "error 6: connection lost") from error


class SumFromOneself(RanksBackend):
    """Each rank adds the others to its own: three and more ranks have three results."""

    class change(Base):
        def all_reduce(self, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Work:
            if reduction != "sum" or tensor.dtype != torch.float32 or self.world_size < 3:
                return super().all_reduce(tensor, reduction, **named)  # type: ignore[misc,no-any-return]
            flat = tensor.view(-1)
            whole = flat.new_empty(self.world_size * flat.numel())
            self.all_gather(whole, flat)
            parts = whole.view(self.world_size, -1).roll(-self.rank, 0)
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            flat.copy_(total)
            return DONE


class CountsRows(RanksBackend):
    """The length of the first dim for the number of elements."""

    class change(Base):
        def all_reduce(self, tensor: Tensor, *rest: Any, **named: Any) -> Work:
            count = len(tensor) if tensor.dim() else 1
            part = tensor.view(-1)[:count]
            return super().all_reduce(part, *rest, **named)  # type: ignore[misc,no-any-return]


class NoScalars(RanksBackend):
    """A tensor of no dims has no elements, for len()."""

    class change(Base):
        def broadcast(self, tensor: Tensor, source: int, **named: Any) -> Work:
            if not tensor.dim():
                return DONE
            return super().broadcast(tensor, source, **named)  # type: ignore[misc,no-any-return]


class BroadcastBySum(RanksBackend):
    """The others add zeros: right but for the sign of zero."""

    class change(Base):
        def broadcast(self, tensor: Tensor, source: int, **named: Any) -> Work:
            if not tensor.is_floating_point():
                return super().broadcast(tensor, source, **named)  # type: ignore[misc,no-any-return]
            if self.rank != source:
                tensor.zero_()
            return super().all_reduce(tensor, "sum", **named)  # type: ignore[misc,no-any-return]


class GatherByBytesOfFloat(RanksBackend):
    """Everything is gathered as float32: wide integers lose digits."""

    class change(Base):
        def all_gather(self, output: Tensor, tensor: Tensor, **named: Any) -> Work:
            if tensor.dtype != torch.int64:
                return super().all_gather(output, tensor, **named)  # type: ignore[misc,no-any-return]
            narrow = output.to(torch.float32)
            named["async_op"] = False
            super().all_gather(narrow, tensor.to(torch.float32), **named)  # type: ignore[misc]
            output.copy_(narrow)
            return DONE


class ErrorIsRuntimeError(RanksBackend):
    class change(Base):
        def all_reduce(self, *args: Any, **named: Any) -> Work:
            try:
                return super().all_reduce(*args, **named)  # type: ignore[misc,no-any-return]
            except CommunicationError as error:
                raise RuntimeError(str(error)) from None


class NanLost(RanksBackend):
    class change(Base):
        def all_reduce(self, tensor: Tensor, *rest: Any, **named: Any) -> Work:
            if tensor.is_floating_point():
                tensor.copy_(torch.where(tensor.isnan(), 0.0, tensor))
            return super().all_reduce(tensor, *rest, **named)  # type: ignore[misc,no-any-return]


class InfiniteIsLargest(RanksBackend):
    class change(Base):
        def all_reduce(self, tensor: Tensor, *rest: Any, **named: Any) -> Work:
            if tensor.is_floating_point():
                tensor.clamp_(-torch.finfo(tensor.dtype).max, torch.finfo(tensor.dtype).max)
            return super().all_reduce(tensor, *rest, **named)  # type: ignore[misc,no-any-return]


class LastPieceForgotten(RanksBackend):
    """Of what goes in pieces of a MiB."""

    class change(Base):
        def all_reduce(self, tensor: Tensor, *rest: Any, **named: Any) -> Work:
            piece = (1 << 20) // tensor.element_size()
            if tensor.numel() > piece:
                tensor = tensor.view(-1)[: tensor.numel() // piece * piece]
            return super().all_reduce(tensor, *rest, **named)  # type: ignore[misc,no-any-return]


class LastComesFirst(RanksBackend):
    class change(Base):
        def exchange(self, transfers: Sequence[Transfer], **named: Any) -> Work:
            rooms: dict[Any, list[Transfer]] = {}
            for t in transfers:
                rooms.setdefault((t.kind, t.peer, t.tag), []).append(t)
            turned = [rooms[t.kind, t.peer, t.tag].pop() if t.kind == "recv" else t
                      for t in transfers]  # fmt: skip
            return super().exchange(turned, **named)  # type: ignore[misc,no-any-return]


class TagOfThreeBits(RanksBackend):
    class change(Base):
        def exchange(self, transfers: Sequence[Transfer], **named: Any) -> Work:
            short = [t._replace(tag=t.tag & 7) for t in transfers]
            return super().exchange(short, **named)  # type: ignore[misc,no-any-return]


TOGETHER = " or ".join(
    f"collectives/2/{name}"
    for name in (
        "all_reduce/fp32", "reduce_scatter/fp32", "broadcast/fp32", "send/fp32", "early",
        "barrier", "groups",
    )
)  # fmt: skip
"""One selection for all, so that one run of the twin is enough."""
GATHER = "collectives/2/all_gather/fp32"
LARGE = "collectives/2/large or collectives/2/not-finite"
RULED = "collectives/2/abort or collectives/2/close or collectives/2/traffic"


def wrong(name: str, bug: str, made: type[RanksBackend], select: str = TOGETHER) -> Wrong:
    return Wrong(
        name=name, bug=bug, chapter="collectives", make=made, select=select, twin=RanksBackend
    )


CATALOGUE: tuple[Wrong, ...] = (
    wrong("all-reduce-averages", "another reduction", AllReduceAverages),
    wrong("all-reduce-in-bf16", "lower precision on the wire", AllReduceInBfloat16),
    wrong("reduce-scatter-neighbour", "the neighbour's part", ReduceScatterNeighbour),
    wrong("broadcast-from-first", "an argument without effect", BroadcastFromFirst),
    wrong("work-done-too-early", "completes too early", DoneTooEarly),
    wrong("barrier-is-nothing", "missing wait", BarrierIsNothing),
    wrong("group-is-world", "scope of a group ignored", GroupIsWorld),
    wrong("ring-tags-swapped", "messages mixed up", RingTagsSwapped),
    wrong("alone-gathers-nothing", "a special case forgotten", AloneGathersNothing,
          "collectives/1"),
    wrong("alone-divides-by-two", "wrong number of ranks", AloneDividesByTwo, "collectives/1"),
    wrong("alone-accepts-mistakes", "missing check of an argument", AloneAcceptsMistakes,
          "collectives/1"),
    wrong("all-gather-backwards", "order of ranks", GathersBackwards, GATHER),
    wrong("all-gather-padded", "padding computed", GathersPadded, GATHER),
    wrong("reduce-scatter-of-even-parts", "an argument without effect", ScattersEvenParts),
    wrong("empty-part-stays-away", "nothing to do is not nothing to say", EmptyPartStaysAway),
    wrong("own-part-forgotten",
          "a special case forgotten", OwnPartForgotten, "collectives/2/all_to_all/fp32"),
    wrong("int64-cast-to-float",
          "unsupported dtype silently cast", Int64InFloat, "collectives/2/all_reduce/int64"),
    wrong("bool-sum-is-max",
          "max instead of sum for bool", BoolSumIsMax, "collectives/2/all_reduce/bool"),
    wrong("maximum-of-magnitudes", "sign lost", MaximumOfMagnitudes),
    wrong("async-begins-in-wait",
          "a call that begins too late", AsyncReadsLate, "collectives/2/order"),
    wrong("group-in-world-order", "order of ranks", GroupInWorldOrder),
    wrong("group-peers-of-the-world",
          "rank of the group for rank of the world", GroupPeersOfTheWorld),
    wrong("average-of-the-world", "wrong number of ranks", AverageOfTheWorld),
    wrong("traffic-not-counted", "a statistic that stays 0", NothingCounted, RULED),
    wrong("open-after-close", "state that is not kept", OpenAfterClose, RULED),
    wrong("close-breaks-off", "what was called is dropped", CloseBreaksOff, RULED),
    wrong("abort-is-nothing", "a quiet no-op", AbortIsNothing, RULED),
    wrong("calls-not-compared", "mismatched-shape hang", NobodyCompares, "collectives/2/disagree"),
    wrong("time-limit-not-kept",
          "missing rank: waits for ever", WaitsForEver, "collectives/2/absent/all_reduce"),
    wrong("dead-rank-not-noticed",
          "dead rank: an error that nobody sees", LossIsSwallowed, "collectives/2/killed"),
    wrong("lost-rank-not-named",
          "an error that tells nothing", ErrorWithoutRanks, "collectives/2/absent/all_reduce"),
    wrong("rows-for-elements", "length of a dim for the number of elements", CountsRows,
          "collectives/2/shapes"),
    wrong("no-scalars", "a special case forgotten", NoScalars, "collectives/2/shapes"),
    wrong("broadcast-by-sum", "sign of zero", BroadcastBySum),
    wrong("gathered-as-float", "unsupported dtype silently cast", GatherByBytesOfFloat,
          "collectives/2/all_gather/int64"),
    wrong("nan-of-a-rank-is-lost", "Inf or NaN lost", NanLost, LARGE),
    wrong("infinite-is-the-largest", "Inf or NaN lost", InfiniteIsLargest, LARGE),
    wrong("last-piece-forgotten", "dropped tail", LastPieceForgotten, LARGE),
    wrong("last-message-comes-first", "messages mixed up", LastComesFirst),
    wrong("tag-of-three-bits", "overflow of an index", TagOfThreeBits, "collectives/2/order"),
    replace(
        wrong("sum-begins-with-oneself", "order of a sum", SumFromOneself,
              "collectives/4/all_reduce/fp32"),
        level="full",
    ),
    wrong("communication-error-is-bare",
          "wrong type of an error", ErrorIsRuntimeError, "collectives/2/disagree"),
)  # fmt: skip
