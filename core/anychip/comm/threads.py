"""Ranks as threads of one process: what algorithms are tested with first, and debugged with.

``run_ranks(4, work)`` calls ``work(comm)`` in four threads and returns the four results. Each has
a communicator of its own, one intra-op thread, and autograd that runs backward in the thread that
asked for it; a generator that ranks share would make their draws depend on the order of threads,
so that ``work`` seeds its own. Reductions have the bits of those between processes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from anychip.comm.ledger import disagreement, ranks_text
from anychip.comm.reduction import host_capabilities, reduce_in_order
from anychip.comm.solo import alone
from anychip.contract.communicator import (
    DONE,
    Capabilities,
    Communicator,
    Reduction,
    Traffic,
    Transfer,
    Work,
)
from anychip.contract.errors import CommunicationError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def run_ranks(
    world_size: int, work: Callable[[Communicator], T], *, timeout_s: float = 60.0
) -> list[T]:
    """Calls ``work`` once per rank, each in a thread, and returns what they returned.

    Args:
        timeout_s: of every call that waits for another rank.

    Raises:
        Exception: what the first rank to fail raised; the others are told and end too.
    """
    hall = _Hall(timeout_s)
    room = _Room(hall, "world", tuple(range(world_size)))
    results: list[Any] = [None] * world_size
    errors: list[tuple[float, int, BaseException]] = []

    def body(rank: int) -> None:
        try:
            results[rank] = _as_rank(room.communicator(rank), work)
        except BaseException as error:
            errors.append((time.monotonic(), rank, error))
            hall.fail((rank,), f"rank {rank} ended with {type(error).__name__}: {error}")
        finally:
            hall.leave(rank)

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank {rank}")
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # What another rank's failure made fail is not what the reader has to know first.
        own = [entry for entry in errors if not isinstance(entry[2], CommunicationError)]
        raise min(own or errors, key=lambda entry: entry[0])[2]
    return results


def _as_rank(comm: Communicator, work: Callable[[Communicator], T]) -> T:
    import torch

    torch.set_num_threads(1)
    with torch.autograd.set_multithreading_enabled(False):
        return work(comm)


class _Post(NamedTuple):
    """What a rank brings to a call: its text, alike on all ranks, and its tensors' values."""

    call: str
    tensors: tuple[torch.Tensor, ...]


