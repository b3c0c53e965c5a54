"""Who is still there? A side channel between the processes of a job, apart from its data.

Every rank has one connection to rank 0, and one thread that does nothing but listen to it. The
kernel closes the connection of a process that dies, so that its loss is known at once and by
name; a process that is stopped sends no heartbeat, and one whose interpreter does not turn says
that it is alive and nothing else. Rank 0 settles what is the job's failure: the first that it
hears of; and tells everybody. What follows from a failure is the job's business.

Strangers may connect until all ranks have come, when rank 0 stops listening. They are given ten
seconds and little room, and nothing of theirs is read but the HMAC of one frame.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anychip.comm import frames
from anychip.comm.frames import Frame
from anychip.comm.heartbeat import Heartbeat
from anychip.comm.ledger import Failure, ranks_text
from anychip.contract.errors import CommunicationError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_KEY = "liveness"
_VERDICT_S = 2.0
"""How long a rank waits for rank 0 to settle a failure, before it believes its own eyes."""
_GREETING_S = 10.0
_STRANGERS = 64
"""Connections of nobody knows whom at a time, beside those that ranks may need."""
_CALLS = 20
"""How often a rank calls rank 0, which may be crowded by strangers."""
WITHOUT_NATIVE = 10
"""The limit of silence grows by this factor where a beat needs Python's interpreter."""


_SEVERAL = ("have", "their", "processes are")


@dataclass(slots=True)
class _Peer:
    """The other end of a connection; ``rank`` is -1 until it has shown who it is."""

    socket: socket.socket
    rank: int = -1
    host: str = ""
    nonce: bytes = b""
    reader: frames.Reader | None = None
    since: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    patience: int = 1
    ticks: int = -1
    turned: float = field(default_factory=time.monotonic)
    unread: bytes = b""


