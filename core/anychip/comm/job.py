"""The ranks of a job: what their groups share, and how they end together.

A :class:`Job` holds the store, what tells ranks of each other, and the transports of all groups.
When one rank fails, all connections of all ranks are closed, so that no call waits for what cannot
come. :func:`join` makes that of a process; ranks that are threads have jobs of the same class.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from anychip import contract
from anychip.comm import flight, hosts
from anychip.comm.ledger import LAST, Check, Failure, Ledger, Note, ranks_text
from anychip.comm.meeting import meet
from anychip.comm.staged import Staged
from anychip.comm.store import Connection, part_of
from anychip.comm.watch import Watch
from anychip.contract import HOST_LIBRARY, CommunicationError, DeviceError, Membership, Transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from anychip.comm.liveness import Liveness

_NEWS_S = 3.0
"""How long a rank whose connection broke waits to hear which rank is to blame."""
_DEVICE_NEWS_S = 1.0
"""The same for one whose device says that a call has failed."""
_jobs_made = itertools.count()
_jobs: weakref.WeakSet[Job] = weakref.WeakSet()


class Rendezvous(NamedTuple):
    """What a launcher gives each of its processes.

    Attributes:
        address: of this machine, at which its ranks listen.
        side_channel: what tells ranks of each other, :class:`anychip.comm.liveness.Liveness`, but
            for what it gets here.
        flight_record: see :class:`Job`.
        host_transport: see :class:`~anychip.comm.hosts.Seat`.
    """

    store: Store
    rank: int
    world_size: int
    address: str
    side_channel: Callable[..., Liveness]
    flight_record: Path | None = None
    host_transport: hosts.HostTransport | None = None


class LastCall(NamedTuple):
    """What this rank has called last, in any group: a collective, or messages with peers."""

    group: str
    ledger: Ledger
    notes: Sequence[Note]


class Job(contract.Job):
    """One rank's part in a job of several.

    Args:
        store: with keys of this job alone.
        news: makes what tells ranks of each other, as :class:`~anychip.comm.liveness.Liveness`
            does, given what is to be called at a failure, and with a question.
        connect: makes the connections between the ranks' hosts, as
            :func:`anychip.comm.hosts.connect` does; a call of all ranks.
        heartbeat_s: seconds that a call is waited for before ranks compare what they call; less
            where the time limit is less than twice that.
        check: how ranks find that they call different things, see :mod:`anychip.comm.ledger`.
        flight_record: directory into which this rank's last calls go at a failure.
        generation: see :mod:`anychip.comm.generations`.
    """

    def __init__(
        self, rank: int, world_size: int, store: Store, *,
        news: Callable[[Callable[[Failure], None], Callable[[str], None]], Any],
        connect: Callable[[Store], Any], timeout_s: float, heartbeat_s: float = 30.0,
        check: Check = "always", flight_record: Path | None = None, generation: int = 0,
    ) -> None:  # fmt: skip
        self.rank, self.world_size, self.store = rank, world_size, store
        self.timeout_s = timeout_s
        self.check: Check = check
        self.where = f"world, rank {rank} of {world_size}"
        self.last_call: LastCall | None = None
        self._connect, self.world = connect, Membership(tuple(range(world_size)), rank)
        self._held: list[Any] = []
        self._broken = False
        self._on_close: list[Callable[[], object]] = []
        self._closed = False
        self._flight_record, self.generation = flight_record, generation
        self._limit_s = min(heartbeat_s, timeout_s / 2)
        self._ledgers: dict[int, Ledger] = {}
        self.news = news(self._break, self._answer)

    @cached_property
    def connections(self) -> Any:
        """Between the ranks' hosts; made when all ranks first need them."""
        try:
            return self.hold(self._connect(self.store))
        except CommunicationError:
            raise
        except RuntimeError as error:  # of the store: a rank that was connected has ended already
            others = tuple(rank for rank in self.world.ranks if rank != self.rank)
            raise self.explain(f"{self.where}: start", error, lambda: others) from error

    def hold(self, thing: Any) -> Any:
        """Takes what ends with the job, by abort() and close(); the last one is closed first."""
        self._held.append(thing)
        if self._broken:
            thing.abort()
        return thing

    def ledger(self, group: Membership, check: Check) -> Ledger:
        """The calls of a group, which are watched from now on where they have to be."""
        store = part_of(self.store, f"group/{group.number}")

        def ask(question: int) -> None:
            self.news.ask(f"{group.number} {question}")

        found = Ledger(store, group, check=check, ask=ask)
        self._ledgers[group.number] = found
        if check == "step":
            self._watch  # noqa: B018 - begins
        return found

    @cached_property
    def _watch(self) -> Watch:
        found: Watch = self.hold(Watch(self._judge, self._limit_s / 2))
        return found

    def _judge(self) -> None:
        """Looks at what has been waited for for long; ends the job if ranks disagree."""
        for ledger in list(self._ledgers.values()):
            with contextlib.suppress(RuntimeError):  # the store went with its host
                failure = ledger.judge(self._limit_s)
                if failure is not None:
                    self.news.report(failure)

    def _answer(self, question: str) -> None:
        """Tells the calls of a group that another rank asks for, in a thread that may wait."""
        number, _, asked = question.partition(" ")
        ledger = self._ledgers.get(int(number))
        if ledger is not None:
            Thread(target=ledger.answer, args=(int(asked),), daemon=True).start()

    def at_close(self, call: Callable[[], object]) -> None:
        self._on_close.append(call)

    @property
    def has_failed(self) -> bool:
        return self.news.failure is not None

    @property
    def has_ended(self) -> bool:
        """It has failed, or this rank has closed."""
        return self._closed or self.news.failure is not None

    def refuse_after_failure(self, where: Callable[[], str]) -> None:
        """Raises when nothing can be called any more."""
        failure = self.news.failure
        if failure is not None:
            raise CommunicationError(where(), failure.reason, ranks=failure.ranks)
        if self._closed:
            raise CommunicationError(where(), f"rank {self.rank} has closed its communicator")

    def fail(self, where: str, failure: Failure) -> CommunicationError:
        """Ends the job on every rank; returns the error to raise here."""
        found = self.news.report(failure)
        return CommunicationError(where, found.reason, ranks=found.ranks)

    def late(self, where: str, ranks: tuple[int, ...], ledger: Ledger) -> CommunicationError:
        """Ends the job because ranks, counted in the world, have not come in time."""
        reason = f"{ranks_text(ranks)} did not come within {self.timeout_s:g} s"
        # Another rank may have ended the job in the meantime, and cut the store with it.
        with contextlib.suppress(RuntimeError):
            if len(ranks) == 1:
                reason += f"; {ledger.last_call(ranks[0])}"
        return self.fail(where, Failure(ranks, reason))

    def explain(
        self,
        where: str,
        error: Exception,
        missing: Callable[[], Sequence[int]],
        ended_by: str = "ended without making this call",
    ) -> CommunicationError:
        """The error to raise after a connection broke: what ended the job, or who is gone.

        Args:
            missing: ranks in the world that the call still waits for.
            ended_by: what is said of those that have ended.
        """
        if self._closed:
            return CommunicationError(where, f"rank {self.rank} has closed its communicator")
        waited: Sequence[int] = ()
        deadline = time.monotonic() + _NEWS_S
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):  # the store goes with the rank that holds it
                waited = missing() if self.news.gone else ()
            failure = self.news.verdict(0.02)
            if failure is not None:
                return CommunicationError(where, failure.reason, ranks=failure.ranks)
            ended = tuple(rank for rank in waited if rank in self.news.gone)
            if ended:
                text = f"{ranks_text(ended)} {ended_by}"
                return self.fail(where, Failure(ended, text))
        if gone := tuple(sorted(self.news.gone)):  # and the store with them, which knows the rest
            text = f"{ranks_text(gone)} ended, and after that rank {self.rank} lost a connection"
            return self.fail(where, Failure(gone, text))
        first = str(error).splitlines()[0]
        return self.fail(where, Failure((), f"rank {self.rank} lost a connection: {first}"))

    def blame(self, where: str, error: DeviceError) -> CommunicationError:
        known = self.news.failure or self.news.verdict(_DEVICE_NEWS_S)
        if known is not None:
            return CommunicationError(where, known.reason, ranks=known.ranks)
        said, call = "world", self.last_call
        peers: tuple[int, ...] = ()
        if call is not None:
            said, peers = call.group, call.ledger.peers(call.notes)
            with contextlib.suppress(RuntimeError):  # the store goes with the rank that holds it
                absent = () if peers else call.ledger.missing(call.notes[0].number)
                if absent:
                    return self.late(where, absent, call.ledger)
        said += f": messages with {ranks_text(peers)}" if peers else ""
        last = error.detail.strip().splitlines()[-1]
        return self.fail(where, Failure(peers, f"{said} failed with {error.label}: {last}"))

    def host(self, group: Membership, device: str | None = None) -> Transport:
        found: Transport = self.connections.transport(group, self.timeout_s)
        return found if device is None else Staged(found, device)

    def library(
        self, name: str, device: str, *, identity: str | None = None, **wishes: Any
    ) -> Transport | None:
        from anychip.comm.library import Library, refuse_shared

        if identity is not None:
            refuse_shared(self, identity, name.upper())
        return None if name == HOST_LIBRARY else Library(self, self.world, name, device, **wishes)

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
        if not self.has_failed:
            for held in self._held:
                if isinstance(held, Transport):
                    held.drain()
            for ledger in self._ledgers.values():
                ledger.answer(LAST)
        self.news.close()
        self._break(None)
        for held in reversed(self._held):
            held.close()
        for call in self._on_close:
            call()

    def _break(self, failure: Failure | None) -> None:
        self._broken = True
        # First: when its calls fail, the process may end before a file is whole.
        if failure is not None and self._flight_record is not None:
            ledgers = list(self._ledgers.values())
            place = flight.Place(self.rank, self.world_size, self.generation)
            try:
                flight.write(self._flight_record, place, failure, ledgers)
            except OSError as error:
                print(f"anychip: rank {self.rank}: no flight record: {error}", file=sys.stderr)
        for held in list(self._held):
            held.abort()


