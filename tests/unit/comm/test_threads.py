"""Are ranks as threads what ranks as processes are: values, counts, failures?"""

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anychip.comm.ledger import Check
from anychip.comm.threads import run_ranks
from anychip.contract import CommunicationError, Communicator, Transfer, UnsupportedError
from tests.order_of_sums import pairwise


def operand(rank: int, numel: int) -> torch.Tensor:
    draw = np.random.default_rng([rank, numel])
    values = draw.standard_normal(numel) * 10.0 ** draw.integers(-3, 4, numel)
    return torch.from_numpy(values.astype(np.float32))


def joined(world_size: int, numel: int) -> np.ndarray[Any, Any]:
    total: np.ndarray[Any, Any] = pairwise([operand(r, numel).numpy() for r in range(world_size)])
    return total


def sizes_of(numel: int, world_size: int) -> list[int]:
    """Uneven, with an empty one when there is a choice."""
    cuts = [numel * rank * rank // world_size**2 for rank in range(world_size + 1)]
    return [end - start for start, end in itertools.pairwise(cuts)]


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@settings(max_examples=25)
@given(world_size=st.integers(2, 5), numel=st.integers(0, 40_000))
def test_collectives_of_any_size_equal_numpy(staged: bool, world_size: int, numel: int) -> None:
    want, sizes = joined(world_size, numel), sizes_of(numel, world_size)

    def work(comm: Communicator) -> tuple[Any, ...]:
        reduced, mine = operand(comm.rank, numel), operand(comm.rank, numel)
        comm.all_reduce(reduced)
        part = torch.empty(sizes[comm.rank])
        comm.reduce_scatter(part, mine, "avg", sizes=sizes)
        gathered = torch.empty(numel)
        comm.all_gather(gathered, part, sizes=sizes)
        sent = operand(comm.rank, numel)
        comm.broadcast(sent, world_size - 1)
        ring = torch.full((3,), -1.0)
        after, before = (comm.rank + 1) % world_size, (comm.rank - 1) % world_size
        here = torch.full((3,), float(comm.rank))
        comm.exchange([Transfer("recv", ring, before, 4), Transfer("send", here, after, 4)])
        swapped = [torch.empty(comm.rank + 1) for _ in range(world_size)]
        comm.all_to_all(
            swapped, [torch.full((r + 1,), float(comm.rank)) for r in range(world_size)]
        )
        return reduced, gathered, sent, ring, swapped

    for rank, (reduced, gathered, sent, ring, swapped) in enumerate(
        run_ranks(world_size, work, staged="cpu" if staged else None)
    ):
        assert reduced.numpy().tobytes() == want.tobytes()
        assert gathered.numpy().tobytes() == (want / np.float32(world_size)).tobytes()
        assert torch.equal(sent, operand(world_size - 1, numel))
        assert ring.tolist() == [(rank - 1) % world_size] * 3
        assert [s.tolist() for s in swapped] == [[float(r)] * (rank + 1) for r in range(world_size)]


@pytest.mark.parametrize("inner", [2, 4])
def test_eight_ranks_sum_alike_at_once_and_by_groups_of_neighbours(inner: int) -> None:
    def work(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        at_once, by_groups = operand(comm.rank, 1000), operand(comm.rank, 1000)
        comm.all_reduce(at_once)
        rows = [list(range(first, first + inner)) for first in range(0, 8, inner)]
        comm.split(rows, name="inner").all_reduce(by_groups)
        columns = [list(column) for column in zip(*rows, strict=True)]
        comm.split(columns, name="outer").all_reduce(by_groups)
        return at_once, by_groups

    for at_once, by_groups in run_ranks(8, work):
        assert torch.equal(at_once, by_groups)


@pytest.mark.parametrize("check", ["always", "step"])
def test_two_groups_of_the_same_ranks_take_calls_in_any_order(check: Check) -> None:
    def work(comm: Communicator) -> list[float]:
        pairs = [(comm.split([[0, 1, 2]], name=n), torch.full((3,), 1.0 + i))
                 for i, n in enumerate("ab")]  # fmt: skip
        for _ in range(5):
            order = pairs[:: 1 - 2 * (comm.rank % 2)]
            for call in [group.all_reduce(tensor, async_op=True) for group, tensor in order]:
                call.wait()
        return [tensor[0].item() for _, tensor in pairs]

    assert run_ranks(3, work, check=check) == [[3.0**5, 2 * 3.0**5]] * 3


def test_rank_that_ends_without_a_wait_does_its_part_of_what_it_has_begun() -> None:
    def work(comm: Communicator) -> list[float]:
        tensors = [torch.full((5,), comm.rank + 1.0) for _ in range(3)]
        if comm.rank == 0:
            time.sleep(0.2)
        calls = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
        if comm.rank == 0:
            for call in calls:
                call.wait()
        return [tensor[0].item() for tensor in tensors]

    assert run_ranks(3, work)[0] == [6.0] * 3


@pytest.mark.parametrize("staged", [None, "cpu"], ids=["direct", "staged"])
def test_traffic_counts_each_rank_and_group_apart(staged: str | None) -> None:
    def work(comm: Communicator) -> list[dict[str, int]]:
        pair = comm.split([[0, 1], [2, 3]], name="pair")
        pair.all_reduce(torch.zeros(10))
        if comm.rank == 0:
            comm.send(torch.zeros(3), 3)
        if comm.rank == 3:
            comm.recv(torch.zeros(3), 0)
        return [dict(comm.traffic.nbytes), dict(pair.traffic.nbytes), dict(pair.traffic.calls)]

    found = run_ranks(4, work, staged=staged)
    assert found[0] == [{"send": 12}, {"all_reduce": 40}, {"all_reduce": 1}]
    assert found[3] == [{"recv": 12}, {"all_reduce": 40}, {"all_reduce": 1}]
    assert found[1] == [{}, {"all_reduce": 40}, {"all_reduce": 1}]


def test_work_is_done_before_and_after_it_was_waited_for() -> None:
    def work(comm: Communicator) -> list[bool]:
        value, letter = torch.ones(4), torch.zeros(1)
        works = [comm.all_reduce(value, async_op=True)]
        peer = 1 - comm.rank
        works.append(comm.recv(letter, peer, async_op=True))
        before = [w.is_done() for w in works] if comm.rank == 0 else [False]
        comm.barrier()
        comm.send(torch.ones(1), peer)
        while not all(w.is_done() for w in works):  # another thread moves them, when it comes to it
            time.sleep(0.001)
        for w in works:
            w.wait()
            w.wait()
        return [
            not before[-1], *(w.is_done() for w in works), value[0].item() == 2,
            letter.item() == 1,
        ]  # fmt: skip

    assert run_ranks(2, work) == [[True] * 5] * 2


MISTAKES: dict[str, tuple[Callable[[Communicator], object], str]] = {
    "shape": (lambda c: c.all_reduce(torch.ones(3 + c.rank // 2)),
              "ranks 0, 1: all_reduce sum (3,)"),
    "dtype": (lambda c: c.all_reduce(torch.ones(3, dtype=torch.float64 if c.rank == 2 else None)),
              "rank 2: all_reduce sum (3,) torch.float64"),
    "reduction": (lambda c: c.all_reduce(torch.ones(3), "max" if c.rank == 2 else "sum"),
                  "rank 2: all_reduce max (3,)"),
    "call": (lambda c: c.barrier() if c.rank == 2 else c.all_reduce(torch.ones(3)),
             "rank 2: barrier"),
    "order": (lambda c: (c.rank == 2 or c.barrier(), c.all_reduce(torch.ones(3)), c.barrier()),
              "ranks 0, 1: barrier; rank 2: all_reduce sum (3,)"),
    "missing": (lambda c: (c.rank == 2 or c.all_gather(torch.ones(6), torch.ones(2)), c.barrier()),
                "ranks 0, 1: all_gather [2, 2, 2] torch.float32; rank 2: barrier"),
    # Who is done with its part before the odd one comes is told by the next call.
    "root": (lambda c: (c.broadcast(torch.ones(3), c.rank // 2), c.barrier()),
             "rank 2: broadcast from rank 1"),
}  # fmt: skip


def errors_of(world_size: int, call: Callable[[Communicator], object], **more: Any) -> list[Any]:
    """The error of each rank, None for one that has none."""
    errors: list[Any] = [None] * world_size

    def work(comm: Communicator) -> None:
        try:
            call(comm)
        except CommunicationError as error:
            errors[comm.rank] = error

    run_ranks(world_size, work, **more)
    return errors


@pytest.mark.parametrize("staged", [None, "cpu"], ids=["direct", "staged"])
@pytest.mark.parametrize("check", ["always", "step"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_call_that_one_rank_makes_differently_fails_on_all(
    mistake: str, check: str, staged: str | None
) -> None:
    call, told = MISTAKES[mistake]
    for rank, error in enumerate(errors_of(3, call, check=check, heartbeat_s=0.1, staged=staged)):
        assert str(error).startswith(f"world, rank {rank} of 3: ")
        assert "the ranks disagree in call #1: " in str(error)
        assert told in str(error)
        assert error.ranks == (2,)


def test_rank_that_has_ended_is_named_on_all_others() -> None:
    errors = errors_of(3, lambda comm: None if comm.rank == 0 else comm.barrier())
    assert errors[0] is None
    assert "barrier #1: rank 0 ended without making this call" in str(errors[1])
    assert [error.ranks for error in errors[1:]] == [(0,)] * 2


def test_failing_rank_ends_groups_that_it_is_not_in() -> None:
    errors: dict[int, CommunicationError] = {}
    all_have_split = threading.Barrier(3)

    def work(comm: Communicator) -> None:
        group = comm.split([[0], [1, 2]], name="others")
        all_have_split.wait()
        try:
            if comm.rank == 0:
                raise ArithmeticError("not finite")
            if comm.rank == 1:
                group.barrier()
            time.sleep(0.3)
        except CommunicationError as error:
            errors[comm.rank] = error
            raise

    with pytest.raises(ArithmeticError, match="not finite"):
        run_ranks(3, work)
    # Rank 1 may be late enough to be told before it has made its call.
    told = str(errors[1]).replace("barrier #1", "barrier")
    assert told == "others, rank 0 of 2: barrier: rank 0 ended with ArithmeticError: not finite"


def test_abort_and_close_are_told_by_every_later_call() -> None:
    def call(comm: Communicator) -> None:
        group = comm.split([[0, 1]], name="both")
        if comm.rank == 0:
            comm.abort("enough")
            comm.abort("never mind")
        for again in (group.barrier, comm.barrier):
            with pytest.raises(CommunicationError, match="rank 0 aborted: enough"):
                again()
        with pytest.raises(CommunicationError, match="rank 0 aborted: enough"):
            comm.send(torch.ones(1), 1 - comm.rank)

    assert errors_of(2, call) == [None, None]

    def closed(comm: Communicator) -> None:
        comm.close()
        comm.close()
        comm.barrier()

    assert all("this rank has closed" in str(error) for error in errors_of(2, closed))


@pytest.mark.parametrize(("call", "error", "told"), [
    (lambda c: c.all_reduce(torch.ones(4, 4).t()), ValueError, "a contiguous tensor expected"),
    (lambda c: c.all_reduce(torch.ones(1), "mean"), ValueError, "got 'mean'"),
    (lambda c: c.all_reduce(torch.ones(1).bool()), UnsupportedError, "torch.bool"),
    (lambda c: c.all_reduce(torch.ones(1).int(), "avg"), UnsupportedError, "'avg'"),
    (lambda c: c.broadcast(torch.ones(1), 2), ValueError, "source from 0 to 1 expected, got 2"),
    (lambda c: c.send(torch.ones(1), c.rank), ValueError, "another rank expected"),
    (lambda c: c.all_gather(torch.ones(3), torch.ones(1)), ValueError, r"\[1, 1\] elements"),
    (lambda c: c.reduce_scatter(torch.ones(1), torch.ones(2), sizes=[2, 0]), ValueError,
     r"\[2, 0\] elements"),
    (lambda c: c.all_to_all([torch.ones(1)], [torch.ones(1)]), ValueError, "one tensor per"),
    (lambda c: c.split([[0]], name="x"), ValueError, "each rank from 0 to 1 once"),
])  # fmt: skip
def test_mistake_that_one_rank_can_see_raises_before_anything_is_sent(
    call: Callable[[Communicator], object], error: type[Exception], told: str
) -> None:
    def work(comm: Communicator) -> int:
        with pytest.raises(error, match=told):
            call(comm)
        comm.barrier()
        return sum(comm.traffic.calls.values())

    assert run_ranks(2, work) == [1, 1]
