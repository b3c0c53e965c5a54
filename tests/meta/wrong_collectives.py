"""Wrong backends that the collectives chapter has to find.

Ranks are processes that import these backends by name, and mix the change into the communicator.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from anychip.contract import Capabilities, CommunicationError, Communicator, Transfer, Work
from anychip.contract.communicator import DONE
from tests.meta.honest import HonestBackend
from tests.meta.wrong import Call, Wrong, with_method

Base: Any = Communicator
"""Of the changes, which are mixed into whatever communicator the job has."""


def changed(comm: Communicator, change: type) -> Communicator:
    """A communicator of whatever class, with a change mixed in."""
    if change not in type(comm).__mro__:
        comm.__class__ = type(change.__name__, (change, type(comm)), {})
    return comm


class RanksBackend(HonestBackend):
    """Honest; its communicator is changed by ``change``, and its groups' by ``group_change``."""

    change: ClassVar[type] = type("Nothing", (Base,), {})
    group_change: ClassVar[type | None] = None

    def communicator(self, **settings: Any) -> Communicator:
        comm, inside = changed(super().communicator(**settings), self.change), self.group_change
        if inside is None:
            return comm

        def split(_: Any, right: Call, groups: Any, *, name: str) -> Communicator:
            return changed(right(groups, name=name), inside)

        return changed(comm, with_method(self.change, "split", split))


TOGETHER = """2/all_reduce/fp32 2/reduce_scatter/fp32 2/broadcast/fp32 2/send/fp32 2/early 2/barrier
    2/groups"""
"""One selection for all, so that one run of the twin is enough."""
GATHER = "2/all_gather/fp32"
LARGE = "2/large 2/all_reduce/fp32"
RULED = "2/abort 2/close 2/broadcast/fp32"
CATALOGUE: list[Wrong] = []


def wrong_backend(
    name: str, bug: str, select: str = TOGETHER, **options: Any
) -> Callable[[Any], None]:
    """Decorator of a backend, which processes find under the entry's name in its module.

    Args:
        select: ids of cases, or what they begin with, without the chapter.
    """

    def wrap(made: Any) -> None:
        module = vars(sys.modules[made.__module__])
        made.__qualname__, module[name] = name, made
        chosen = " or ".join(f"collectives/{id}" for id in select.split())
        module["CATALOGUE"].append(
            Wrong(name=name, bug=bug, chapter="collectives", make=made, select=chosen,
                  twin=RanksBackend, **options)
        )  # fmt: skip

    return wrap


def wrong(
    name: str, bug: str, method: str, select: str = TOGETHER, *, of: str = "change", **options: Any
) -> Callable[[Call], None]:
    """Decorator: ``change(comm, right, *args)`` in place of a communicator's method.

    Args:
        of: ``change``, the communicator of all, or ``group_change``, those of groups.
    """

    def wrap(change: Call) -> None:
        parts = {of: with_method(Base, method, change), "__module__": change.__module__}
        wrong_backend(name, bug, select, **options)(type(name, (RanksBackend,), parts))

    return wrap