class _Hall:
    """What the groups of a job share. One condition guards everything, in every group."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.changed = timeout_s, threading.Condition()
        self.gone: set[int] = set()
        self.failure: tuple[tuple[int, ...], str] | None = None

    def fail(self, ranks: tuple[int, ...], reason: str) -> tuple[tuple[int, ...], str]:
        """Ends the job for all ranks; the first reason stays, and is returned."""
        with self.changed:
            self.failure = self.failure or (ranks, reason)
            self.changed.notify_all()
            return self.failure

    def leave(self, rank: int) -> None:
        """A rank, counted in the world, has ended."""
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()


class _Room:
    """Where the ranks of one group meet."""

    def __init__(self, hall: _Hall, name: str, ranks: tuple[int, ...]) -> None:
        self.hall, self.name, self.ranks = hall, name, ranks
        self.posts: dict[int, dict[int, _Post]] = {}
        self.taken: dict[int, int] = {}
        self.mail: dict[tuple[int, int, int], deque[torch.Tensor]] = {}
        self.children: dict[tuple[int, int], _Room] = {}
        self.closed: set[int] = set()

    def communicator(self, rank: int) -> ThreadCommunicator:
        return ThreadCommunicator(self, rank)

    def close(self, rank: int) -> None:
        with self.hall.changed:
            self.closed.add(rank)
            self.hall.changed.notify_all()

    def error(self, where: str, ranks: Sequence[int], what: str) -> CommunicationError:
        """Ends the job because of some ranks of this group; the error to raise here."""
        world = tuple(self.ranks[rank] for rank in ranks)
        found, reason = self.hall.fail(world, f"{ranks_text(world)} {what}")
        return CommunicationError(where, reason, ranks=found)

    def wait_for(
        self, where: str, ready: Callable[[], bool], missing: Callable[[], list[int]]
    ) -> None:
        """Waits, with the condition held, until ``ready``; raises when that cannot be any more."""
        deadline = time.monotonic() + self.hall.timeout_s
        while not ready():
            self.refuse_after_failure(where)
            gone = [r for r in missing() if r in self.closed or self.ranks[r] in self.hall.gone]
            if gone:
                raise self.error(where, gone, "ended without making this call")
            if not self.hall.changed.wait(deadline - time.monotonic()) and not ready():
                what = f"did not come within {self.hall.timeout_s:g} s"
                raise self.error(where, missing(), what)

    def refuse_after_failure(self, where: str) -> None:
        if self.hall.failure is not None:
            ranks, reason = self.hall.failure
            raise CommunicationError(where, reason, ranks=ranks)


class _Meeting(Work):
    """A collective: every rank has posted its tensors, then each computes its own outputs."""

    def __init__(
        self,
        comm: ThreadCommunicator,
        where: str,
        number: int,
        finish: Callable[[dict[int, _Post]], None],
    ) -> None:
        self.comm, self.where, self.number, self.finish = comm, where, number, finish
        self.posts, self.done = comm.room.posts[number], False

    def is_done(self) -> bool:
        with self.comm.room.hall.changed:
            failed = self.comm.room.hall.failure is not None
            return self.done or failed or len(self.posts) == self.comm.world_size

    def wait(self) -> None:
        if self.done:
            return
        room, size = self.comm.room, self.comm.world_size
        with room.hall.changed:
            room.wait_for(
                self.where,
                lambda: len(self.posts) == size,
                lambda: [rank for rank in range(size) if rank not in self.posts],
            )
            room.taken[self.number] = room.taken.get(self.number, 0) + 1
            if room.taken[self.number] == size:
                del room.posts[self.number], room.taken[self.number]
        self._compare()
        self.finish(self.posts)
        self.done, self.posts = True, {}

    def _compare(self) -> None:
        calls = {self.comm.ranks[r]: self.posts[r].call for r in sorted(self.posts)}
        if len(set(calls.values())) > 1:
            failure = self.comm.room.hall.fail(*disagreement(self.number, calls))
            raise CommunicationError(self.where, failure[1], ranks=failure[0])


class _Messages(Work):
    """The receives of a grouped exchange, in order; sends were done when they were posted."""

    def __init__(self, comm: ThreadCommunicator, receives: Sequence[Transfer]) -> None:
        self.comm, self.receives = comm, deque(receives)

    def _box(self, transfer: Transfer) -> deque[torch.Tensor]:
        key = (transfer.peer, self.comm.rank, transfer.tag)
        return self.comm.room.mail.setdefault(key, deque())

    def is_done(self) -> bool:
        hall = self.comm.room.hall
        with hall.changed:
            return hall.failure is not None or all(self._box(t) for t in self.receives)

    def wait(self) -> None:
        while self.receives:
            self._take(self.receives[0])
            self.receives.popleft()

    def _take(self, transfer: Transfer) -> None:
        comm, (_, tensor, peer, tag) = self.comm, transfer
        where = comm.where(f"recv from rank {comm.ranks[peer]}")
        with comm.room.hall.changed:
            box = self._box(transfer)
            comm.room.wait_for(where, lambda: bool(box), lambda: [peer])
            message = box.popleft()
        if message.shape != tensor.shape or message.dtype != tensor.dtype:
            what = (
                f"sends {tuple(message.shape)} {message.dtype} to rank {comm.ranks[comm.rank]}, "
                f"which expects {tuple(tensor.shape)} {tensor.dtype} (tag {tag})"
            )
            raise comm.room.error(where, [peer], what)
        _write(tensor, message)


class ThreadCommunicator(Communicator):
    """One rank's end of a :func:`run_ranks` group, or of a part of it.

    ``send`` takes a copy and returns at once. A call that differs between the ranks is noticed
    when it is waited for.
    """

    description = "threads of one process, reduced in rank order"

    def __init__(self, room: _Room, rank: int) -> None:
        self.room, self.rank, self.world_size = room, rank, len(room.ranks)
        self.name, self.ranks, self.timeout_s = room.name, room.ranks, room.hall.timeout_s
        self.traffic = Traffic()
        self._count = 0

    def where(self, call: str) -> str:
        """Group, rank and call, for messages."""
        return f"{self.name}, rank {self.rank} of {self.world_size}: {call}"

    @property
    def capabilities(self) -> Capabilities:
        return host_capabilities()

    def abort(self, reason: str) -> None:
        world = self.ranks[self.rank]
        self.room.hall.fail((world,), f"rank {world} aborted: {reason}")

    def close(self) -> None:
        self.is_closed = True
        self.room.close(self.rank)

    def _meet(
        self,
        call: str,
        what: str,
        tensors: Sequence[torch.Tensor],
        finish: Callable[[dict[int, _Post]], None],
    ) -> Work:
        self._refuse(self.where(call))
        self._count += 1
        number = self._count
        post = _Post(f"{call} {what}".rstrip(), tuple(t.detach().clone() for t in tensors))
        with self.room.hall.changed:
            self.room.posts.setdefault(number, {})[self.rank] = post
            self.room.hall.changed.notify_all()
            return _Meeting(self, self.where(f"{call} #{number}"), number, finish)

    def _refuse(self, where: str) -> None:
        self.room.refuse_after_failure(where)
        if self.is_closed:
            raise CommunicationError(where, "this rank has closed the communicator")

    def _all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> Work:
        def finish(posts: dict[int, _Post]) -> None:
            parts = [posts[r].tensors[0].view(-1) for r in range(len(posts))]
            reduce_in_order(tensor.detach().view(-1), parts, reduction)

        what = f"{reduction} {tuple(tensor.shape)} {tensor.dtype}"
        return self._meet("all_reduce", what, [tensor], finish)

    def _all_gather(self, output: torch.Tensor, tensor: torch.Tensor, sizes: Sequence[int]) -> Work:
        import torch

        def finish(posts: dict[int, _Post]) -> None:
            parts = [posts[r].tensors[0].view(-1) for r in range(len(posts))]
            _write(output.view(-1), torch.cat(parts))

        return self._meet("all_gather", f"{list(sizes)} {tensor.dtype}", [tensor], finish)

    def _reduce_scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        reduction: Reduction,
        sizes: Sequence[int],
    ) -> Work:
        def finish(posts: dict[int, _Post]) -> None:
            start = sum(sizes[: self.rank])
            end = start + sizes[self.rank]
            parts = [posts[r].tensors[0].view(-1)[start:end] for r in range(len(posts))]
            reduce_in_order(output.detach().view(-1), parts, reduction)

        what = f"{reduction} {list(sizes)} {tensor.dtype}"
        return self._meet("reduce_scatter", what, [tensor], finish)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        def finish(posts: dict[int, _Post]) -> None:
            if source != self.rank:
                _write(tensor, posts[source].tensors[0])

        what = f"from rank {self.ranks[source]} {tuple(tensor.shape)} {tensor.dtype}"
        return self._meet("broadcast", what, [tensor], finish)

    def _all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Work:
        def finish(posts: dict[int, _Post]) -> None:
            for r, output in enumerate(outputs):
                part = posts[r].tensors[self.rank]
                if part.numel() != output.numel():
                    what = (
                        f"sends {part.numel()} elements to rank {self.ranks[self.rank]}, which has "
                        f"room for {output.numel()}"
                    )
                    raise self.room.error(self.where("all_to_all"), [r], what)
                _write(output.view(-1), part.view(-1))

        return self._meet("all_to_all", str(outputs[0].dtype), inputs, finish)

    def _exchange(self, transfers: Sequence[Transfer]) -> Work:
        self._refuse(self.where("exchange"))
        with self.room.hall.changed:
            for kind, tensor, peer, tag in transfers:
                if kind == "send":
                    box = self.room.mail.setdefault((self.rank, peer, tag), deque())
                    box.append(tensor.detach().clone())
            self.room.hall.changed.notify_all()
        receives = [transfer for transfer in transfers if transfer.kind == "recv"]
        return _Messages(self, receives) if receives else DONE

    def _barrier(self) -> None:
        self._meet("barrier", "", [], lambda posts: None).wait()

    def _split(self, groups: Sequence[tuple[int, ...]], name: str) -> Communicator:
        what = f"{name} {[list(group) for group in groups]}"
        self._meet("split", what, [], lambda posts: None).wait()
        number = next(i for i, group in enumerate(groups) if self.rank in group)
        ranks = tuple(self.ranks[rank] for rank in groups[number])
        if len(ranks) == 1:
            return alone(name=name, world_rank=ranks[0])
        with self.room.hall.changed:
            key = (self._count, number)
            if key not in self.room.children:
                self.room.children[key] = _Room(self.room.hall, name, ranks)
            room = self.room.children[key]
        return room.communicator(groups[number].index(self.rank))


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    import torch

    with torch.no_grad():
        tensor.copy_(values)
