"""What a rank is asked about its backend's collectives: calls, whose results it checks itself.

Every rank makes the inputs of all ranks, so that each knows what has to come out
(:mod:`.rank_trials`). Outputs are poisoned before and stand between guard elements; tensors are
written over as soon as a call has been waited for, since they are their owner's again; bits go to
the asker, who compares them between the ranks; every trial also looks at what was counted. Rules
are asked by :mod:`.rank_rules`, and what goes wrong between ranks by :mod:`.rank_failures`. These
functions run in the processes of :mod:`.ranks`.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from anychip.conformance.case import check, check_equal_bits, expect_error
from anychip.conformance.covering import covering_array
from anychip.conformance.rank_trials import CUTS, Trial, check_joined, cut, digest, finish
from anychip.contract import (
    REDUCTIONS,
    Backend,
    Communicator,
    Reduction,
    Transfer,
    UnsupportedError,
    Work,
)

NAMES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
OFTEN = 12
"""So often the first of many ways to make a call is taken."""
LATE_S = 0.004
"""So much later comes a rank that is late: the others have come, and wait."""
SPLITS = {"columns": [[0, 2], [1, 3]], "rows": [[0, 1], [2, 3]], "triple": [[1, 2, 3], [0]]}
"""Of four ranks: groups at the same time, of which not all begin with rank 0 nor are neighbours.

Made in this order: a library that counts its connections finds ranks apart once one was alone.
"""


@dataclass
class RankJob:
    """This process's part.

    Attributes:
        store: for words between ranks that no communicator carries.
        groups: the communicator's, by the names of :data:`SPLITS`.
    """

    backend: Backend
    rank: int
    world_size: int
    store: Any = None
    found: Communicator | None = None
    groups: dict[str, Communicator] = field(default_factory=dict)

    def communicator(self, timeout_s: float = 30.0) -> Communicator:
        """The backend's; a new one after a failure, or when another time limit is asked for."""
        known = self.found
        if known is not None and (known.is_closed or known.timeout_s != timeout_s):
            known.close()
            known = None
        if known is None:
            known = self.backend.communicator(timeout_s=timeout_s, heartbeat_s=timeout_s)
            self.groups = {}
        self.found = known
        return known

    def group(self, where: str) -> Communicator:
        """The communicator of all, for ``world``, this rank's part of a split, or all again."""
        comm = self.communicator()
        if where == "world":
            return comm
        splits = SPLITS if where in SPLITS else {where: [[*range(self.world_size)]]}
        for name, groups in splits.items():
            if where not in self.groups and name not in self.groups:
                self.groups[name] = split(comm, groups, name)
        return self.groups[where]

    def wait_for(self, word: str) -> None:
        """Returns when another rank has said a word."""
        self.store.wait([word], timedelta(seconds=30))

    def say(self, word: str) -> None:
        """Says a word, once and for all; from now on every rank that looks for it finds it."""
        self.store.set(word, "1")
        self.wait_for(word)  # what was sent need not be there: another rank's question may be first


def split(comm: Communicator, groups: Sequence[Sequence[int]], name: str) -> Communicator:
    """Splits, and checks who is in the group."""
    part = comm.split(groups, name=name)
    members = next(group for group in groups if comm.rank in group)
    found = (part.name, tuple(part.ranks), part.rank, part.world_size)
    want = (name, tuple(members), members.index(comm.rank), len(members))
    check(found == want, f"split into {groups}: (name, ranks, rank, size) {want}, got {found}")
    return part


class Way(NamedTuple):
    """How a call is made in one trial.

    Attributes:
        numel: elements, of all ranks together where each has a part.
        late: the rank that comes after the others; beyond the last: none.
        shift: elements by which tensors begin beyond an aligned address.
        is_rare: rare numbers, or for what only moves any bits.
        cut: how parts are cut, see :func:`.rank_trials.cut`; messages are alike if it is ``near``.
        lying: how inputs and outputs lie: each by itself, the rank's own part of the whole in its
            place, or in one storage, where what comes first lies last.
        ending: ``at once`` is not asynchronous; ``waited`` and ``polled`` are.
        is_single: messages are sent and received one by one, not in one call.
    """

    numel: int = 257
    ending: str = "at once"
    late: int = 99
    shift: int = 0
    is_rare: bool = True
    reduction: Reduction = "sum"
    source: int = 0
    cut: str = "even"
    lying: Literal["apart", "in place", "in one storage"] = "apart"
    is_single: bool = False

    @property
    def async_op(self) -> bool:
        """Whether the call returns before it is done."""
        return self.ending != "at once"


