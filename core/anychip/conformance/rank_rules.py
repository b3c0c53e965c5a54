"""What a rank is asked about rules of collectives: order, waiting, groups, mistakes, the end.

As :mod:`.rank_questions`, these functions run in the processes of :mod:`.ranks`, where ranks check
what they get themselves.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
import torch

from anychip.conformance.case import check, check_equal_bits, expect_error
from anychip.conformance.rank_questions import (
    PLANS,
    RankJob,
    Way,
    attempt,
    check_counts,
    counts,
    options,
    split,
    values,
    verify,
)
from anychip.conformance.rank_trials import Trial, check_joined, digest, finish
from anychip.contract import CommunicationError, Communicator, Transfer, UnsupportedError

LARGE = ((1 << 18, "even", torch.float32), (1_000_003, "near", torch.float32))
"""Elements, cut, type: pieces of a MiB that are full, and a prime, as gradients come."""
ODD = dict.fromkeys(PLANS, ((8 << 20) + 10, "near", torch.uint8)) | dict.fromkeys(
    ("all_reduce", "reduce_scatter", "broadcast"), ((2 << 20) + 1, "near", torch.float32)
)
"""Of two ranks alone: beyond 4 MiB of each, and no multiple of anything."""
MANY = (12, 80, 80, 80, 80)
"""Calls under way at once: more than a ring of buffers has, and in all than a byte counts."""
AGAIN: Any = [*product(("sum", "max"), (4099, 12, 4000), (torch.int32, torch.float32))]
UNDER_WAY = (torch.float32, torch.int64), (torch.bfloat16,) * 2, (torch.float16,) * 2
"""Types of calls at once, two of a kind and size."""
LONG_S = 2.5
"""So late comes a rank once: nobody gives up before."""
LATER_S = 0.02
"""So long after all others has the last rank not made its call."""


def ask_order(job: RankJob) -> None:
    """Messages of one tag come in the order in which they were sent; those of another one not.

    They are sent one by one, or from every other rank in one call; the first ones are the longest.
    """
    comm, device, world = job.communicator(), job.backend.device(), job.world_size
    tags = (3, 3, 3 + 2**15, 3, *(3 + 2**bits for bits in (2, 4, 5, 8)))
    for step in range(1, world):
        after, before = (comm.rank + step) % world, (comm.rank - step) % world
        sends = [Trial(comm, device, torch.float32, f"send {n}") for n in range(len(tags))]
        sizes = [300 - 20 * number for number in range(len(tags))]
        messages = [
            Transfer("send", trial.place(trial.input(comm.rank, size)), after, tag)
            for trial, size, tag in zip(sends, sizes, tags, strict=True)
        ]
        calls = [messages] if comm.rank % 2 else [[message] for message in messages]
        sent = [comm.exchange(call, async_op=True) for call in calls]
        for number in (7, 5, 2, 0, 6, 1, 4, 3):
            room = sends[number].place(sizes[number])
            comm.recv(room, before, tag=tags[number])
            want = sends[number].input(before, sizes[number])
            name = f"recv of message {number} from rank {before}, tag {tags[number]}"
            check_equal_bits(name, room.cpu(), want)
        both = comm, job.group("whole")
        rooms = [trial.place(300) for trial in sends[:2]]
        for of, trial in zip(both, sends, strict=False):
            sent.append(of.send(trial.place(trial.input(comm.rank, 300)), after, async_op=True))
        for number in (1, 0):
            both[number].recv(rooms[number], before)
            name = f"recv in group {number} of two with the same ranks and tag"
            check_equal_bits(name, rooms[number].cpu(), sends[number].input(before, 300))
        for work in sent:
            finish(work, "send")


def ask_under_way(job: RankJob, where: Sequence[str]) -> dict[str, str]:
    """Calls of all kinds in several groups under way at once, waited for in orders of their own.

    Args:
        where: ``world``, or names of :data:`.rank_questions.SPLITS`; groups may overlap.
    """
    device, same = job.backend.device(), dict[str, str]()
    comms = [job.group(name) for name in where]
    for late, dtypes in zip((99, job.world_size - 1, 0), UNDER_WAY, strict=True):
        trials, plans, works = [], [], []
        for number, (name, plan) in enumerate([*PLANS.items()] * 2):
            comm = comms[number % len(comms)]
            dtype = dtypes[number // len(PLANS)]
            if not comm.capabilities.supports(name, dtype):
                dtype = torch.float32
            label = f"{name} number {number} under way in {comm.name} {list(comm.ranks)}"
            way = Way(60 + number % len(PLANS), "waited", source=(1 + number) % comm.world_size)
            if dtype.itemsize == 2 and comm.capabilities.supports(name, dtype, "avg"):
                way = way._replace(reduction="avg")
            trials.append(Trial(comm, device, dtype, f"{label}, rank {late} late"))
            plans.append(plan(trials[-1], way))
        if job.rank == late:
            time.sleep(LONG_S if job.world_size == 2 and late == 0 else LATER_S)
        works = [plan.begin() for plan in plans]
        order = list(range(len(works)))
        for at in order[::-1] if job.rank % 2 == 0 else order[5:] + order[:5]:
            finish(works[at], trials[at].label, polled=at % 3 == 0)
            same |= verify(trials[at], plans[at], works[at], None)
    return same


def ask_many(job: RankJob) -> dict[str, str]:
    """Hundreds of calls of each kind, many of them under way at once: none is forgotten."""
    comm, device, same = job.communicator(), job.backend.device(), dict[str, str]()
    way = Way(numel=16, ending="waited")
    for name, plan in PLANS.items():
        labels = [f"{name}, one of many, number {number}" for number in range(max(MANY))]
        trials = [Trial(comm, device, torch.float32, label) for label in labels]
        plans = [plan(trial, way) for trial in trials]
        for count in MANY:
            for trial in trials:
                trial.restore()
            for at, work in enumerate([planned.begin() for planned in plans[:count]]):
                finish(work, labels[at])
                same |= verify(trials[at], plans[at], work, None)
    return same


def ask_claims(job: RankJob) -> dict[str, str]:
    """Each call does what it claims: every type, by every reduction."""
    comm, device, same = job.communicator(), job.backend.device(), dict[str, str]()
    for call in PLANS:
        for dtype in sorted(comm.capabilities.dtypes.get(call, ()), key=str):
            for reduction in options(call, comm, dtype).get("reduction", ("sum",)):
                way = Way(numel=1021, reduction=reduction, cut="near")
                same |= attempt(comm, device, call, dtype, way, times=1)
    return same


def ask_large(job: RankJob) -> dict[str, str]:
    """Messages of some MiB, as gradients are: they go in several pieces."""
    comm, device, same = job.communicator(), job.backend.device(), dict[str, str]()
    for call in PLANS:
        for numel, cut, dtype in (*LARGE, *[ODD[call]] * (comm.world_size == 2)):
            way = Way(numel=numel, cut=cut, is_rare=False)
            if comm.capabilities.supports(call, dtype):
                same |= attempt(comm, device, call, dtype, way, times=1)
    return same


def ask_early(job: RankJob, number: int, where: str = "world") -> None:
    """Work is not done while another rank has not made the call; after wait() it is, and right.

    Each call, with each rank of the group the one that comes last. A call that has copies to queue
    behind it may wait for that rank itself.
    """
    comm, device = job.group(where), job.backend.device()
    everyone = range(comm.world_size)
    for late in everyone:
        for name, plan in PLANS.items() if comm.world_size > 1 else ():
            label = f"{name} in {comm.name} {list(comm.ranks)}, {late} last, question {number}"
            trial = Trial(comm, device, torch.float32, label)
            numel = (1000, 40_000)[late % 2]
            # Else some rank gets nothing of the last one, and need not wait for it.
            cut = "near" if name in ("all_to_all", "send") else "even"
            made = plan(trial, Way(numel=numel, ending="waited", source=late, cut=cut))
            called = f"early/{label}/called"
            if comm.rank == late:
                for rank in set(everyone) - {late}:
                    job.wait_for(f"early/{label}/{rank}")
                time.sleep(LATER_S)
                job.say(called)
                work, is_early = made.begin(), False
            else:
                job.say(f"early/{label}/{comm.rank}")
                work = made.begin()
                is_early = work.is_done() and not job.store.check([called])
            finish(work, label)
            text = f"{label}: is_done() is True, and that rank has not made the call yet"
            check(not is_early, text)
            verify(trial, made, work, None)


def ask_barrier(job: RankJob, number: int, where: str = "world") -> None:
    """No rank leaves the barrier before all have come, whichever comes last; it is counted."""
    comm = job.group(where)
    before = counts(comm)
    times = comm.world_size if comm.world_size > 1 else 0
    for late in range(times):
        word = f"barrier/{number}/{comm.ranks}/{late}"
        if comm.rank == late:
            time.sleep(0.1)
            job.say(word)
        comm.barrier()
        check(job.store.check([word]), f"barrier in {comm.name}: left before rank {late} came")
    check_counts("barrier", comm, before, {"barrier": (times, 0)})


def ask_groups(job: RankJob) -> dict[str, str]:
    """Parts of the world in the order that was asked for: whole, each rank alone, turned round."""
    world, same = list(range(job.world_size)), dict[str, str]()
    ways: dict[str, list[list[int]]] = {"whole": [world], "alone": [[rank] for rank in world]}
    ways["turned"] = [world[::-1]]
    if job.world_size == 4:
        ways["crossed"] = [[3, 0], [2, 1]]
    for way, groups in ways.items():
        part = split(job.communicator(), groups, "part")  # of one name, which is for messages alone
        before = counts(job.communicator())
        for number, call in enumerate(PLANS):
            share = (number, 12 if way == "whole" else 5)
            found = values(part, job.backend.device(), call, torch.float32, share=share)
            same |= {f"{way}: {label}": bits for label, bits in found["same"].items()}
        check_counts(f"the world, after calls of {groups}", job.communicator(), before, {})
    if job.world_size == 2:
        _many_groups(job)
    return same | (_split_again(job) if job.world_size == 4 else {})


def _many_groups(job: RankJob) -> None:
    """Groups of the same ranks, each its own, two of them at once."""
    device, parts = job.backend.device(), list[Communicator]()
    with suppress(UnsupportedError):
        while len(parts) < 20:
            name = f"group {len(parts)} of many"
            parts.append(split(job.communicator(), [[*range(job.world_size)]], name))
    for part in parts:
        attempt(part, device, "all_reduce", torch.float32, Way(numel=5), times=1)
    x = torch.arange(1.0, 1.0 + len(parts[:2]), device=device)
    want = (x * job.world_size).tolist()
    pair = zip(parts, x, strict=False)
    for work in [part.all_reduce(tensor, async_op=True) for part, tensor in pair]:
        finish(work, "all_reduce in two groups of the same ranks")
    check(x.tolist() == want, f"two groups at once: {want} expected, got {x.tolist()}")
    job.communicator().close()  # and with it the groups


def _split_again(job: RankJob) -> dict[str, str]:
    """A group is split as the world is: ranks are those of the group, and then of the world."""
    device, same = job.backend.device(), dict[str, str]()
    triple = job.group("triple")
    groups = [[0], [1, 2]] if triple.world_size == 3 else [[0]]
    part = triple.split(groups, name="again")
    members = {0: (0,), 1: (1,), 2: (2, 3), 3: (2, 3)}[job.rank]
    found = (part.name, tuple(part.ranks), part.rank, part.world_size)
    want = ("again", members, members.index(job.rank), len(members))
    check(found == want, f"split of a group: (name, ranks, rank, size) {want}, got {found}")
    for call in PLANS:
        way = Way(numel=65, source=part.world_size - 1)
        same |= attempt(part, device, call, torch.float32, way)
    return same


def ask_mistakes(job: RankJob, where: str = "world") -> None:
    """What one rank can see alone is a ValueError before anything is sent; all goes on after it."""
    comm, device = job.group(where), job.backend.device()
    mistakes(comm, device)
    x = torch.ones(4, device=device)
    comm.all_reduce(x)
    check(x.tolist() == [float(comm.world_size)] * 4, f"all_reduce after mistakes: {x.tolist()}")


def mistakes(comm: Communicator, device: torch.device) -> None:
    """As :func:`ask_mistakes`, of any communicator."""
    world = comm.world_size
    x = torch.zeros(4 * world, device=device)
    images = torch.zeros(2, 4, 5, 3, device=device).permute(0, 3, 1, 2)
    calls: dict[str, Callable[[], Any]] = {
        "a tensor that is not contiguous": lambda: comm.all_reduce(x[::2]),
        "a tensor with channels last": lambda: comm.broadcast(images, 0),
        "a reduction that does not exist": lambda: comm.all_reduce(x, "mean"),  # type: ignore[arg-type]
        "a rank beyond the last": lambda: comm.broadcast(x, world),
        "a negative rank": lambda: comm.broadcast(x, -1),
        "a send to itself": lambda: comm.send(x, comm.rank),
        "a send beyond the last": lambda: comm.send(x, world),
        "parts that are not the whole": lambda: comm.all_gather(x, x[:3]),
        "sizes of other ranks": lambda: comm.reduce_scatter(x[:4], x, sizes=[4] * (world + 1)),
        "another number of tensors": lambda: comm.all_to_all([x] * (world + 1), [x] * (world + 1)),
        "a rank in no group": lambda: comm.split([[]], name="nothing"),
        "a rank in two groups": lambda: comm.split([[*range(world)], [0]], name="twice"),
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


def ask_again(job: RankJob) -> dict[str, str]:
    """The same memory call after call, of sizes up and down, types and reductions: none is kept."""
    comm, device, same = job.communicator(), job.backend.device(), dict[str, str]()
    whole = Trial(comm, device, torch.float32, "again").place(4099)
    asked = [row for row in AGAIN if comm.capabilities.supports("all_reduce", row[2], row[0])]
    for number, (reduction, numel, dtype) in enumerate(asked):
        label = f"{reduction} of {numel} {dtype} in the same memory, number {number}"
        inputs = Trial(comm, device, dtype, label).inputs(numel)
        tensor = whole[:numel].view(dtype)
        tensor.copy_(inputs[comm.rank])
        finish(comm.all_reduce(tensor, reduction, async_op=number % 2 == 0), label)
        check_joined(label, tensor, inputs, reduction)
        same[label] = digest(tensor)
    return same


def ask_on_stream(job: RankJob) -> None:
    """A call is work of the current stream: behind what is queued there, before what follows."""
    backend, comm = job.backend, job.communicator()
    x, stream = torch.zeros(1 << 20, device=backend.device()), backend.stream()
    backend.synchronize()
    with backend.use_stream(stream):
        for _ in range(20):
            x.add_(1.0)
        finish(comm.all_reduce(x, async_op=True), "all_reduce behind work of a stream")
        y = x * 2.0
    backend.synchronize()
    wrong = int((y.cpu() != 40.0 * job.world_size).sum())
    check(wrong == 0, f"all_reduce on a stream: {wrong} of {len(y)} elements are wrong")


def ask_close(job: RankJob) -> None:
    """After close() nothing can be called; a second close() is nothing; a new one works.

    What was called and waited for before has its result, though the device may not be done yet.
    """
    comm, device = job.communicator(), job.backend.device()
    y, part = torch.ones(1 << 18, device=device), job.group("again")
    comm.all_reduce(y)
    for _ in range(2):
        comm.close()
        check(comm.is_closed is True, f"is_closed after close(): {comm.is_closed!r}")
        part.close()  # after the world, or again
    wrong = int((y.cpu() != job.world_size).sum())
    check(wrong == 0, f"{wrong} elements of an all_reduce just before close() are wrong")
    x = torch.ones(3, device=device)
    expect_error(CommunicationError, "all_reduce after close()", comm.all_reduce, x)
    check(x.tolist() == [1.0] * 3, f"all_reduce after close() wrote {x.tolist()}")
    job.communicator().all_reduce(x)
    check(x.tolist() == [float(job.world_size)] * 3, f"a new communicator gave {x.tolist()}")