@wrong("all-reduce-averages", "another reduction", "all_reduce")
def _(self: Any, right: Call, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Any:
    wrong = "avg" if tensor.is_floating_point() and reduction == "sum" else reduction
    return right(tensor, wrong, **named)


def _by_way_of(narrow: torch.dtype, wide: torch.dtype) -> Call:
    """Sums of a dtype are those of what it is cast to."""

    def cast(_: Any, right: Call, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Any:
        if tensor.dtype != wide or named.get("async_op"):
            return right(tensor, reduction, **named)
        given = tensor.to(narrow)
        right(given, reduction)
        tensor.copy_(given)
        return DONE

    return cast


wrong("all-reduce-in-bf16", "lower precision on the wire", "all_reduce")(
    _by_way_of(torch.bfloat16, torch.float32)
)


@wrong("reduce-scatter-neighbour", "the neighbour's part", "reduce_scatter")
def _(self: Any, right: Call, output: Tensor, tensor: Tensor, *rest: Any, **named: Any) -> Any:
    half = tensor.numel() // self.world_size
    if named.get("sizes") is None and half:
        tensor = tensor.view(self.world_size, half).roll(1, 0).reshape(-1)
    return right(output, tensor, *rest, **named)


@wrong("broadcast-from-first", "an argument without effect", "broadcast")
def _(self: Any, right: Call, tensor: Tensor, source: int, **named: Any) -> Any:
    return right(tensor, min(source, 0), **named)


@wrong("work-done-too-early", "completes too early", "all_reduce")
def _(self: Any, right: Call, tensor: Tensor, *rest: Any, async_op: bool = False) -> Any:
    work: Work = right(tensor, *rest, async_op=async_op)
    if not async_op:
        return work
    self.__dict__.setdefault("kept", []).append(work)
    return DONE


@wrong("barrier-is-nothing", "missing wait", "barrier")
def _(self: Any, right: Call) -> Any:
    return None


@wrong("group-is-world", "scope of a group ignored", "split")
def _(self: Any, right: Call, groups: Sequence[Sequence[int]], *, name: str) -> Any:
    right(groups, name=name)
    return self


@wrong("ring-tags-swapped", "messages mixed up", "exchange")
def _(self: Any, right: Call, transfers: Sequence[Transfer], **named: Any) -> Any:
    tags = [t.tag for t in transfers if t.kind == "recv"][::-1]
    swapped = [t._replace(tag=tags.pop(0)) if t.kind == "recv" else t for t in transfers]
    return right(swapped, **named)


@wrong("alone-gathers-nothing", "a special case forgotten", "all_gather", "1")
def _(self: Any, right: Call, output: Tensor, tensor: Tensor, **named: Any) -> Any:
    return DONE


@wrong("alone-divides-by-two", "wrong number of ranks", "all_reduce", "1")
def _(self: Any, right: Call, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Any:
    if reduction == "avg":
        tensor.div_(2)
    return DONE


@wrong("alone-accepts-mistakes", "missing check of an argument", "_check_rank", "1")
def _(self: Any, right: Call, call: str, what: str, rank: int) -> Any:
    return None


@wrong("all-gather-backwards", "order of ranks", "all_gather", GATHER)
def _(self: Any, right: Call, output: Tensor, tensor: Tensor, **named: Any) -> Any:
    work: Work = right(output, tensor, **named)
    if named.get("sizes") is None and not named.get("async_op"):
        parts = output.view(self.world_size, -1).flip(0).reshape(-1)
        output.copy_(parts.view(output.shape))
    return work


@wrong("all-gather-padded", "padding computed", "all_gather", GATHER)
def _(self: Any, right: Call, output: Tensor, tensor: Tensor, **named: Any) -> Any:
    """Parts of uneven sizes go to where even ones would."""
    work: Work = right(output, tensor, **named)
    sizes = named.get("sizes")
    if sizes is None or len(set(sizes)) == 1 or named.get("async_op"):
        return work
    whole, start, longest = output.clone(), 0, max(sizes)
    for rank, size in enumerate(sizes):
        room = output.view(-1)[rank * longest :][:size]
        room.copy_(whole.view(-1)[start : start + len(room)])
        start += size
    return work


@wrong("reduce-scatter-of-even-parts", "an argument without effect", "reduce_scatter")
def _(self: Any, right: Call, output: Tensor, tensor: Tensor, *rest: Any, **named: Any) -> Any:
    sizes = named.get("sizes")
    if sizes is not None and len(set(sizes)) > 1 and not named.get("async_op"):
        before = tensor.clone()
        self.all_reduce(before, *rest)
        start = min(self.rank * (tensor.numel() // self.world_size),
                    tensor.numel() - output.numel())  # fmt: skip
        output.copy_(before.view(-1)[start : start + output.numel()].view(output.shape))
        return DONE
    return right(output, tensor, *rest, **named)


@wrong("empty-part-stays-away", "nothing to do is not nothing to say", "reduce_scatter")
def _(self: Any, right: Call, output: Tensor, tensor: Tensor, *rest: Any, **named: Any) -> Any:
    if output.numel() == 0:
        return DONE
    return right(output, tensor, *rest, **named)


@wrong("own-part-forgotten", "a special case forgotten", "all_to_all", "2/all_to_all/fp32")
def _(
    self: Any, right: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor], **named: Any
) -> Any:
    kept = outputs[self.rank].clone()
    work: Work = right(outputs, inputs, **named)
    if not named.get("async_op"):
        outputs[self.rank].copy_(kept)
    return work


# An adapter that has no 64-bit integers casts them.
wrong("int64-cast-to-float", "unsupported dtype silently cast", "all_reduce", "2/all_reduce/int64")(
    _by_way_of(torch.float32, torch.int64)
)


@wrong_backend("bool-sum-is-max", "max instead of sum for bool", select="2/all_reduce/bool")
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


@wrong("maximum-of-magnitudes", "sign lost", "all_reduce")
def _(self: Any, right: Call, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Any:
    if reduction == "max" and tensor.is_floating_point():
        tensor.abs_()
    return right(tensor, reduction, **named)


class _Lazy(Work):
    def __init__(self, call: Callable[[], Work]) -> None:
        self.call, self.done = call, False

    def wait(self) -> None:
        if not self.done:
            self.call().wait()
        self.done = True

    def is_done(self) -> bool:
        return self.done


@wrong("async-begins-in-wait", "a call that begins too late", "all_reduce", "2/under-way")
def _(self: Any, right: Call, tensor: Tensor, *rest: Any, async_op: bool = False) -> Any:
    """The call begins in wait(): ranks that wait in different orders get each other's."""
    if not async_op:
        return right(tensor, *rest)
    begin = right
    return _Lazy(lambda: begin(tensor, *rest))


@wrong("group-in-world-order", "order of ranks", "split")
def _(self: Any, right: Call, groups: Sequence[Sequence[int]], *, name: str) -> Any:
    ordered = [sorted(group) for group in groups]
    return right(ordered, name=name)


@wrong("group-peers-of-the-world", "rank of the group for rank of the world", "split")
def _(self: Any, right: Call, groups: Sequence[Sequence[int]], *, name: str) -> Any:
    """broadcast within a group takes the source for a rank of the world."""
    part: Any = right(groups, name=name)

    def broadcast(group: Any, right: Call, tensor: Tensor, source: int, **named: Any) -> Any:
        at = group.ranks.index(source) if source in group.ranks else source
        return right(tensor, at, **named)

    part.__class__ = with_method(type(part), "broadcast", broadcast)
    return part


@wrong("average-of-the-world", "wrong number of ranks", "split")
def _(self: Any, right: Call, groups: Sequence[Sequence[int]], *, name: str) -> Any:
    """avg within a group divides by the ranks of the world."""
    part: Any = right(groups, name=name)

    def all_reduce(
        _: Any, right: Call, tensor: Tensor, reduction: Any = "sum", **named: Any
    ) -> Any:
        if reduction != "avg":
            return right(tensor, reduction, **named)
        work: Work = right(tensor, "sum")
        tensor.div_(self.world_size)
        return work

    part.__class__ = with_method(type(part), "all_reduce", all_reduce)
    return part


@wrong("traffic-not-counted", "a statistic that stays 0", "_start", RULED)
def _(self: Any, right: Call, call: str, payload: Any, work: Work, async_op: bool) -> Any:
    if not async_op:
        work.wait()
    return work


@wrong("open-after-close", "state that is not kept", "close", RULED)
def _(self: Any, right: Call) -> Any:
    right()
    self.is_closed = False


@wrong_backend("close-breaks-off", "what was called is dropped", select=RULED)
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


@wrong("abort-is-nothing", "a quiet no-op", "abort", RULED)
def _(self: Any, right: Call, reason: str) -> Any:
    return None


@wrong_backend("calls-not-compared", "mismatched-shape hang", select="2/disagree")
class NobodyCompares(RanksBackend):
    """Ranks do not compare their calls: a mismatched shape hangs, or is read as it comes."""

    def communicator(self, **settings: Any) -> Communicator:
        return super().communicator(**{**settings, "check": "off"})


@wrong_backend("time-limit-not-kept", "missing rank: waits for ever", select="3/absent/all_reduce")
class WaitsForEver(RanksBackend):
    """The time limit is not handed on, nor the one for signs of life."""

    def communicator(self, **settings: Any) -> Communicator:
        return super().communicator(**{**settings, "timeout_s": 900.0, "heartbeat_s": 900.0})


@wrong("dead-rank-not-noticed", "dead rank: an error that nobody sees", "all_reduce", "3/killed")
def _(self: Any, right: Call, *args: Any, **named: Any) -> Any:
    """The status of the library's call is not looked at."""
    try:
        return right(*args, **named)
    except CommunicationError:
        return DONE


@wrong("lost-rank-not-named", "an error that tells nothing", "all_reduce", "3/absent/all_reduce")
def _(self: Any, right: Call, *args: Any, **named: Any) -> Any:
    """Says that something was lost, not who."""
    try:
        return right(*args, **named)
    except CommunicationError as error:
        raise CommunicationError(error.where, "error 6: connection lost") from error


@wrong("sum-begins-with-oneself", "order of a sum", "all_reduce", "3/all_reduce/fp32")
def _(self: Any, right: Call, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Any:
    """Each rank adds the others to its own: three and more ranks have three results."""
    if reduction != "sum" or tensor.dtype != torch.float32 or self.world_size < 3:
        return right(tensor, reduction, **named)
    flat = tensor.view(-1)
    whole = flat.new_empty(self.world_size * flat.numel())
    self.all_gather(whole, flat)
    parts = whole.view(self.world_size, -1).roll(-self.rank, 0)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    flat.copy_(total)
    return DONE


@wrong("rows-for-elements", "length of a dim for the number of elements", "all_reduce", "2/shapes")
def _(self: Any, right: Call, tensor: Tensor, *rest: Any, **named: Any) -> Any:
    """The length of the first dim for the number of elements."""
    count = len(tensor) if tensor.dim() else 1
    part = tensor.view(-1)[:count]
    return right(part, *rest, **named)


@wrong("no-scalars", "a special case forgotten", "broadcast", "2/shapes")
def _(self: Any, right: Call, tensor: Tensor, source: int, **named: Any) -> Any:
    """A tensor of no dims has no elements, for len()."""
    if not tensor.dim():
        return DONE
    return right(tensor, source, **named)


@wrong("broadcast-by-sum", "sign of zero", "broadcast")
def _(self: Any, right: Call, tensor: Tensor, source: int, **named: Any) -> Any:
    """The others add zeros: right but for the sign of zero."""
    if not tensor.is_floating_point():
        return right(tensor, source, **named)
    if self.rank != source:
        tensor.zero_()
    return self.all_reduce(tensor, "sum", **named)


@wrong("gathered-as-float", "unsupported dtype silently cast", "all_gather", "2/all_gather/int64")
def _(self: Any, right: Call, output: Tensor, tensor: Tensor, **named: Any) -> Any:
    """Everything is gathered as float32: wide integers lose digits."""
    if tensor.dtype != torch.int64:
        return right(output, tensor, **named)
    narrow = output.to(torch.float32)
    named["async_op"] = False
    right(narrow, tensor.to(torch.float32), **named)
    output.copy_(narrow)
    return DONE


@wrong("communication-error-is-bare", "wrong type of an error", "all_reduce", "2/disagree")
def _(self: Any, right: Call, *args: Any, **named: Any) -> Any:
    try:
        return right(*args, **named)
    except CommunicationError as error:
        raise RuntimeError(str(error)) from None


@wrong("nan-of-a-rank-is-lost", "Inf or NaN lost", "all_reduce", LARGE)
def _(self: Any, right: Call, tensor: Tensor, *rest: Any, **named: Any) -> Any:
    if tensor.is_floating_point():
        tensor.copy_(torch.where(tensor.isnan(), 0.0, tensor))
    return right(tensor, *rest, **named)


@wrong("infinite-is-the-largest", "Inf or NaN lost", "all_reduce", LARGE)
def _(self: Any, right: Call, tensor: Tensor, *rest: Any, **named: Any) -> Any:
    if tensor.is_floating_point():
        tensor.clamp_(-torch.finfo(tensor.dtype).max, torch.finfo(tensor.dtype).max)
    return right(tensor, *rest, **named)


@wrong("last-piece-forgotten", "dropped tail", "all_reduce", LARGE)
def _(self: Any, right: Call, tensor: Tensor, *rest: Any, **named: Any) -> Any:
    """Of what goes in pieces of a MiB."""
    piece = (1 << 20) // tensor.element_size()
    if tensor.numel() > piece:
        tensor = tensor.view(-1)[: tensor.numel() // piece * piece]
    return right(tensor, *rest, **named)


@wrong("last-message-comes-first", "messages mixed up", "exchange")
def _(self: Any, right: Call, transfers: Sequence[Transfer], **named: Any) -> Any:
    rooms: dict[Any, list[Transfer]] = {}
    for t in transfers:
        rooms.setdefault((t.kind, t.peer, t.tag), []).append(t)
    turned = [rooms[t.kind, t.peer, t.tag].pop() if t.kind == "recv" else t
              for t in transfers]  # fmt: skip
    return right(turned, **named)


@wrong("tag-of-three-bits", "overflow of an index", "exchange", "2/order")
def _(self: Any, right: Call, transfers: Sequence[Transfer], **named: Any) -> Any:
    short = [t._replace(tag=t.tag & 7) for t in transfers]
    return right(short, **named)


@wrong("tags-mixed-up-by-16", "overflow of an index", "exchange", "2/order")
def _(self: Any, right: Call, transfers: Sequence[Transfer], **named: Any) -> Any:
    return right([t._replace(tag=t.tag & 15) if t.tag < 1 << 15 else t for t in transfers], **named)


@wrong("nothing-behind-an-empty-part", "size of 0", "all_to_all", "3/all_to_all/fp32")
def _(self: Any, right: Call, outputs: Sequence[Tensor], *given: Any, **named: Any) -> Any:
    right(outputs, *given, **{**named, "async_op": False})
    for number, output in enumerate(outputs):
        if not all(each.numel() for each in outputs[:number]):
            output.zero_()
    return DONE


@wrong("own-sign-of-zero", "ranks with other bits", "all_reduce", "2/all_reduce/fp32")
def _(self: Any, right: Call, tensor: Tensor, *rest: Any, **named: Any) -> Any:
    own = tensor.clone()
    right(tensor, *rest, **{**named, "async_op": False})
    tensor.copy_(torch.where((own == 0) & (tensor == 0), own, tensor))
    return DONE


@wrong("one-group-of-a-name", "cache by a name", "split", "4/groups")
def _(self: Any, right: Call, groups: Any, *, name: str) -> Communicator:
    found: Communicator = vars(self).setdefault("named", {}).get(name) or right(groups, name=name)
    self.named[name] = found
    return found


@wrong("counted-by-all-groups", "state of another", "split", "4/groups")
def _(self: Any, right: Call, groups: Any, *, name: str) -> Communicator:
    part: Communicator = right(groups, name=name)
    part.traffic = self.traffic if part.world_size == self.world_size else part.traffic
    return part


@wrong("begins-anew-behind-nan", "Inf or NaN lost", "all_reduce", "3/all_reduce/fp32")
def _(self: Any, right: Call, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Any:
    if reduction not in ("max", "min") or not tensor.is_floating_point() or self.world_size < 3:
        return right(tensor, reduction, **named)
    parts = tensor.new_empty(self.world_size * tensor.numel())
    self.all_gather(parts, tensor)
    total, *rest = parts.view(self.world_size, *tensor.shape)
    for part in rest:
        total = torch.where(total > part if reduction == "max" else total < part, total, part)
    tensor.copy_(total)
    return DONE


@wrong("dense-is-contiguous", "missing check of an argument", "broadcast", "1/mistakes")
def _(self: Any, right: Call, tensor: Tensor, *rest: Any, **named: Any) -> Any:
    is_dense = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return right(tensor.permute(0, 2, 3, 1) if is_dense else tensor, *rest, **named)


@wrong("smallest-message-first", "messages mixed up", "exchange", "2/order")
def _(self: Any, right: Call, transfers: Sequence[Transfer], **named: Any) -> Any:
    return right(sorted(transfers, key=lambda t: t.tensor.nbytes * (t.kind == "send")), **named)


@wrong("same-storage-is-in-place", "taken for another case", "all_gather", GATHER)
def _(self: Any, right: Call, output: Tensor, tensor: Tensor, *, sizes: Any = None,
      **named: Any) -> Any:  # fmt: skip
    count, storages = tensor.numel(), {t.untyped_storage().data_ptr() for t in (output, tensor)}
    begin = sum(sizes[: self.rank]) if sizes else self.rank * count
    own = output[begin : begin + count] if count and len(storages) == 1 else tensor
    return right(output, own, sizes=sizes, **named)


@wrong("sent-by-address", "parts mixed up", "all_to_all", "2/all_to_all/fp32")
def _(self: Any, right: Call, outputs: Any, inputs: Any, **named: Any) -> Any:
    ordered = sorted(inputs, key=Tensor.data_ptr)
    fills = all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(ordered))
    is_one = fills and len({t.numel() for t in inputs}) == 1
    return right(outputs, ordered if is_one else inputs, **named)


@wrong("shape-is-numel", "missing check of an argument", "all_reduce", "2/disagree/order_of_dims")
def _(self: Any, right: Call, tensor: Tensor, *rest: Any, **named: Any) -> Any:
    return right(tensor.view(-1) if tensor.is_contiguous() else tensor, *rest, **named)


@wrong("average-by-each-rank", "missing check of an argument", "all_reduce", "3/disagree/average")
def _(self: Any, right: Call, tensor: Tensor, reduction: Any = "sum", **named: Any) -> Any:
    if reduction != "avg" or not tensor.is_floating_point():
        return right(tensor, reduction, **named)
    right(tensor, "sum")
    tensor.div_(self.world_size)
    return DONE
