"""What a rank is asked about its backend's collectives: calls, whose results it checks itself.

What goes wrong between ranks is asked by :mod:`.rank_failures`.

Every rank makes the inputs of all ranks, so that each knows what has to come out
(:mod:`.rank_trials`). Outputs are poisoned before, stand between guard elements, and their bits go
to the asker, who compares them between the ranks. These functions run in the processes of
:mod:`.ranks`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anychip.conformance.case import check, check_equal_bits, expect_error
from anychip.conformance.rank_trials import Trial, check_joined, cuts, digest, finish
from anychip.contract import (
    Backend,
    CommunicationError,
    Communicator,
    Reduction,
    Transfer,
    UnsupportedError,
)

SIZES = (0, 1, 7, 1000, 65537)
"""Nothing, one element, fewer than a vector, even parts, and a prime with more than one chunk."""
REDUCTIONS: tuple[Reduction, ...] = ("sum", "avg", "max", "min")
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


@dataclass
class RankJob:
    """This process's part.

    Attributes:
        store: for words between ranks that no communicator carries.
    """

    backend: Backend
    rank: int
    world_size: int
    store: Any = None
    found: Communicator | None = None

    def communicator(self, timeout_s: float = 30.0) -> Communicator:
        """The backend's; a new one after a failure, or when another time limit is asked for."""
        known = self.found
        if known is not None and (known.is_closed or known.timeout_s != timeout_s):
            known.close()
            known = None
        if known is None:
            known = self.backend.communicator(timeout_s=timeout_s, heartbeat_s=timeout_s)
        self.found = known
        return known

    def wait_for(self, word: str) -> None:
        """Returns when another rank has said a word."""
        self.store.wait([word], timedelta(seconds=30))

    def say(self, word: str) -> None:
        """Says a word, once and for all."""
        self.store.set(word, "1")


# Values. Each function makes its call in every way, and gives a digest per label of what all ranks
# must have alike.


def ask_values(job: RankJob, call: str, dtype: str, seed: int = 0) -> dict[str, Any]:
    """One call on one dtype, in all sizes and ways, with the numbers of a seed.

    Returns:
        ``same``: label to digest of what every rank has to have alike; ``refused``: the call does
        not take the dtype, and says so.
    """
    comm = job.communicator()
    return values(comm, job.backend.device(), call, NAMES[dtype], seed)


def values(
    comm: Communicator, device: torch.device, call: str, dtype: torch.dtype, seed: int = 0
) -> dict[str, Any]:
    """As :func:`ask_values`, of any communicator."""
    if not comm.capabilities.supports(call, dtype):
        refuse(comm, device, call, dtype)
        return {"refused": True, "same": {}}
    same: dict[str, str] = {}
    for numel, async_op in itertools.product(SIZES, (False, True)):
        label = f"{call}/{dtype}/{numel}" + ("/async" if async_op else "")
        label += f"/seed {seed}" if seed else ""
        trial = partial(Trial, comm, device, dtype)
        VALUES[call](Asked(trial, label, numel, async_op, same), comm)
    return {"refused": False, "same": same}


def refuse(comm: Communicator, device: torch.device, call: str, dtype: torch.dtype) -> None:
    """A dtype that is not in the table is an error before anything is sent."""
    x = torch.zeros(comm.world_size, dtype=dtype, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(x),
        "reduce_scatter": lambda: comm.reduce_scatter(x[:1], x),
        "all_gather": lambda: comm.all_gather(x, x[:1].clone()),
        "broadcast": lambda: comm.broadcast(x, 0),
        "all_to_all": lambda: comm.all_to_all(list(x.split(1)), list(x.clone().split(1))),
        "send": lambda: comm.send(x, (comm.rank + 1) % comm.world_size),
    }
    expect_error(UnsupportedError, f"{call} of {dtype}, which is not claimed", calls[call])


def supported(comm: Communicator, call: str, dtype: torch.dtype) -> Iterator[Reduction]:
    """Reductions that are claimed; any other is refused."""
    for reduction in REDUCTIONS:
        if comm.capabilities.supports(call, dtype, reduction) and not (
            reduction == "avg" and not dtype.is_floating_point
        ):
            yield reduction


class Asked(NamedTuple):
    """One call on so many elements.

    Attributes:
        trial: ``trial(label)`` gives a trial of the tensors' type.
        same: label to digest of what every rank has to have alike; to be filled.
    """

    trial: Callable[[str], Trial]
    label: str
    numel: int
    async_op: bool
    same: dict[str, str]


