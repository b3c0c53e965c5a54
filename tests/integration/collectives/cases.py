"""What ranks do in tests: called on every rank of a job, with its communicator."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anychip.comm import agree
from anychip.contract import CommunicationError, Communicator, Transfer
from tests.integration.collectives.generations import generations, left_memory, left_open  # noqa: F401
from tests.order_of_sums import pairwise

# Values of an operand, known to every rank, so that each can work out what must come.


def operand(rank: int, numel: int, dtype: str, salt: int = 0) -> np.ndarray[Any, Any]:
    draw = np.random.default_rng([rank, numel, salt])
    if dtype == "bool":
        return draw.integers(0, 2, numel).astype(bool)
    if dtype.startswith(("int", "uint")):
        return draw.integers(0, 100, numel).astype(dtype)
    wide = draw.standard_normal(numel) * 10.0 ** draw.integers(-3, 4, numel)
    return wide.astype("float64" if dtype == "float64" else "float32")


def tensor(values: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    return torch.from_numpy(values.copy()).to(getattr(torch, dtype))


def joined(world_size: int, numel: int, dtype: str, reduction: str) -> torch.Tensor:
    """The reduction of neighbours, by numpy; 16-bit floats in float32, rounded once."""
    parts = [tensor(operand(rank, numel, dtype), dtype) for rank in range(world_size)]
    narrow = dtype in ("bfloat16", "float16")
    arrays = [(part.float() if narrow else part).numpy() for part in parts]
    total = pairwise(arrays, {"max": np.maximum, "min": np.minimum}.get(reduction, np.add))
    if reduction == "avg":
        total = total / total.dtype.type(world_size)
    return torch.from_numpy(total).to(getattr(torch, dtype))


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """The same dtype and number of elements, bit for bit."""
    if got.dtype != want.dtype or got.numel() != want.numel():
        return False
    both = [t.reshape(-1).view(torch.uint8) for t in (got, want) if t.numel()]
    return not both or both[0].equal(both[1])


# Values


def reductions(
    comm: Communicator, numels: Sequence[int], dtypes: Sequence[str], kinds: Sequence[str]
) -> list[str]:
    """Reduces, whole and by uneven parts; the names of results that are not numpy's."""
    wrong = []
    for numel in numels:
        for dtype in dtypes:
            for kind in kinds:
                mine = tensor(operand(comm.rank, numel, dtype), dtype)
                want = joined(comm.world_size, numel, dtype, kind)
                kept, sizes = mine.clone(), cut(numel, comm.world_size)
                part = torch.empty(sizes[comm.rank], dtype=mine.dtype)
                comm.reduce_scatter(part, mine, kind, sizes=sizes)  # type: ignore[arg-type]
                start = sum(sizes[: comm.rank])
                if not same(part, want[start : start + sizes[comm.rank]]) or not same(mine, kept):
                    wrong.append(f"reduce_scatter {kind} {numel} {dtype}")
                comm.all_reduce(mine, kind)  # type: ignore[arg-type]
                if not same(mine, want):
                    wrong.append(f"all_reduce {kind} {numel} {dtype}")
    return wrong