class Liveness:
    """One rank's end of the side channel.

    Args:
        store: where rank 0 says its address; shared by the ranks of the job.
        address: of this machine, at which rank 0 listens.
        secret: of the job; empty: whoever reaches the address can speak for a rank.
        heartbeat_s: seconds of silence after which a rank is taken for lost.
        progress_s: seconds after which a rank is given up whose interpreter does not turn, and
            one that never comes.
        on_failure: called once, in the listening thread or in that of :meth:`report`, when the
            failure is settled.
        on_question: called in the listening thread with what a rank asks all ranks; returns soon.

    Attributes:
        failure: what ended the job, or None.
        gone: ranks that have closed.
        why_slow: why this rank may be silent for longer than asked for; else empty.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, *, address: str, secret: bytes,
        heartbeat_s: float, progress_s: float, on_failure: Callable[[Failure], None],
        on_question: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.rank, self.world_size = rank, world_size
        self._secret, self.progress_s = secret, max(progress_s, heartbeat_s)
        self._interval = min(1.0, heartbeat_s / 5)
        self._heartbeat = Heartbeat(rank, self._interval)
        self.why_slow = self._heartbeat.missing
        self._patience = WITHOUT_NATIVE if self.why_slow else 1
        self.heartbeat_s, self._judged = heartbeat_s, time.monotonic()
        self.failure: Failure | None = None
        self.gone: set[int] = set()
        self._on_failure, self._on_question = on_failure, on_question
        self._settled = threading.Event()
        self._lock, self._stopped = threading.RLock(), False
        self._peers: dict[int, _Peer] = {}
        self._strangers: list[_Peer] = []
        self._selector = selectors.DefaultSelector()
        self._wake, waking = socket.socketpair()
        self._selector.register(waking, selectors.EVENT_READ)
        self._waking, self._began = waking, time.monotonic()
        self._listener: socket.socket | None = None
        try:
            self._listen(store, address) if rank == 0 else self._connect(store)
        except BaseException:
            self._heartbeat.close()
            self.forget()
            raise
        self._thread = threading.Thread(target=self._run, name="anychip liveness", daemon=True)
        self._thread.start()

    def report(self, failure: Failure) -> Failure:
        """Tells every rank of a failure, and returns the one that counts, the first."""
        if self.failure is None and self.rank != 0 and 0 in self._peers:
            self._send(self._peers[0], _failed(self.rank, failure))
            if threading.current_thread() is not self._thread:
                self._settled.wait(_VERDICT_S)
        self._settle(failure)
        assert self.failure is not None
        return self.failure

    def ask(self, question: str) -> None:
        """Puts a question to all ranks, this one perhaps too."""
        frame = Frame(frames.QUESTION, self.rank, text=question)
        self._tell(frame)  # rank 0's peers are all ranks, and the others' peer is rank 0

    def verdict(self, wait_s: float) -> Failure | None:
        """The failure, after some time for the news to arrive."""
        self._settled.wait(wait_s)
        return self.failure

    def close(self) -> None:
        """Says goodbye and ends the thread."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            self._tell(Frame(frames.BYE, self.rank, ranks=(self.rank,)))
        self._wake.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._heartbeat.close()
        self.forget()

    def forget(self) -> None:
        """Closes this process's ends without a word; all that a forked child may do with them."""
        for peer in (*self._peers.values(), *self._strangers):
            peer.socket.close()
        for end in (self._wake, self._waking, self._listener):
            if end is not None:
                end.close()
        self._selector.close()

    def _listen(self, store: Store, address: str) -> None:
        family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        store.set(_KEY, f"{self._listener.getsockname()[1]} {address}")

    def _connect(self, store: Store) -> None:
        place, deadline = store.get(_KEY), time.monotonic() + self.progress_s
        problem: Exception | None = None
        for _ in range(_CALLS):
            left = max(0.1, deadline - time.monotonic())
            try:
                port, _, host = place.decode().partition(" ")
                self._greet(socket.create_connection((host, int(port)), timeout=left), host)
                return
            except (OSError, ValueError) as error:
                problem = error
                if isinstance(error, (ConnectionRefusedError, TimeoutError)):
                    break
                time.sleep(0.1)
        raise CommunicationError(
            f"world, rank {self.rank} of {self.world_size}: start",
            f"rank 0 does not take this rank at {place!r}: {problem}; ANYCHIP_SECRET must be the "
            "same on all ranks, and ANYCHIP_INTERFACE one that reaches the others",
            ranks=(0,),
        )

    def _greet(self, end: socket.socket, host: str) -> None:
        """Shows rank 0 who calls, and has it shown who answers."""
        mine, theirs, answer = secrets.token_bytes(frames.NONCE_NBYTES), b"", None
        peer = _Peer(end, 0, host)
        try:
            end.sendall(mine)
            while len(theirs) < frames.NONCE_NBYTES:
                theirs += _received(end, frames.NONCE_NBYTES - len(theirs))
            made = frames.keys(self._secret, (theirs, mine), is_rank_0=False)
            peer.reader = reader = frames.Reader(made.incoming)
            self._add(peer, made.outgoing)
            while answer is None:
                answer = reader.feed(_received(end, reader.wanted), (0,))
        except (OSError, ValueError):
            self._drop(peer)
            raise
        self._watch(peer)
        self._take(peer, answer)

    def _add(self, peer: _Peer, key: bytes) -> None:
        """Begins to send to a rank, and says who this is."""
        peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._peers[peer.rank] = peer
            self._heartbeat.add(peer.socket.fileno(), key)
            self._send(peer, Frame(frames.HELLO, self.rank, self._patience))
            if self.failure is not None:
                self._send(peer, _failed(self.rank, self.failure))

    def _watch(self, peer: _Peer) -> None:
        peer.socket.setblocking(False)
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    def _run(self) -> None:
        """The thread. However it ends, it is not that a rank goes on that nobody watches."""
        try:
            while not self._stopped:
                self._turn()
        except BaseException as error:
            text = f"rank {self.rank} cannot watch the others: {type(error).__name__}: {error}"
            self.report(Failure((self.rank,), text))

    def _turn(self) -> None:
        due, is_due = time.monotonic() + self._interval, False
        while not (is_due or self._stopped):
            left = due - time.monotonic()
            is_due = left <= 0
            for key, _ in self._selector.select(max(0.0, left)):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None:
                    self._read(key.data)
        if not self._stopped:
            self._heartbeat.tick()
            self._judge(time.monotonic())

    def _judge(self, now: float) -> None:
        """Gives up ranks that are silent, do not get on or have not come, and strangers."""
        # Time in which this rank was itself stopped, or held by native code, is nobody's silence.
        away, self._judged = max(0.0, now - self._judged - 2 * self._interval), now
        for peer in list(self._peers.values()):
            peer.heard, peer.turned = min(now, peer.heard + away), min(now, peer.turned + away)
            is_heard = now - peer.heard <= self.heartbeat_s * peer.patience
            if is_heard and now - peer.turned > self.progress_s:
                self._drop(peer)
                text = (
                    f"rank {peer.rank} is alive and gets nowhere for {self.progress_s:g} s: a call "
                    "in native code holds its interpreter"
                )
                self._settle(Failure((peer.rank,), text))
        self._judge_silence(now)
        for peer in [p for p in self._strangers if now - p.since > _GREETING_S]:
            self._drop(peer)
        if self._listener is not None and self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ)
        if self._listener is not None and now - self._began > self.progress_s:
            absent = tuple(rank for rank in range(1, self.world_size) if rank not in self._peers)
            text = f"{ranks_text(absent)} did not call rank 0 within {self.progress_s:g} s"
            self._settle(Failure(absent, text))

    def _judge_silence(self, now: float) -> None:
        """Gives up ranks that are silent; those of one machine, which are so together, at once."""

        def silent(grace_s: float) -> list[_Peer]:
            return [
                peer
                for peer in self._peers.values()
                if now - peer.heard > self.heartbeat_s * peer.patience - grace_s
            ]

        # The last beats of two ranks may lie an interval apart.
        lost = silent(0) and sorted(silent(1.5 * self._interval), key=lambda peer: peer.rank)
        if not lost:
            return
        for peer in lost:
            self._drop(peer)
        ranks, limit_s = tuple(peer.rank for peer in lost), self.heartbeat_s * lost[0].patience
        has, its, process = ("has", "its", "process is") if len(lost) == 1 else _SEVERAL
        hosts = ", ".join(sorted({peer.host for peer in lost} - {"", "127.0.0.1", "::1"}))
        machine = f"machine, {hosts}, is" if hosts else "machine is"
        text = (
            f"{ranks_text(ranks)} {has} not been heard of for {limit_s:g} s: {its} {process} "
            f"stopped, or {its} {machine} out of reach"
        )
        self._settle(Failure(ranks, text))

    def _accept(self) -> None:
        """Takes a connection of a rank or a stranger, who is given some random bytes."""
        assert self._listener is not None
        try:
            end, place = self._listener.accept()
            peer = _Peer(end, host=place[0], nonce=secrets.token_bytes(frames.NONCE_NBYTES))
        except OSError:  # no descriptor is left, or the other end has gone again
            if not self._strangers:
                self._selector.unregister(self._listener)  # until the next turn
            for stranger in list(self._strangers):
                self._drop(stranger)
            return
        self._strangers.append(peer)
        self._watch(peer)
        with contextlib.suppress(OSError):
            peer.socket.send(peer.nonce)
        if len(self._strangers) > _STRANGERS + self.world_size:
            self._drop(self._strangers[0])

    def _read(self, peer: _Peer) -> None:
        wanted = frames.NONCE_NBYTES - len(peer.unread)
        try:
            data = peer.socket.recv(wanted if peer.reader is None else peer.reader.wanted)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost(peer, "its process was killed or has crashed")
            return
        if peer.reader is None:
            self._begin(peer, data)
            return
        absent = {rank for rank in range(1, self.world_size) if rank not in self._peers}
        try:
            frame = peer.reader.feed(data, absent if peer.rank < 0 else (peer.rank,))
        except ValueError as error:
            self._lost(peer, f"its connection carries what it has not sent: {error}")
            return
        if frame is not None:
            if peer.rank < 0:
                self._welcome(peer, frame.sender)
            self._take(peer, frame)

    def _begin(self, peer: _Peer, data: bytes) -> None:
        """Takes the random bytes of a caller, with which its frames can be read."""
        peer.unread += data
        if len(peer.unread) == frames.NONCE_NBYTES:
            made = frames.keys(self._secret, (peer.nonce, peer.unread), is_rank_0=True)
            peer.reader, peer.nonce = frames.Reader(made.incoming), made.outgoing

    def _welcome(self, peer: _Peer, rank: int) -> None:
        """A caller has shown that it is a rank. When all have come, nobody else may."""
        peer.rank = rank
        self._strangers.remove(peer)
        if len(self._peers) == self.world_size - 2 and self._listener is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
            for stranger in list(self._strangers):
                self._drop(stranger)
        self._add(peer, peer.nonce)

    def _take(self, peer: _Peer, frame: Frame) -> None:
        peer.heard = time.monotonic()
        if frame.kind != frames.BEAT or frame.ticks != peer.ticks:
            peer.ticks, peer.turned = frame.ticks, peer.heard
        if frame.kind == frames.HELLO:
            peer.patience = max(1, frame.ticks)
        elif frame.kind == frames.FAILURE:
            self._settle(Failure(frame.ranks, frame.text))
        elif frame.kind == frames.BYE:
            self.gone.update(frame.ranks)
            if self.rank == 0:
                self._tell(frame._replace(sender=0))
        elif frame.kind == frames.QUESTION:
            if self.rank == 0:
                self._tell(frame._replace(sender=0))
            self._on_question(frame.text)

    def _settle(self, failure: Failure) -> None:
        """The first failure stays; rank 0 passes it on."""
        with self._lock:
            if self.failure is not None or self._stopped:
                self.failure = self.failure or failure
                return
            self.failure = failure
            if self.rank == 0:
                self._tell(_failed(0, failure))
        self._settled.set()
        self._on_failure(failure)

    def _tell(self, frame: Frame) -> None:
        for peer in list(self._peers.values()):
            self._send(peer, frame)

    def _send(self, peer: _Peer, frame: Frame) -> None:
        self._heartbeat.send(peer.socket.fileno(), frame)

    def _lost(self, peer: _Peer, how: str) -> None:
        self._drop(peer)
        if peer.rank >= 0 and peer.rank not in self.gone:
            self._settle(Failure((peer.rank,), f"rank {peer.rank} is lost: {how}"))

    def _drop(self, peer: _Peer) -> None:
        with self._lock:
            if self._peers.get(peer.rank) is peer:
                del self._peers[peer.rank]
            if peer in self._strangers:
                self._strangers.remove(peer)
            self._heartbeat.remove(peer.socket.fileno())
            with contextlib.suppress(KeyError, ValueError):  # it is not watched yet, or any more
                self._selector.unregister(peer.socket)
            peer.socket.close()


def _failed(sender: int, failure: Failure) -> Frame:
    return Frame(frames.FAILURE, sender, ranks=failure.ranks, text=failure.reason)


def _received(end: socket.socket, wanted: int) -> bytes:
    data = end.recv(wanted)
    if not data:
        raise ConnectionError("it closes the connection")
    return data
