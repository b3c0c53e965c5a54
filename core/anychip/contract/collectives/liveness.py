"""Who is still there? A side channel between the processes of a job, apart from its data.

Every rank has one connection to rank 0, and one thread that does nothing but listen to it. The
kernel closes the connection of a process that dies, so that its loss is known at once and by
name; a process that is stopped sends no heartbeat. Rank 0 settles what is the job's failure: the
first that it hears of; and tells everybody. What follows from a failure is the job's business.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_KEY = "liveness"
_VERDICT_S = 2.0
"""How long a rank waits for rank 0 to settle a failure, before it believes its own eyes."""


class Failure(NamedTuple):
    """Why a job cannot go on: the ranks at fault, counted in the world, and what they did."""

    ranks: tuple[int, ...]
    reason: str


@dataclass(slots=True)
class _Peer:
    """The other end of a connection; ``rank`` is -1 until it has said who it is."""

    socket: socket.socket
    rank: int = -1
    heard: float = field(default_factory=time.monotonic)
    unread: bytes = b""


class Liveness:
    """One rank's end of the side channel.

    Args:
        store: where rank 0 says its address; shared by the ranks of the job and nobody else.
        heartbeat_s: seconds of silence after which a rank is taken for lost.
        on_failure: called once, in the listening thread or in that of :meth:`report`, when the
            failure is settled.

    Attributes:
        failure: what ended the job, or None.
        gone: ranks that have closed.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        heartbeat_s: float,
        on_failure: Callable[[Failure], None],
    ) -> None:
        self.rank, self.heartbeat_s = rank, heartbeat_s
        self.failure: Failure | None = None
        self.gone: set[int] = set()
        self._on_failure, self._settled = on_failure, threading.Event()
        self._lock, self._stopped = threading.RLock(), False
        self._peers: dict[int, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, waking = socket.socketpair()
        self._selector.register(waking, selectors.EVENT_READ, "wake")
        self._waking = waking
        self._token = ""
        self._listener: socket.socket | None = None
        if rank == 0:
            self._listen(store)
        else:
            self._connect(store)
        self._thread = threading.Thread(target=self._run, name="anychip liveness", daemon=True)
        self._thread.start()

    def report(self, failure: Failure) -> Failure:
        """Tells every rank of a failure, and returns the one that counts, the first."""
        if self.failure is None and self.rank != 0 and 0 in self._peers:
            self._send(self._peers[0], {"failure": failure})
            if threading.current_thread() is not self._thread:
                self._settled.wait(_VERDICT_S)
        self._settle(failure)
        assert self.failure is not None
        return self.failure

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
            for peer in list(self._peers.values()):
                self._send(peer, {"bye": self.rank})
        self._wake.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.forget()

    def forget(self) -> None:
        """Closes this process's ends without a word; all that a forked child may do with them."""
        for peer in list(self._peers.values()):
            peer.socket.close()
        for end in (self._wake, self._waking, self._listener):
            if end is not None:
                end.close()
        self._selector.close()

    def _listen(self, store: Store) -> None:
        host = _store_host(store)
        local = host is None or _is_loopback(host)
        name = host if local and host is not None else socket.getfqdn()
        family = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((name if local else "", 0), family=family)
        self._selector.register(listener, selectors.EVENT_READ, "listener")
        self._listener, self._token = listener, secrets.token_hex(16)
        port = listener.getsockname()[1]
        hosts = [found for found in (host, socket.getfqdn()) if found]
        store.set(_KEY, json.dumps([hosts, port, self._token]))

    def _connect(self, store: Store) -> None:
        hosts, port, token = json.loads(store.get(_KEY))
        problem: OSError | None = None
        for host in hosts:
            try:
                end = socket.create_connection((host, port), timeout=10)
            except OSError as error:
                problem = error
                continue
            peer = _Peer(end, 0)
            self._add(peer)
            self._send(peer, {"hello": self.rank, "token": token})
            return
        raise ConnectionError(f"rank 0 listens at none of {hosts}, port {port}: {problem}")

    def _add(self, peer: _Peer) -> None:
        peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.socket.settimeout(1.0)
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        if peer.rank >= 0:
            self._peers[peer.rank] = peer

    def _run(self) -> None:
        interval = min(1.0, self.heartbeat_s / 5)
        beat = 0.0
        while not self._stopped:
            for key, _ in self._selector.select(interval):
                if key.data == "listener":
                    self._accept()
                elif isinstance(key.data, _Peer):
                    self._read(key.data)
            # What has arrived was read first: a rank that was itself stopped blames nobody.
            if time.monotonic() - beat >= interval and not self._stopped:
                beat = time.monotonic()
                self._beat(beat)

    def _beat(self, now: float) -> None:
        for peer in list(self._peers.values()):
            self._send(peer, {"alive": self.rank})
            if now - peer.heard > self.heartbeat_s:
                self._drop(peer)
                reason = (
                    f"rank {peer.rank} has not been heard of for {self.heartbeat_s:g} s: its "
                    "process is stopped, or its machine is out of reach"
                )
                self._settle(Failure((peer.rank,), reason))

    def _accept(self) -> None:
        assert self._listener is not None
        self._add(_Peer(self._listener.accept()[0]))

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            if peer.rank >= 0 and peer.rank not in self.gone:
                reason = f"rank {peer.rank} is lost: its process was killed or has crashed"
                self._settle(Failure((peer.rank,), reason))
            return
        peer.heard = time.monotonic()
        *lines, peer.unread = (peer.unread + data).split(b"\n")
        for line in lines:
            if peer.rank >= 0:
                self._take(json.loads(line))
            elif not self._welcome(peer, line):
                self._drop(peer)
                return

    def _welcome(self, peer: _Peer, line: bytes) -> bool:
        """Takes the first line of a connection; False when it is not from a rank of the job."""
        try:
            message = json.loads(line)
            if not secrets.compare_digest(str(message["token"]), self._token):
                return False
            peer.rank = int(message["hello"])
        except (ValueError, KeyError, TypeError):
            return False
        with self._lock:
            self._peers[peer.rank] = peer
            if self.failure is not None:
                self._send(peer, {"failure": self.failure})
        return True

    def _take(self, message: dict[str, Any]) -> None:
        if "failure" in message:
            ranks, reason = message["failure"]
            self._settle(Failure(tuple(ranks), reason))
        elif "bye" in message:
            self.gone.add(message["bye"])
            if self.rank == 0:
                self._tell(message)

    def _settle(self, failure: Failure) -> None:
        """The first failure stays; rank 0 passes it on."""
        with self._lock:
            if self.failure is not None or self._stopped:
                self.failure = self.failure or failure
                return
            self.failure = failure
            if self.rank == 0:
                self._tell({"failure": failure})
        self._settled.set()
        self._on_failure(failure)

    def _tell(self, message: dict[str, Any]) -> None:
        for peer in list(self._peers.values()):
            self._send(peer, message)

    def _send(self, peer: _Peer, message: dict[str, Any]) -> None:
        with self._lock:
            try:
                peer.socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                return  # its end is closed: reading will find that, and say what it means

    def _drop(self, peer: _Peer) -> None:
        with self._lock:
            self._peers.pop(peer.rank, None)
            self._selector.unregister(peer.socket)
            peer.socket.close()


def _store_host(store: Any) -> str | None:
    """The address at which the ranks reach the store, which is on rank 0's machine."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)
    except OSError:
        return False
