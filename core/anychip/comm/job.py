"""The processes of a job: how they meet, what joins them, and how they end together.

A :class:`Job` holds what all groups of a process share: the store, the connections of the host
(one gloo context, full mesh) and the side channel. When one rank fails, all connections of all
ranks are closed, so that no call waits for what cannot come.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from anychip.comm.ledger import ranks_text
from anychip.comm.meeting import meet
from anychip.contract.errors import CommunicationError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Check = Literal["always", "off"]

_BREAK_TAG = 2**31 - 1
_NEWS_S = 3.0
"""How long a rank whose connection broke waits to hear which rank is to blame."""
_generation = itertools.count()
_jobs: weakref.WeakSet[Job] = weakref.WeakSet()


class Failure(NamedTuple):
    """Why a job cannot go on: the ranks at fault, counted in the world, and what they did."""

    ranks: tuple[int, ...]
    reason: str


class Rendezvous(NamedTuple):
    """What a launcher gives each of its processes.

    Attributes:
        address: of this machine, at which its ranks listen.
        side_channel: what tells ranks of each other, :class:`anychip.comm.liveness.Liveness`, but
            for what it gets here.
    """

    store: Store
    rank: int
    world_size: int
    address: str
    side_channel: Callable[..., Any]


def part_of(store: Store, prefix: str) -> Store:
    """A part of a store with keys of its own."""
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(prefix, store)


class Job:
    """This process's part in a job of several.

    Args:
        place: what the launcher gives.
        timeout_s: seconds that any wait for another rank may take.
        heartbeat_s: seconds of silence after which a rank counts as lost.
        check: ``always``: ranks compare their calls before anything is sent; ``off``: they do
            not, and calls that differ end in a time limit, or a crash.

    Raises:
        CommunicationError: a rank did not come within the time limit.
    """

    def __init__(
        self, place: Rendezvous, *, timeout_s: float, heartbeat_s: float, check: Check
    ) -> None:
        import torch.distributed as dist

        self.rank, self.world_size = place.rank, place.world_size
        self.timeout_s, self.check = timeout_s, check
        # Each job of a process has keys of its own; every rank counts its jobs alike.
        store, self._store_socket = _own_connection(place.store)
        self.store = part_of(store, f"anychip/{next(_generation)}")
        self.where = f"world, rank {self.rank} of {self.world_size}"
        self._breaks: list[Callable[[], None]] = []
        self._before_close: list[Callable[[], None]] = []
        self._on_close: list[Callable[[], None]] = []
        self._closed = False
        meet(
            self.store,
            self.rank,
            self.world_size,
            timeout_s=timeout_s,
            where=f"{self.where}: start",
        )
        self.liveness = place.side_channel(
            self.store,
            self.rank,
            self.world_size,
            heartbeat_s=heartbeat_s,
            progress_s=timeout_s,
            on_failure=self._break,
        )
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [gloo.create_device(hostname=place.address)]
        self.connections = gloo(part_of(self.store, "gloo"), self.rank, self.world_size, options)
        self.at_failure(self._break_connections)
        _jobs.add(self)

    def at_failure(self, call: Callable[[], None]) -> None:
        """Registers what makes calls of other transports fail when the job has failed."""
        self._breaks.append(call)

    def before_close(self, call: Callable[[], None]) -> None:
        """Registers what a job that has not failed does first when it is closed."""
        self._before_close.append(call)

    def at_close(self, call: Callable[[], None]) -> None:
        """Registers what ends with the job; the connections are closed by then."""
        self._on_close.append(call)

    def refuse_after_failure(self, where: str) -> None:
        """Raises when nothing can be called any more."""
        failure = self.liveness.failure
        if failure is not None:
            raise CommunicationError(where, failure.reason, ranks=failure.ranks)
        if self._closed:
            raise CommunicationError(where, f"rank {self.rank} has closed its communicator")

    def fail(self, where: str, failure: Failure) -> CommunicationError:
        """Ends the job on every rank; returns the error to raise here."""
        found = self.liveness.report(failure)
        return CommunicationError(where, found.reason, ranks=found.ranks)

    def explain(
        self, where: str, error: Exception, missing: Callable[[], tuple[int, ...]]
    ) -> CommunicationError:
        """The error to raise after a connection broke: what ended the job, or who is gone.

        Args:
            missing: ranks in the world that the call still waits for.
        """
        if self._closed:
            return CommunicationError(where, f"rank {self.rank} has closed its communicator")
        waited = missing() if self.liveness.gone else ()
        deadline = time.monotonic() + _NEWS_S
        while time.monotonic() < deadline:
            failure = self.liveness.verdict(0.02)
            if failure is not None:
                return CommunicationError(where, failure.reason, ranks=failure.ranks)
            if self.liveness.gone:
                waited = missing()
            ended = tuple(rank for rank in waited if rank in self.liveness.gone)
            if ended:
                text = f"{ranks_text(ended)} ended without making this call"
                return self.fail(where, Failure(ended, text))
        first = str(error).splitlines()[0]
        return self.fail(where, Failure((), f"rank {self.rank} lost a connection: {first}"))

    def abort(self, where: str, reason: str) -> None:
        """Ends the job on every rank."""
        self.fail(where, Failure((self.rank,), f"rank {self.rank} aborted: {reason}"))

    def close(self) -> None:
        """Gives up connections and threads; the other ranks are told.

        They are not waited for, but in what this rank's device has under way with them.
        """
        if self._closed:
            return
        self._closed = True
        if self.liveness.failure is None:
            for call in self._before_close:
                call()
        self.liveness.close()
        self._break(None)
        for call in self._on_close:
            call()
        if self._store_socket is not None:
            self._store_socket.close()
        del self.connections

    def _break(self, failure: Failure | None) -> None:
        if self._store_socket is not None:
            # Whoever asks the store of a process that is stopped would wait for ever.
            with contextlib.suppress(OSError):
                self._store_socket.shutdown(socket.SHUT_RDWR)
        for call in self._breaks:
            call()

    def _break_connections(self) -> None:
        """Closes this process's connections, which wakes whoever waits, here and at their ends.

        A message that was waited for in vain makes gloo close all connections of its context at
        once. Its abort() does not wake those who wait, and to destroy it waits for them.
        """
        import torch

        nothing = torch.empty(1, dtype=torch.uint8)
        for peer in range(self.world_size):
            if peer == self.rank:
                continue
            try:
                message = self.connections.recv([nothing], peer, _BREAK_TAG)
                message.wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue


def _own_connection(store: Any) -> tuple[Store, socket.socket | None]:
    """A connection to the store that nobody else uses, and a handle with which to cut it.

    torch gives no access to a store's connection: it is the one that opens when it is made.
    """
    port = getattr(_underlying(store), "port", None)
    before = _connections_to(port)
    own = store.clone()
    opened = [found for found in _connections_to(port) if found not in before]
    return own, socket.socket(fileno=os.dup(opened[0])) if opened else None


def _underlying(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _connections_to(port: int | None) -> list[int]:
    """File descriptors of this process that are connected to a port."""
    numbers = (int(name) for name in os.listdir("/dev/fd"))
    return [n for n in numbers if port is not None and _peer_port(n) == port]


def _peer_port(number: int) -> int | None:
    """Where a file descriptor is connected to; None when it is no connected socket, or closed."""
    try:
        copy = os.dup(number)
    except OSError:
        return None
    try:
        end = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)  # a socket that could not be made does not own it
        return None
    with end:
        try:
            return int(end.getpeername()[1])
        except (OSError, IndexError, TypeError, ValueError):
            return None


def end_with_interpreter() -> None:
    """Closes what is open; a rank that ends by an exception says so to the others first."""
    error: Any = getattr(sys, "last_value", None)
    for job in list(_jobs):
        if error is not None and not isinstance(error, CommunicationError):
            what = f"rank {job.rank} ended with {type(error).__name__}: {error}"
            job.liveness.report(Failure((job.rank,), what))
        try:
            job.close()
        except Exception as late:  # an adapter takes leave of a device that has failed
            said = str(late).partition("\n")[0]
            print(f"anychip: rank {job.rank}: the job was not closed: {said}", file=sys.stderr)


def _forget_in_child() -> None:
    # A forked process, a data loader's for instance, would keep the side channel of its parent
    # open after that has died.
    for job in list(_jobs):
        job.liveness.forget()
    _jobs.clear()


atexit.register(end_with_interpreter)
os.register_at_fork(after_in_child=_forget_in_child)