def cut(numel: int, parts: int) -> list[int]:
    """Uneven sizes, the first of them 0 when there is a choice."""
    weights = [rank * rank for rank in range(parts)]
    sizes = [numel * weight // sum(weights) for weight in weights]
    sizes[-1] += numel - sum(sizes)
    return sizes


def moves(comm: Communicator, numels: Sequence[int], dtypes: Sequence[str]) -> list[str]:
    """Gathers, broadcasts, swaps; the names of results that are not what the others had."""
    wrong, size, rank = [], comm.world_size, comm.rank
    for dtype in dtypes:
        for numel in numels:
            sizes = cut(numel, size)
            whole = torch.empty(numel, dtype=getattr(torch, dtype))
            parts = [tensor(operand(r, sizes[r], dtype), dtype) for r in range(size)]
            comm.all_gather(whole, parts[rank], sizes=sizes)
            if not same(whole, torch.cat(parts)):
                wrong.append(f"all_gather {numel} {dtype}")
            inside = torch.cat(
                [p if r == rank else torch.zeros_like(p) for r, p in enumerate(parts)]
            )
            comm.all_gather(inside, inside.split(sizes)[rank], sizes=sizes)
            if not same(inside, torch.cat(parts)):
                wrong.append(f"all_gather in place {numel} {dtype}")
            for source in range(size):
                got = tensor(operand(rank, numel, dtype), dtype)
                comm.broadcast(got, source)
                if not same(got, tensor(operand(source, numel, dtype), dtype)):
                    wrong.append(f"broadcast from {source} {numel} {dtype}")
            sent = [tensor(operand(rank, numel + r, dtype, salt=r), dtype) for r in range(size)]
            came = [torch.empty(numel + rank, dtype=getattr(torch, dtype)) for _ in range(size)]
            comm.all_to_all(came, sent)
            for r in range(size):
                want = tensor(operand(r, numel + rank, dtype, salt=rank), dtype)
                if not same(came[r], want):
                    wrong.append(f"all_to_all from {r} {numel} {dtype}")
    return wrong


def reductions_in_pieces(comm: Communicator, numels: Sequence[int], piece_nbytes: int) -> list[str]:
    """Reductions that go in many more pieces than are under way at once."""
    from anychip.comm import messages

    messages.PIECE_NBYTES = piece_nbytes
    return reductions(comm, numels, ["float32", "float16"], ["avg"])


def under_way(comm: Communicator, numel: int) -> list[str]:
    """Calls under way at once, waited for from the last to the first."""
    size, rank, numels = comm.world_size, comm.rank, range(numel, numel + 6)
    reduced = [tensor(operand(rank, n, "float32"), "float32") for n in numels]
    gathered, letter, own = torch.zeros(size), torch.zeros(3), torch.full((3,), float(rank))
    works = [comm.all_reduce(each, async_op=True) for each in reduced]
    works.append(comm.all_gather(gathered, own[:1], async_op=True))
    after, before = (rank + 1) % size, (rank - 1) % size
    swap = [Transfer("send", own, after, 7), Transfer("recv", letter, before, 7)]
    works.append(comm.exchange(swap, async_op=True))
    for work in reversed(works):
        work.wait()
    wanted = [joined(size, n, "float32", "sum") for n in numels]
    wrong = [f"all_reduce {n}" for n in range(6) if not same(reduced[n], wanted[n])]
    right = gathered.tolist() == list(range(size)) and letter.tolist() == [before] * 3
    return wrong if right else [*wrong, "gathered or letter"]


def rule_of_the_suite(comm: Communicator, question: str, **arguments: Any) -> dict[str, str]:
    """What the conformance suite asks of a backend's own transport; digests alike on all ranks."""
    from anychip.conformance import rank_rules
    from anychip.conformance.rank_questions import RankJob
    from anychip_cpu.backend import CpuBackend

    store = comm.job.store  # type: ignore[attr-defined]
    job = RankJob(CpuBackend(), comm.rank, comm.world_size, store, comm)
    found: dict[str, str] | None = getattr(rank_rules, question)(job, **arguments)
    return found or {}


def in_place_parts(comm: Communicator) -> bool:
    """reduce_scatter into a part of its own input, and all_gather from it; uneven and even."""
    size, right = comm.world_size, True
    for numel, sizes in ((40_003, cut(40_003, size)), (20_000 * size, None)):
        # Integers: every order of sums gives these bits.
        mine, want = (
            tensor(operand(comm.rank, numel, "int32"), "int32"),
            joined(size, numel, "int32", "sum"),
        )
        part, wanted = (whole.split(sizes or numel // size)[comm.rank] for whole in (mine, want))
        comm.reduce_scatter(part, mine, sizes=sizes)
        right = right and same(part, wanted)
        comm.all_gather(mine, part, sizes=sizes)
        right = right and same(mine, want)
    return right


def never_blocks(comm: Communicator) -> tuple[bool, bool]:
    """Calls return before the other ranks have come: rank 0 comes when the others have returned."""
    flag = comm.job.store  # type: ignore[attr-defined]
    value = torch.ones(100_000)
    if comm.rank == 0:
        for rank in range(1, comm.world_size):
            flag.wait([f"returned/{rank}"])
    work = comm.all_reduce(value, async_op=True)
    was_done = work.is_done()
    if comm.rank > 0:
        flag.set(f"returned/{comm.rank}", b"1")
    work.wait()
    return was_done, bool((value == comm.world_size).all())


def versions(comm: Communicator) -> list[bool]:
    """Whether autograd notices that a value that it has saved was communicated into."""
    noticed = []
    for call in ("all_reduce", "broadcast", "all_gather"):
        weight = torch.ones(4, requires_grad=True)
        saved = weight * 1
        loss = (saved * saved).sum()
        if call == "all_reduce":
            comm.all_reduce(saved)
        elif call == "broadcast":
            comm.broadcast(saved, 1)
        else:
            comm.all_gather(saved, torch.ones(4 // comm.world_size))
        try:
            loss.backward()  # type: ignore[no-untyped-call]
            noticed.append(False)
        except RuntimeError:
            noticed.append(True)
    return noticed if comm.rank == 0 else [True] * 3


def twins(comm: Communicator) -> list[float]:
    """Two groups of the same ranks, whose calls the ranks begin in different orders."""
    one, two = (comm.split([[0, 1]], name=name) for name in ("one", "two"))
    values = [torch.ones(5), torch.full((5,), 10.0)]
    calls = [(one, values[0]), (two, values[1])]
    works = [
        group.all_reduce(value, async_op=True)
        for group, value in (calls if comm.rank else calls[::-1])
    ]
    for work in works:
        work.wait()
    return [value[0].item() for value in values]


def agreement(comm: Communicator, values: Sequence[str]) -> bool:
    agree(comm, "table", values[comm.rank])
    return True


def native(comm: Communicator) -> list[str]:
    """What serves a chip with collectives of its own, over gloo as if that were the chip's."""
    from anychip.comm.group import Group
    from anychip.comm.library import Library
    from anychip.contract import Membership

    job = comm.job  # type: ignore[attr-defined]
    group = Membership(comm.ranks, comm.rank, 1000, "chip")
    chip = Group(group, Library(job, group, "gloo", "cpu"), job)
    wrong = moves(chip, [1, 1001], ["float32", "int64"])
    for numel in (0, 7, 1001):
        for kind in ("sum", "max", "avg"):
            # Integers: every order of sums gives these bits.
            values = [torch.from_numpy(operand(r, numel, "int32")).float() for r in comm.ranks]
            total = torch.stack(values).amax(0) if kind == "max" else torch.stack(values).sum(0)
            want = total / comm.world_size if kind == "avg" else total
            sizes, mine = cut(numel, comm.world_size), values[comm.rank].clone()
            part = torch.empty(sizes[comm.rank])
            chip.reduce_scatter(part, mine, kind, sizes=sizes)  # type: ignore[arg-type]
            if not same(part, want.split(sizes)[comm.rank]):
                wrong.append(f"reduce_scatter {kind} {numel}")
            chip.all_reduce(mine, kind)  # type: ignore[arg-type]
            if not same(mine, want):
                wrong.append(f"all_reduce {kind} {numel}")
    if not in_place_parts(chip):
        wrong.append("parts in place")
    letter = torch.zeros(2)
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    here = torch.full((2,), float(comm.rank))
    chip.exchange([Transfer("send", here, after), Transfer("recv", letter, before)])
    pair = chip.split([[0, 1], list(range(2, comm.world_size))], name="pair")
    value = torch.ones(1)
    pair.all_reduce(value)
    if letter[0] != before or value.item() != pair.world_size:
        wrong.append("letter or pair")
    return wrong


def of_backend(comm: Communicator) -> list[Any]:
    """What backends give in a job whose default group the user has made."""
    import torch.distributed as dist

    from anychip_cpu.backend import CpuBackend

    store = dist.PrefixStore("user", comm.job.store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.world_size)
    chip = CpuBackend()
    world, value = chip.communicator(timeout_s=10), torch.ones(3)
    world.all_reduce(value)
    found = [world.rank, world.world_size, value.tolist(), chip.communicator() is world]
    world.close()
    other = chip.communicator()
    other.all_reduce(value)
    found += [world.is_closed, other is not world, value.tolist()]
    dist.all_reduce(value)  # the user's group is none of our business
    dist.destroy_process_group()
    return [*found, value.tolist()]


# Bytes


REPEATS = 5


def bytes_on_loopback(comm: Communicator, call: str, nbytes: int) -> tuple[list[int], int]:
    """Bytes that the loopback interface has seen in each of a few calls, and those of one call.

    On a busy machine the kernel sends some packets twice, which the least of several does not have.
    """
    seen = [_bytes_of_one(comm, call, nbytes) for _ in range(REPEATS)]
    return seen, comm.traffic.nbytes[call] // REPEATS


def _bytes_of_one(comm: Communicator, call: str, nbytes: int) -> int:
    numel, size = nbytes // 4, comm.world_size
    whole, part = torch.ones(numel), torch.ones(numel // size)
    comm.barrier()
    time.sleep(0.05)
    before = loopback_nbytes() if comm.rank == 0 else 0
    comm.barrier()
    if call == "all_reduce":
        comm.all_reduce(whole)
    elif call == "reduce_scatter":
        comm.reduce_scatter(part, whole)
    elif call == "all_gather":
        comm.all_gather(whole, part)
    elif call == "broadcast":
        comm.broadcast(whole, size - 1)
    elif call == "all_to_all":
        comm.all_to_all(torch.empty_like(whole).chunk(size), whole.chunk(size))
    else:
        after, ahead = (comm.rank + 1) % size, (comm.rank - 1) % size
        room = torch.empty_like(whole)
        comm.exchange([Transfer("send", whole, after), Transfer("recv", room, ahead)])
    comm.barrier()
    time.sleep(0.05)
    after_all = loopback_nbytes() if comm.rank == 0 else 0
    comm.barrier()
    return after_all - before


def loopback_nbytes() -> int:
    """Received bytes of ``lo``: what one end sent and the other got counts once."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip()[:3] == "lo:")


# Failures


def one_call(comm: Communicator, call: str, odd: int | None = None, how: str = "") -> None:
    """One call; the odd rank makes another one: shape, dtype, reduction, root or call differ; or
    makes none, or its next one first.

    A rank may be done with its part of a broadcast before the odd one comes; it is told by the
    next call.
    """
    make_call(comm, call, comm.rank == odd, how)
    comm.barrier()


def make_call(comm: Communicator, call: str, is_odd: bool, how: str) -> None:
    numel = 8 + 4 * (is_odd and how == "shape")
    dtype = torch.int32 if is_odd and how == "dtype" else torch.float32
    kind: Any = "max" if is_odd and how == "reduction" else "sum"
    size = comm.world_size
    if is_odd and how in ("call", "order"):
        comm.barrier()
    if is_odd and how in ("call", "missing"):
        return
    values = torch.ones(numel * size, dtype=dtype)
    part = torch.ones(numel, dtype=dtype)
    if call == "all_reduce":
        comm.all_reduce(values, kind)
    elif call == "reduce_scatter":
        comm.reduce_scatter(part, values, kind)
    elif call == "all_gather":
        comm.all_gather(values, part)
    elif call == "broadcast":
        comm.broadcast(values, 1 if is_odd and how == "root" else 0)
    elif call == "all_to_all":
        comm.all_to_all(list(values.chunk(size)), list(torch.ones_like(values).chunk(size)))
    elif call == "barrier":
        comm.barrier()
    elif call == "split":
        order = [list(range(size))] if not is_odd else [[rank] for rank in range(size)]
        comm.split(order, name="part")
    elif call == "exchange":
        after, before = (comm.rank + 1) % size, (comm.rank - 1) % size
        comm.exchange([Transfer("send", part, after), Transfer("recv", part.clone(), before)])


def stays_away(comm: Communicator, call: str, absent: int) -> None:
    """The absent rank does something else, for longer than the time limit."""
    comm.barrier()
    if comm.rank == absent:
        time.sleep(comm.timeout_s + 2)
        comm.barrier()
    one_call(comm, call)


def raises(comm: Communicator, absent: int) -> None:
    """A rank ends by an exception of its own, while the others wait for it."""
    comm.barrier()
    if comm.rank == absent:
        raise KeyError("a mistake of rank's own")
    comm.barrier()


def holds_the_interpreter(comm: Communicator, absent: int, hold_s: float, rest_s: float) -> bool:
    """One rank is in a call of C that no other thread of its interpreter gets past."""
    comm.barrier()
    if comm.rank == absent:
        ctypes.PyDLL(None).usleep(int(hold_s * 1e6))
    else:
        time.sleep(rest_s)
    comm.barrier()
    return True


def is_signalled(comm: Communicator, absent: int, number: int, delay_s: float) -> None:
    """The absent rank sends itself a signal, in the midst of calls that go on without end."""
    comm.barrier()
    end = time.monotonic() + delay_s
    value = torch.ones(1_000_000)
    while True:
        work = comm.all_reduce(value, "avg", async_op=True)
        if comm.rank == absent and time.monotonic() > end:
            os.kill(os.getpid(), number)
        work.wait()


def is_signalled_apart(comm: Communicator, absent: int, number: int) -> None:
    """The absent rank sends itself a signal while the others wait for one another, not for it."""
    comm.barrier()
    others = [rank for rank in range(comm.world_size) if rank != absent]
    group = comm.split([[absent], others], name="others")
    if comm.rank == absent:
        time.sleep(0.1)
        os.kill(os.getpid(), number)
    if comm.rank == others[0]:
        time.sleep(3)  # the others wait for this one, which is alive
    group.barrier()


def aborts(comm: Communicator, absent: int) -> None:
    """One rank gives up; the others wait for it in a group that it is not in, or compute."""
    others = [r for r in range(comm.world_size) if r != absent]
    group = comm.split([[absent], others], name="others")
    if comm.rank == absent:
        time.sleep(0.2)
        comm.abort("the loss is not finite")
        comm.barrier()
    if comm.rank == others[0]:
        time.sleep(0.5)
    group.all_reduce(torch.ones(1))
    comm.barrier()


def unchecked(comm: Communicator) -> bool:
    """Without the comparison calls work all the same."""
    value = torch.ones(5)
    comm.all_reduce(value)
    comm.all_reduce(value)
    return bool((value == comm.world_size**2).all())


def many_calls(comm: Communicator, count: int) -> tuple[int, int]:
    """Keys in the store after some calls, and after many."""
    store, value, numbers = comm.job.store, torch.ones(1), []  # type: ignore[attr-defined]
    for calls in (200, count):
        for _ in range(calls):
            comm.all_reduce(value)
        comm.barrier()
        numbers.append(store.num_keys())
        comm.barrier()
    return numbers[0], numbers[1]


def left_after_close(comm: Communicator, absent: int | None = None) -> list[str]:
    """What is left of ours after close, with work that was under way, or when a rank was killed."""
    comm.all_reduce(torch.ones(100_000), async_op=True).wait()
    comm.barrier()
    if absent is not None:
        with contextlib.suppress(CommunicationError):
            is_signalled(comm, absent, int(signal.SIGKILL), 0.1)
    elif comm.rank == 0:
        comm.all_reduce(torch.ones(100_000), async_op=True)  # nobody else comes
    comm.close()
    comm.close()
    return [*left_open()[1], *left_memory()]


def ends_without_close(comm: Communicator) -> bool:
    """The end of the interpreter has to close what is open: a call under way among it."""
    comm.barrier()
    # A rank that comes late finds another's interpreter at its end, and is told so.
    with contextlib.suppress(CommunicationError):
        comm.all_gather(torch.empty(comm.world_size), torch.ones(1), async_op=True)
    return True