class Expected(NamedTuple):
    """What has to stand in a tensor: bits, or the reduction of the ranks' parts.

    Attributes:
        is_shared: all ranks have the same.
    """

    tensor: Tensor
    want: Tensor | Sequence[Tensor]
    reduction: Reduction = "sum"
    is_shared: bool = False
    name: str = ""


class Planned(NamedTuple):
    """A call that is ready to be made.

    Attributes:
        begin: makes it.
        traffic: calls and bytes that it counts, by name of the call.
    """

    begin: Callable[[], Work]
    expected: Sequence[Expected]
    traffic: Mapping[str, tuple[int, int]]


Plan = Callable[[Trial, Way], Planned]


def options(call: str, comm: Communicator, dtype: torch.dtype) -> dict[str, Sequence[Any]]:
    """What may be chosen of a :class:`Way`; sizes leave every remainder, and fill pieces."""
    world = comm.world_size
    sizes = (257, 0, 1, world - 1, world, world + 1, 7, 1021, 256 * world, 65537)
    found: dict[str, Sequence[Any]] = {
        "numel": list(dict.fromkeys(sizes)),
        "ending": ("at once", "waited", "polled"),
        "late": list(dict.fromkeys((99, 0, world // 2, world - 1))),
        "shift": (0, 1, 3),
        "is_rare": (True, False),
    }
    if call in ("all_reduce", "reduce_scatter"):
        found["reduction"] = list(supported(comm, call, dtype))
    if call in ("all_gather", "reduce_scatter"):
        found |= {"cut": CUTS, "lying": ("apart", "in place", "in one storage")}
    if call in ("all_to_all", "send"):
        found["cut"] = ("even", "near")
    if call == "all_to_all":
        found["lying"] = ("apart", "in one storage")
    if call in ("broadcast", "send"):
        found["source"] = range(world)
    if call == "send":
        found["is_single"] = (False, True)
    return found


def ways(
    call: str, comm: Communicator, dtype: torch.dtype, share: Sequence[int] = (0, 1)
) -> Iterator[Way]:
    """Ways in which any two choices meet; another world and dtype has other threes of them.

    Args:
        share: the first of the ways, and the step to the next.
    """
    found = options(call, comm, dtype)
    rows = covering_array([len(values) for values in found.values()], strength=2).tolist()
    turn = zlib.crc32(f"{dtype}{comm.ranks}".encode())
    for row in rows[share[0] % share[1] :: share[1]]:
        chosen = {
            name: values[(at + (turn >> 4 * place)) % len(values)]
            for place, ((name, values), at) in enumerate(zip(found.items(), row, strict=True))
        }
        is_whole = "lying" in chosen and call != "all_to_all"  # its parts make one tensor
        if is_whole and chosen["cut"] == "even":  # few of the sizes are, and it is called most
            chosen["numel"] += -chosen["numel"] % comm.world_size
            chosen["cut"] = "near" if chosen["shift"] == 1 else "even"  # the same parts, but said
        elif chosen.get("cut") == "near":
            chosen["numel"] += chosen["numel"] % comm.world_size == 0  # nearly even, and not even
        yield Way(**chosen)


def ask_values(
    job: RankJob, call: str, dtype: str, seed: int = 0, where: str = "world",
    share: Sequence[int] = (0, 1),
) -> dict[str, Any]:  # fmt: skip
    """One call on one dtype, in many sizes and ways, with the numbers of a seed.

    Args:
        where: ``world``, or a name of :data:`SPLITS`; nothing of a group counts for the world.

    Returns:
        ``same``: label to digest of what every rank has to have alike; ``refused``: the call does
        not take the dtype, and says so.
    """
    world, comm = job.communicator(), job.group(where)
    before = counts(world)
    found = values(comm, job.backend.device(), call, NAMES[dtype], seed, share)
    if where != "world":
        check_counts(f"the world, after calls of group {where}", world, before, {})
    return found


def values(
    comm: Communicator, device: torch.device, call: str, dtype: torch.dtype, seed: int = 0,
    share: Sequence[int] = (0, 1),
) -> dict[str, Any]:  # fmt: skip
    """As :func:`ask_values`, of any communicator."""
    refuse(comm, device, call, dtype)
    if not comm.capabilities.supports(call, dtype):
        return {"refused": True, "same": {}}
    same: dict[str, str] = {}
    for number, way in enumerate(ways(call, comm, dtype, share)):
        times = 2 if number else OFTEN
        same |= attempt(comm, device, call, dtype, way, seed, times)
    return {"refused": False, "same": same}


def attempt(
    comm: Communicator, device: torch.device, call: str, dtype: torch.dtype, way: Way,
    seed: int = 0, times: int = 2,
) -> dict[str, str]:  # fmt: skip
    """One call, made, waited for and checked, some times with the same tensors in the same memory.

    Returns:
        label to digest of what all ranks have alike.
    """
    label = f"{call} of {dtype} in {comm.name} {list(comm.ranks)}: {_text(way)}"
    trial = Trial(comm, device, dtype, label + (f", seed {seed}" if seed else ""), way.shift)
    plan = PLANS[call](trial, way)
    for number in range(times):
        trial.restore()
        before = counts(comm)
        if comm.rank == way.late and comm.world_size > 1 and not number:
            time.sleep(LATE_S)
        work = plan.begin()
        finish(work, label, polled=way.ending == "polled")
        shared = verify(trial, plan, work, before)
    return shared


def verify(trial: Trial, plan: Planned, work: Work, before: Counts | None) -> dict[str, str]:
    """Looks at what a call that was waited for has left."""
    got = [expected.tensor.clone() for expected in plan.expected]
    trial.scribble(work)
    shared = {}
    for tensor, expected in zip(got, plan.expected, strict=True):
        label = f"{trial.label}{expected.name}"
        if isinstance(expected.want, Tensor):
            check_equal_bits(label, tensor.cpu(), expected.want)
        else:
            check_joined(label, tensor.view(-1), expected.want, expected.reduction)
        if expected.is_shared:
            shared[label] = digest(tensor)
    trial.check_guards()
    if before is not None:
        check_counts(trial.label, trial.comm, before, plan.traffic)
    return shared


Counts = tuple[Counter[str], Counter[str]]


def counts(comm: Communicator) -> Counts:
    """Calls and bytes that a communicator has counted so far, by name of the call."""
    return comm.traffic.calls.copy(), comm.traffic.nbytes.copy()


def check_counts(
    label: str, comm: Communicator, before: Counts, wanted: Mapping[str, tuple[int, int]]
) -> None:
    """Neither fewer nor more calls and bytes were counted, and none of another name."""
    for index, unit in enumerate(("calls", "bytes")):
        now, then = counts(comm)[index], before[index]
        found = {name: now[name] - then[name] for name in (*now, *wanted)}
        for name, count in found.items():
            want = wanted.get(name, (0, 0))[index]
            check(count == want, f"{label}: {want} {unit} of {name} to be counted, got {count}")


def _text(way: Way) -> str:
    said = way._asdict().items()
    return ", ".join(f"{k} {v}" for k, v in said if v != Way._field_defaults[k] or k == "numel")


def refuse(comm: Communicator, device: torch.device, call: str, dtype: torch.dtype) -> None:
    """A dtype, or a reduction of one, that is not claimed is an error before anything is sent."""
    x = torch.zeros(comm.world_size, dtype=dtype, device=device)
    calls: dict[str, Callable[..., Any]] = {
        "all_reduce": lambda *reduction: comm.all_reduce(x, *reduction),
        "reduce_scatter": lambda *reduction: comm.reduce_scatter(x[:1].clone(), x, *reduction),
        "all_gather": lambda: comm.all_gather(x, x[:1].clone()),
        "broadcast": lambda: comm.broadcast(x, 0),
        "all_to_all": lambda: comm.all_to_all(list(x.split(1)), list(x.clone().split(1))),
        "send": lambda: comm.send(x, (comm.rank + 1) % comm.world_size),
    }
    if not comm.capabilities.supports(call, dtype):
        expect_error(UnsupportedError, f"{call} of {dtype}, which is not claimed", calls[call])
    elif call in ("all_reduce", "reduce_scatter"):
        for reduction in REDUCTIONS:
            if not comm.capabilities.supports(call, dtype, reduction):
                what = f"{call} by {reduction} of {dtype}, which is not claimed"
                expect_error(UnsupportedError, what, calls[call], reduction)


def supported(comm: Communicator, call: str, dtype: torch.dtype) -> Iterator[Reduction]:
    """Reductions that are claimed; how an average of integers is rounded is not said."""
    for reduction in REDUCTIONS:
        if comm.capabilities.supports(call, dtype, reduction) and not (
            reduction == "avg" and not dtype.is_floating_point
        ):
            yield reduction


# The calls, each planned in one way.


def all_reduce(at: Trial, way: Way) -> Planned:
    comm = at.comm
    inputs = at.inputs(way.numel, way.reduction if way.is_rare else None)
    tensor = at.place(inputs[comm.rank])
    begin = partial(comm.all_reduce, tensor, way.reduction, async_op=way.async_op)
    expected = Expected(tensor, inputs, way.reduction, is_shared=True)
    return Planned(begin, [expected], {"all_reduce": (1, tensor.nbytes)})


def _cut(at: Trial, way: Way) -> tuple[list[int] | None, list[int], slice]:
    """What is said of sizes, the sizes, and this rank's part; even ones of what can be even."""
    comm = at.comm
    said = cut(way.cut, way.numel, comm.world_size)
    sizes = said or [way.numel // comm.world_size] * comm.world_size
    start = sum(sizes[: comm.rank])
    return said, sizes, slice(start, start + sizes[comm.rank])


def _placed(at: Trial, way: Way, values: Sequence[Tensor | int]) -> list[Tensor]:
    """Each by itself, or all in one storage: the first behind the last, with nothing between."""
    if way.lying != "in one storage":
        return [at.place(value) for value in values]
    sizes = [value if isinstance(value, int) else value.numel() for value in values]
    parts = at.place(sum(sizes)).split(sizes[::-1])[::-1]
    for part, value in zip(parts, values, strict=True):
        if isinstance(value, Tensor):
            at.bring(part, value)
    return list(parts)


def reduce_scatter(at: Trial, way: Way) -> Planned:
    comm, (said, sizes, mine) = at.comm, _cut(at, way)
    inputs = at.inputs(way.numel, way.reduction if way.is_rare else None)
    tensor, output = _placed(at, way, [inputs[comm.rank], sizes[comm.rank]])
    if way.lying == "in place":
        output = tensor[mine]
    begin = partial(
        comm.reduce_scatter, output, tensor, way.reduction, sizes=said, async_op=way.async_op
    )
    expected = [Expected(output, [part[mine] for part in inputs], way.reduction)]
    if way.lying != "in place":
        expected.append(Expected(tensor, inputs[comm.rank], name=", the input afterwards"))
    return Planned(begin, expected, {"reduce_scatter": (1, tensor.nbytes)})


def all_gather(at: Trial, way: Way) -> Planned:
    comm, (said, sizes, mine) = at.comm, _cut(at, way)
    parts = [at.input(rank, size, bits=way.is_rare) for rank, size in enumerate(sizes)]
    tensor, output = _placed(at, way, [parts[comm.rank], way.numel])
    if way.lying == "in place":
        tensor = output[mine]
        at.bring(tensor, parts[comm.rank])
    begin = partial(comm.all_gather, output, tensor, sizes=said, async_op=way.async_op)
    whole = Expected(output, torch.cat(parts), is_shared=True)
    kept = Expected(tensor, parts[comm.rank], name=", the input afterwards")
    return Planned(begin, [whole, kept], {"all_gather": (1, output.nbytes)})


def broadcast(at: Trial, way: Way) -> Planned:
    comm = at.comm
    tensor = at.place(at.input(comm.rank, way.numel, bits=way.is_rare))
    want = at.input(way.source, way.numel, bits=way.is_rare)
    begin = partial(comm.broadcast, tensor, way.source, async_op=way.async_op)
    expected = Expected(tensor, want, is_shared=True)
    return Planned(begin, [expected], {"broadcast": (1, tensor.nbytes)})


def _between(at: Trial, way: Way, source: int, destination: int, number: int = 0) -> Tensor:
    """What one rank gives another: of one size, or ``numel // (1 + s + 2 r)``, and some nothing."""
    world = at.comm.world_size
    place = (number * world + source) * world + destination
    if way.cut == "near":
        return at.input(place, way.numel // world, bits=way.is_rare)
    is_empty = (source + 2 * destination + number) % 4 == 3  # with more behind it
    numel = 0 if is_empty else way.numel // (1 + source + 2 * destination + number)
    return at.input(place, numel, bits=way.is_rare)


def all_to_all(at: Trial, way: Way) -> Planned:
    comm, ranks = at.comm, range(at.comm.world_size)
    given = [_between(at, way, comm.rank, rank) for rank in ranks]
    wanted = [_between(at, way, rank, comm.rank) for rank in ranks]
    inputs = _placed(at, way, given)
    outputs = _placed(at, way, [part.numel() for part in wanted])
    begin = partial(comm.all_to_all, outputs, inputs, async_op=way.async_op)
    expected = [
        Expected(tensor, want, name=f", {name} {rank}")
        for name, tensors, wants in (
            ("from rank", outputs, wanted),
            ("the input afterwards for rank", inputs, given),
        )
        for rank, (tensor, want) in enumerate(zip(tensors, wants, strict=True))
    ]
    return Planned(begin, expected, {"all_to_all": (1, sum(t.nbytes for t in inputs))})


def exchange(at: Trial, way: Way) -> Planned:
    """In one grouped call, or one by one: a message to every other rank, three to the next one.

    Two of these have one tag; ``way.source`` says with which neighbour all ranks begin.
    """
    comm, world = at.comm, at.comm.world_size
    peers = [(way.source + step) % world for step in range(world)]
    transfers: list[Transfer] = []
    expected = []
    for step in [step for step in peers if step]:
        after, before = (comm.rank + step) % world, (comm.rank - step) % world
        for number, tag in enumerate((0, 5, 5) if step == 1 else (0,)):
            room = at.place(_between(at, way, before, comm.rank, number).numel())
            sent = at.place(_between(at, way, comm.rank, after, number))
            transfers += [Transfer("send", sent, after, tag), Transfer("recv", room, before, tag)]
            want = _between(at, way, before, comm.rank, number)
            expected.append(Expected(room, want, name=f", from rank {before}, message {number}"))
    counted = {
        kind: (len(found), sum(found))
        for kind in ("send", "recv")
        for found in [[t.tensor.nbytes for t in transfers if t.kind == kind]]
    }
    if way.is_single:
        return Planned(partial(one_by_one, comm, transfers, way), expected, counted)
    return Planned(partial(comm.exchange, transfers, async_op=way.async_op), expected, counted)


def one_by_one(comm: Communicator, transfers: Sequence[Transfer], way: Way) -> Work:
    """The same by send() and recv(), in an order of messages that all ranks keep to.

    So that nobody waits in a circle, also where each call ends with the peer's, as on a stream.
    """

    def between(transfer: Transfer) -> tuple[int, int]:
        is_send = transfer.kind == "send"
        return (comm.rank, transfer.peer) if is_send else (transfer.peer, comm.rank)

    works = []
    for transfer in sorted(transfers, key=between):
        call = comm.send if transfer.kind == "send" else comm.recv
        works.append(call(transfer.tensor, transfer.peer, tag=transfer.tag, async_op=way.async_op))
    return All(works)


@dataclass
class All(Work):
    """Several works as one."""

    works: Sequence[Work]

    def wait(self) -> None:
        """Waits for each."""
        for work in self.works:
            work.wait()

    def is_done(self) -> bool:
        """Whether each is."""
        return all(work.is_done() for work in self.works)


PLANS: dict[str, Plan] = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "broadcast": broadcast,
    "all_to_all": all_to_all,
    "send": exchange,
}