def count_anew() -> None:
    """Of a process that becomes a rank in another store, where its jobs are not known."""
    global _jobs_made
    _jobs_made = itertools.count()


def join(
    place: Rendezvous, *, timeout_s: float, heartbeat_s: float, check: Check, generation: int = 0
) -> Job:
    """This process's part in a job.

    Args:
        place: what the launcher gives, or in a later generation the meeting.
        timeout_s: seconds that any wait for another rank may take.
        heartbeat_s: seconds of silence after which a rank counts as lost.
        check: see :class:`Job`.

    Raises:
        CommunicationError: a rank did not come within the time limit.
    """
    rank, world_size = place.rank, place.world_size
    connection = Connection(place.store)
    # Each job of a process has keys of its own; every rank counts its jobs alike, but those that
    # have met again.
    keys = f"generation/{generation}" if generation else next(_jobs_made)
    store = part_of(connection.store, f"anychip/{keys}")
    where = f"world, rank {rank} of {world_size}: start"
    meet(store, rank, world_size, timeout_s=timeout_s, where=where)

    def news(on_failure: Callable[[Failure], None], on_question: Callable[[str], None]) -> Liveness:
        calls = {"on_failure": on_failure, "on_question": on_question}
        limits = {"heartbeat_s": heartbeat_s, "progress_s": timeout_s}
        return place.side_channel(store, rank, world_size, **limits, **calls)

    seat = hosts.Seat(rank, world_size, place.address, timeout_s, place.host_transport)

    job = Job(
        rank, world_size, store, news=news, connect=partial(hosts.connect, seat=seat),
        timeout_s=timeout_s, heartbeat_s=heartbeat_s, check=check,
        flight_record=place.flight_record, generation=generation,
    )  # fmt: skip
    job.hold(connection)
    _jobs.add(job)
    # Last of all, so that it comes first at the end: before an adapter gives its device up.
    atexit.unregister(end_with_interpreter)
    atexit.register(end_with_interpreter)
    return job


def end_with_interpreter() -> None:
    """Closes what is open; a rank that ends by an exception says so to the others first."""
    error: Any = getattr(sys, "last_value", None)
    for job in list(_jobs):
        if error is not None and not isinstance(error, CommunicationError):
            what = f"rank {job.rank} ended with {type(error).__name__}: {error}"
            job.news.report(Failure((job.rank,), what))
        try:
            job.close()
        except Exception as late:  # an adapter takes leave of a device that has failed
            said = str(late).partition("\n")[0]
            print(f"anychip: rank {job.rank}: the job was not closed: {said}", file=sys.stderr)


def _forget_in_child() -> None:
    # A forked process, a data loader's for instance, would keep the side channel of its parent
    # open after that has died.
    for job in list(_jobs):
        job.news.forget()
    _jobs.clear()


os.register_at_fork(after_in_child=_forget_in_child)
