"""Ranks as threads of one process: what algorithms are tested with first, and debugged with.

``run_ranks(4, work)`` calls ``work(comm)`` in four threads and returns the four results. Each has
a communicator of its own, one intra-op thread, and autograd that runs backward in the thread that
asked for it; a generator that ranks share would make their draws depend on the order of threads,
so that ``work`` seeds its own. All but what moves the messages is that of processes.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from anychip.comm.group import Group
from anychip.comm.job import Job
from anychip.comm.ledger import Failure
from anychip.comm.staged import Staged
from anychip.contract import CommunicationError, Communicator, Transport

if TYPE_CHECKING:
    import torch

    from anychip.comm.messages import Messages
    from anychip.contract import Membership

T = TypeVar("T")


def run_ranks(
    world_size: int,
    work: Callable[[Communicator], T],
    *,
    timeout_s: float = 60.0,
    staged: str | None = None,
    **settings: Any,
) -> list[T]:
    """Calls ``work`` once per rank, each in a thread, and returns what they returned.

    Args:
        timeout_s: of every call that waits for another rank.
        staged: torch's device type of tensors that go through the host; None: they are there.
        settings: others of :class:`~anychip.comm.job.Job`.

    Raises:
        Exception: what the first rank to fail raised; the others are told and end too.
    """
    _trace_once()
    hall = _Hall()
    results: list[Any] = [None] * world_size
    errors: list[tuple[float, int, BaseException]] = []

    def body(rank: int) -> None:
        job = hall.job(rank, world_size, timeout_s=timeout_s, **settings)
        transport: Transport = job.host(job.world)
        if staged is not None:
            transport = Staged(transport, staged)
        try:
            results[rank] = _as_rank(Group(job.world, transport, job), work)
        except BaseException as error:
            errors.append((time.monotonic(), rank, error))
            hall.fail(Failure((rank,), f"rank {rank} ended with {type(error).__name__}: {error}"))
        finally:
            job.close()

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


def _trace_once() -> None:
    """A torch 2.11 with support for a device that is not here keeps what stands in for it with the
    thread that first traces, and frees it when that one ends; this one outlives the ranks. Others
    need not wait for what torch imports for this, which takes seconds.
    """
    import torch

    if torch.accelerator.current_accelerator() is None or torch.accelerator.is_available():
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        pass


def _as_rank(comm: Communicator, work: Callable[[Communicator], T]) -> T:
    import torch

    torch.set_num_threads(1)
    with torch.autograd.set_multithreading_enabled(False):
        return work(comm)


class _Hall:
    """What the ranks of a job share: messages that have one end so far, and who has gone."""

    def __init__(self) -> None:
        from torch._C._distributed_c10d import HashStore

        self.lock, self.settled = threading.Lock(), threading.Event()
        self.store = HashStore()
        self.gone: set[int] = set()
        self.failure: Failure | None = None
        self._waiting: dict[tuple[int, int, int], tuple[deque[_Message], deque[_Message]]] = {}
        self._told: list[tuple[Callable[[Failure], None], Callable[[str], None]]] = []

    def job(self, rank: int, world_size: int, **settings: Any) -> Job:
        seat = _Seat(self, rank)

        def news(
            on_failure: Callable[[Failure], None], on_question: Callable[[str], None]
        ) -> _Seat:
            self._told.append((on_failure, on_question))
            return seat

        settings |= {"news": news, "connect": lambda store: seat}
        return Job(rank, world_size, self.store, **settings)

    def fail(self, failure: Failure) -> Failure:
        """Ends the job for all ranks; the first reason stays, and is returned."""
        with self.lock:
            is_first = self.failure is None
            self.failure = self.failure or failure
            self._end(lambda ranks: True)
        self.settled.set()
        for on_failure, _ in list(self._told) if is_first else ():
            on_failure(self.failure)
        return self.failure

    def ask(self, question: str) -> None:
        """Puts a question to all ranks that have come."""
        for _, on_question in list(self._told):
            on_question(question)

    def leave(self, rank: int) -> None:
        """A rank has ended, and with it the messages that wait for it."""
        with self.lock:
            self.gone.add(rank)
            self._end(lambda ranks: rank in ranks)

    def _end(self, concerns: Callable[[tuple[int, int]], bool]) -> None:
        for (source, destination, _), ends in self._waiting.items():
            for message in (m for end in ends for m in end if concerns((source, destination))):
                message.end(is_lost=True)

    def post(self, message: _Message, source: int, destination: int, tag: int) -> _Message:
        """Takes one end of a message; who brings the second one moves it."""
        with self.lock:
            ends = self._waiting.setdefault((source, destination, tag), (deque(), deque()))
            own, other = ends[message.is_send], ends[not message.is_send]
            if self.failure is not None or self.gone & {source, destination}:
                message.end(is_lost=True)
                return message
            if not other:
                own.append(message)
                return message
            first = other.popleft()
        message.meet(first)
        return message


class _Message:
    """One end of a message: what is sent, or where it goes."""

    def __init__(self, tensor: torch.Tensor, *, is_send: bool) -> None:
        self.tensor, self.is_send = tensor, is_send
        self._done, self._is_lost = threading.Event(), False

    def end(self, *, is_lost: bool) -> None:
        self._is_lost = is_lost
        self._done.set()

    def meet(self, other: _Message) -> None:
        """Moves the bytes past autograd, as a network does; who waits for the call tells it."""
        source, room = (self, other) if self.is_send else (other, self)
        size = min(source.tensor.nbytes, room.tensor.nbytes)
        ctypes.memmove(room.tensor.data_ptr(), source.tensor.data_ptr(), size)
        for end in (self, other):
            end.end(is_lost=False)

    def wait(self, timeout: timedelta) -> bool:
        if not self._done.wait(timeout.total_seconds()):
            raise RuntimeError("the time is over")
        if self._is_lost:
            raise RuntimeError("the other end is gone")
        return True


class _Seat:
    """A rank's end of the hall: connections like :class:`~anychip.comm.gloo.Gloo`'s, and news like
    :class:`~anychip.comm.liveness.Liveness`'s."""

    description = "threads of one process, reduced pairwise in rank order"

    def __init__(self, hall: _Hall, rank: int) -> None:
        self._hall, self._rank = hall, rank
        self.gone, self.report, self.ask = hall.gone, hall.fail, hall.ask

    def transport(self, group: Membership, timeout_s: float) -> Messages:
        from anychip.comm.messages import Messages

        return Messages(self, group, timeout_s)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Message:
        return self._hall.post(_Message(tensors[0], is_send=True), self._rank, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Message:
        return self._hall.post(_Message(tensors[0], is_send=False), peer, self._rank, tag)

    @property
    def failure(self) -> Failure | None:
        return self._hall.failure

    def verdict(self, wait_s: float) -> Failure | None:
        self._hall.settled.wait(wait_s)
        return self._hall.failure

    def abort(self) -> None:
        self._hall.leave(self._rank)

    close = abort