def shares(
    comm: Communicator, sizes: Sequence[int] | None, numel: int = 0
) -> tuple[Sequence[int], slice]:
    """How many elements each rank has, even parts if nothing is said, and where this one's are."""
    found = sizes or [numel // comm.world_size] * comm.world_size
    start = sum(found[: comm.rank])
    return found, slice(start, start + found[comm.rank])


def neighbours(comm: Communicator) -> tuple[int, int]:
    """The ranks after and before this one, in a ring."""
    return (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size


def all_reduce(asked: Asked, comm: Communicator) -> None:
    for reduction in supported(comm, "all_reduce", asked.trial(asked.label).dtype):
        at = asked.trial(f"{asked.label}/{reduction}")
        inputs = at.inputs(asked.numel)
        tensor = at.place(inputs[comm.rank])
        finish(comm.all_reduce(tensor, reduction, async_op=asked.async_op), at.label)
        check_joined(at.label, tensor, inputs, reduction)
        at.check_guards()
        asked.same[at.label] = digest(tensor)


def reduce_scatter(asked: Asked, comm: Communicator) -> None:
    reductions = list(supported(comm, "reduce_scatter", asked.trial(asked.label).dtype))
    ways = itertools.product(reductions, cuts(asked.numel, comm.world_size), (False, True))
    for reduction, sizes, in_place in ways:
        at = asked.trial(f"{asked.label}/{reduction}/{sizes}" + ("/in place" if in_place else ""))
        inputs = at.inputs(asked.numel)
        found, mine = shares(comm, sizes, asked.numel)
        tensor = at.place(inputs[comm.rank])
        output = tensor[mine] if in_place else at.place(found[comm.rank])
        work = comm.reduce_scatter(output, tensor, reduction, sizes=sizes, async_op=asked.async_op)
        finish(work, at.label)
        check_joined(at.label, output, [part[mine] for part in inputs], reduction)
        if not in_place:
            check_equal_bits(f"{at.label}: the input afterwards", tensor, inputs[comm.rank])
        at.check_guards()


def all_gather(asked: Asked, comm: Communicator) -> None:
    for sizes, in_place in itertools.product(cuts(asked.numel, comm.world_size), (False, True)):
        at = asked.trial(f"{asked.label}/{sizes}" + ("/in place" if in_place else ""))
        found, mine = shares(comm, sizes, asked.numel)
        parts = [at.input(rank, size) for rank, size in enumerate(found)]
        output = at.place(asked.numel)
        if in_place:
            tensor = output[mine]
            tensor.copy_(parts[comm.rank])
        else:
            tensor = at.place(parts[comm.rank])
        finish(comm.all_gather(output, tensor, sizes=sizes, async_op=asked.async_op), at.label)
        check_equal_bits(at.label, output.cpu(), torch.cat(parts))
        check_equal_bits(f"{at.label}: the input afterwards", tensor.cpu(), parts[comm.rank])
        at.check_guards()
        asked.same[at.label] = digest(output)


def broadcast(asked: Asked, comm: Communicator) -> None:
    for source in range(comm.world_size):
        at = asked.trial(f"{asked.label}/from {source}")
        inputs = at.inputs(asked.numel)
        tensor = at.place(inputs[comm.rank])
        finish(comm.broadcast(tensor, source, async_op=asked.async_op), at.label)
        check_equal_bits(at.label, tensor.cpu(), inputs[source])
        at.check_guards()
        asked.same[at.label] = digest(tensor)


def all_to_all(asked: Asked, comm: Communicator) -> None:
    """Rank s gives rank r ``asked.numel // (1 + s + r)`` elements: all sizes differ."""
    at, ranks = asked.trial(asked.label), range(comm.world_size)

    def between(source: int, destination: int) -> Tensor:
        size = asked.numel // (1 + source + 2 * destination)
        return at.input(source * comm.world_size + destination, size)

    inputs = [at.place(between(comm.rank, rank)) for rank in ranks]
    wanted = [between(rank, comm.rank) for rank in ranks]
    outputs = [at.place(part.numel()) for part in wanted]
    finish(comm.all_to_all(outputs, inputs, async_op=asked.async_op), at.label)
    for rank, (got, want) in enumerate(zip(outputs, wanted, strict=True)):
        check_equal_bits(f"{at.label}: from rank {rank}", got.cpu(), want)
    for rank, tensor in enumerate(inputs):
        kept = between(comm.rank, rank)
        check_equal_bits(f"{at.label}: the input afterwards", tensor.cpu(), kept)
    at.check_guards()


def exchange(asked: Asked, comm: Communicator) -> None:
    """A ring, messages of two tags each way, two of them of one, in one grouped call."""
    if comm.world_size == 1:
        finish(comm.exchange([], async_op=asked.async_op), asked.label)
        return
    after, before = neighbours(comm)
    at = asked.trial(asked.label)
    transfers, received = [], []
    for number, tag in enumerate((0, 5, 5)):
        at.label = f"{asked.label}/message {number}"
        wanted = at.input(before, asked.numel)
        room = at.place(asked.numel)
        received.append((number, room, wanted))
        transfers += [
            Transfer("send", at.place(at.input(comm.rank, asked.numel)), after, tag),
            Transfer("recv", room, before, tag),
        ]
    finish(comm.exchange(transfers, async_op=asked.async_op), at.label)
    for number, got, want in received:
        check_equal_bits(f"{asked.label}: from rank {before}, message {number}", got.cpu(), want)
    at.check_guards()


VALUES: dict[str, Callable[..., None]] = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "broadcast": broadcast,
    "all_to_all": all_to_all,
    "send": exchange,
}


# Rules


def ask_order(job: RankJob) -> None:
    """Two reductions under way at once, waited for in orders of their own; a send and a receive."""
    comm, device = job.communicator(), job.backend.device()
    first, second = (Trial(comm, device, torch.float32, name) for name in ("first", "second"))
    tensors = [trial.place(trial.input(comm.rank, 5000)) for trial in (first, second)]
    works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works if comm.rank % 2 else reversed(works):
        finish(work, "all_reduce")
    for trial, tensor in zip((first, second), tensors, strict=True):
        check_joined(f"the {trial.label} of two", tensor, trial.inputs(5000), "sum")
    after, before = neighbours(comm)
    # Messages of one tag come in the order in which they were sent; those of another one do not.
    sends = [Trial(comm, device, torch.float32, f"send {number}") for number in range(4)]
    tags = (3, 3, 3 + 2**15, 3)
    sent = [
        comm.send(trial.place(trial.input(comm.rank, 300)), after, tag=tag, async_op=True)
        for trial, tag in zip(sends, tags, strict=True)
    ]
    for number in (2, 0, 1, 3):
        room = sends[number].place(300)
        comm.recv(room, before, tag=tags[number])
        want = sends[number].input(before, 300)
        check_equal_bits(f"recv of message {number}, tag {tags[number]}", room.cpu(), want)
    for work in sent:
        finish(work, "send")


def ask_large(job: RankJob) -> None:
    """Messages of some MiB, as gradients are: they go in several pieces."""
    comm, device = job.communicator(), job.backend.device()
    numel, same = 1_000_003, dict[str, str]()
    trial = partial(Trial, comm, device, torch.float32)
    for call in ("all_reduce", "broadcast", "all_to_all", "send"):
        VALUES[call](Asked(trial, f"large {call}", numel, False, same), comm)
    sizes = [numel // comm.world_size + (rank == 0) for rank in range(comm.world_size)]
    at = trial("large parts")
    inputs, (_, mine) = at.inputs(sum(sizes)), shares(comm, sizes)
    part = at.place(sizes[comm.rank])
    comm.reduce_scatter(part, at.place(inputs[comm.rank]), sizes=sizes)
    check_joined(at.label, part, [x[mine] for x in inputs], "sum")
    whole, own = at.place(sum(sizes)), at.input(comm.rank, sizes[comm.rank])
    comm.all_gather(whole, at.place(own), sizes=sizes)
    gathered = torch.cat([at.input(rank, size) for rank, size in enumerate(sizes)])
    check_equal_bits(at.label, whole.cpu(), gathered)
    at.check_guards()


def ask_not_finite(job: RankJob) -> None:
    """Inf and NaN of one rank reach all: a loss scale backs off by what comes out of a sum."""
    comm, device = job.communicator(), job.backend.device()
    last = comm.world_size - 1
    for dtype in (torch.float32, torch.bfloat16):
        if not all(comm.capabilities.supports(c, dtype) for c in ("all_reduce", "reduce_scatter")):
            continue
        x = torch.ones(7 * comm.world_size, dtype=dtype, device=device)
        if comm.rank == last:
            x[1], x[2], x[3], x[-1] = float("nan"), float("inf"), -float("inf"), float("nan")
        if comm.rank == 0:
            x[3] = float("inf")
        want = torch.full((7 * comm.world_size,), float(comm.world_size), dtype=dtype)
        want[1] = want[3] = want[-1] = float("nan")
        want[2] = float("inf")
        part = torch.empty(7, dtype=dtype, device=device)
        comm.reduce_scatter(part, x)
        mine = want[7 * comm.rank :][:7]
        for reduction in ("sum", "avg"):
            y = x.clone()
            comm.all_reduce(y, reduction)
            expected = want if reduction == "sum" else want / comm.world_size
            check_alike(f"{reduction} of {dtype} with Inf and NaN", y, expected)
        check_alike(f"reduce_scatter of {dtype} with Inf and NaN", part, mine)


def check_alike(what: str, got: Tensor, want: Tensor) -> None:
    """Equal, where NaN is equal to NaN."""
    same = torch.equal(got.cpu().nan_to_num(nan=-9.0), want.nan_to_num(nan=-9.0))
    check(same, f"{what}: {want.tolist()} expected, got {got.tolist()}")


def ask_early(job: RankJob, number: int) -> None:
    """Work is not done while another rank has not made the call; after wait() it is, and right."""
    comm, device = job.communicator(), job.backend.device()
    trial = Trial(comm, device, torch.float32, f"early {number}")
    tensor, come = trial.place(trial.input(comm.rank, 1000)), f"come/{number}"
    last = comm.world_size - 1
    if comm.rank == last:
        job.wait_for(come)
        time.sleep(0.1)
        comm.all_reduce(tensor)
    else:
        work = comm.all_reduce(tensor, async_op=True)
        early = work.is_done()
        job.say(come)
        finish(work, "all_reduce")
        check(not early, f"is_done() is True, and rank {last} has not made the call yet")
    check_joined("all_reduce", tensor, trial.inputs(1000), "sum")


def ask_barrier(job: RankJob, number: int) -> None:
    """No rank leaves the barrier before all have come."""
    comm, word = job.communicator(), f"barrier/{number}"
    if comm.rank == comm.world_size - 1:
        time.sleep(0.2)
        job.say(word)
    comm.barrier()
    check(job.store.check([word]), f"barrier: left before rank {comm.world_size - 1} came")


def ask_groups(job: RankJob) -> dict[str, str]:
    """Parts of the world: values among members only, names and ranks, one after the other."""
    comm, device, world = job.communicator(), job.backend.device(), job.world_size
    same: dict[str, str] = {}
    for name, groups in splits(world).items():
        part = comm.split(groups, name=name)
        members = next(group for group in groups if job.rank in group)
        found = (part.name, tuple(part.ranks), part.rank, part.world_size)
        want = (name, tuple(members), members.index(job.rank), len(members))
        check(found == want, f"split into {groups}: (name, ranks, rank, size) {want}, got {found}")
        trial = Trial(comm, device, torch.float32, name)
        tensor = trial.place(trial.input(comm.rank, 257))
        part.all_reduce(tensor)
        check_joined(name, tensor, [trial.input(r, 257) for r in members], "sum")
        same[f"{name}/{members}"] = digest(tensor)
        alike = tensor.cpu().clone()
        part.all_reduce(tensor, "avg")
        check_joined(f"avg in {name}", tensor, [alike] * len(members), "avg")
        _within(part, members, trial)
    return same


def _within(part: Communicator, members: Sequence[int], trial: Trial) -> None:
    """Ranks that a call names are those of the group, in the group's order."""
    mine = members[part.rank]
    gathered = trial.place(3 * len(members))
    part.all_gather(gathered, trial.place(trial.input(mine, 3)))
    check_equal_bits(part.name, gathered.cpu(), torch.cat([trial.input(r, 3) for r in members]))
    for source, member in enumerate(members):
        told = trial.place(trial.input(mine, 5))
        part.broadcast(told, source)
        check_equal_bits(f"broadcast in {part.name}", told.cpu(), trial.input(member, 5))
    whole, own = trial.place(trial.input(mine, 2 * len(members))), trial.place(2)
    part.reduce_scatter(own, whole)
    parts = [trial.input(r, 2 * len(members))[2 * part.rank :][:2] for r in members]
    check_joined(f"reduce_scatter in {part.name}", own, parts, "sum")


def splits(world: int) -> dict[str, list[list[int]]]:
    """Ways to split a world: whole, turned round, each alone, neighbours, and every other."""
    found = {"whole": [list(range(world))], "alone": [[rank] for rank in range(world)]}
    found["turned"] = [list(range(world))[::-1]]
    if world % 2 == 0 and world > 2:
        half = world // 2
        found["rows"] = [list(range(half)), list(range(half, world))]
        found["columns"] = [list(range(0, world, 2)), list(range(1, world, 2))]
    return found


def ask_mistakes(job: RankJob) -> None:
    """What one rank can see alone is a ValueError before anything is sent; all goes on after it."""
    comm, device = job.communicator(), job.backend.device()
    mistakes(comm, device)
    x = torch.ones(4, device=device)
    comm.all_reduce(x)
    check(x.tolist() == [float(comm.world_size)] * 4, f"all_reduce after mistakes: {x.tolist()}")


def mistakes(comm: Communicator, device: torch.device) -> None:
    """As :func:`ask_mistakes`, of any communicator."""
    world = comm.world_size
    x = torch.zeros(4 * world, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "a tensor that is not contiguous": lambda: comm.all_reduce(x[::2]),
        "a reduction that does not exist": lambda: comm.all_reduce(x, "mean"),  # type: ignore[arg-type]
        "a rank beyond the last": lambda: comm.broadcast(x, world),
        "a negative rank": lambda: comm.broadcast(x, -1),
        "a send to itself": lambda: comm.send(x, comm.rank),
        "parts that are not the whole": lambda: comm.all_gather(x, x[:3]),
        "sizes of other ranks": lambda: comm.reduce_scatter(x[:4], x, sizes=[4] * (world + 1)),
        "another number of tensors": lambda: comm.all_to_all([x] * (world + 1), [x] * (world + 1)),
        "a rank in no group": lambda: comm.split([[]], name="nothing"),
    }
    for what, call in calls.items():
        expect_error(ValueError, what, call)


def ask_shapes(job: RankJob) -> None:
    """Tensors of no dims and of several are taken as their elements in order."""
    comm, device, world = job.communicator(), job.backend.device(), job.world_size
    for shape in ((), (1,), (3, 5), (2, 3, 4), (5, 0)):
        trial = Trial(comm, device, torch.float32, f"shape {shape}")
        numel = int(np.prod(shape))
        inputs = trial.inputs(numel)
        x = trial.place(inputs[comm.rank]).view(shape)
        comm.broadcast(x, world - 1)
        check_equal_bits(f"broadcast, {trial.label}", x.cpu(), inputs[-1].view(shape))
        x = trial.place(inputs[comm.rank]).view(shape)
        whole = trial.place(world * numel).view(world, *shape)
        comm.all_gather(whole, x)
        check_equal_bits(f"all_gather, {trial.label}", whole.cpu().view(-1), torch.cat(inputs))
        part = trial.place(numel).view(shape)
        comm.reduce_scatter(part, whole)
        want = [inputs[comm.rank]] * world
        check_joined(f"reduce_scatter, {trial.label}", part.view(-1), want, "sum")
        comm.all_reduce(x)
        check_joined(f"all_reduce, {trial.label}", x.view(-1), inputs, "sum")
        trial.check_guards()


def ask_traffic(job: RankJob) -> None:
    """Calls and bytes are counted as :class:`~anychip.contract.Traffic` says."""
    comm, device = job.communicator(), job.backend.device()
    before = (comm.traffic.calls.copy(), comm.traffic.nbytes.copy())
    world, x = comm.world_size, torch.zeros(12 * comm.world_size, device=device)
    part = torch.zeros(12, device=device)
    comm.all_reduce(x)
    comm.all_reduce(part, "max", async_op=True).wait()
    comm.all_gather(x, part)
    comm.reduce_scatter(part, x)
    comm.broadcast(part, 0)
    comm.all_to_all(list(x.split(12)), list(x.clone().split(12)))
    comm.barrier()
    whole = 48 * world
    wanted = {
        **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), (1, whole)),
        **{"all_reduce": (2, whole + 48), "broadcast": (1, 48), "barrier": (1, 0)},
    }
    for call, want in wanted.items():
        calls, nbytes = comm.traffic.calls[call], comm.traffic.nbytes[call]
        got = (calls - before[0][call], nbytes - before[1][call])
        check(got == want, f"traffic of {call}: (calls, bytes) {want} expected, got {got}")


def ask_close(job: RankJob) -> None:
    """After close() nothing can be called; a second close() is nothing; a new one works.

    What was called and waited for before has its result, though the device may not be done yet.
    """
    comm, device = job.communicator(), job.backend.device()
    y = torch.ones(1 << 18, device=device)
    comm.all_reduce(y)
    for _ in range(2):
        comm.close()
        check(comm.is_closed is True, f"is_closed after close(): {comm.is_closed!r}")
    wrong = int((y.cpu() != job.world_size).sum())
    check(wrong == 0, f"{wrong} elements of an all_reduce just before close() are wrong")
    x = torch.ones(3, device=device)
    expect_error(CommunicationError, "all_reduce after close()", comm.all_reduce, x)
    check(x.tolist() == [1.0] * 3, f"all_reduce after close() wrote {x.tolist()}")
    job.communicator().all_reduce(x)
    check(x.tolist() == [float(job.world_size)] * 3, f"a new communicator gave {x.tolist()}")
