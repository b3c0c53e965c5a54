"""How are the ranks' hosts connected: by memory where all ranks share one, else by sockets?

All ranks say in the job's store where they are, and come to one answer. Memory is a file without a
name: no limit of /dev/shm counts for it, and the kernel frees it with the last process that has it.
Rank 0 makes it and hands it to the others by a socket without a place in the file system, to
processes of its own user only.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from anychip.comm.ledger import ranks_text
from anychip.comm.store import part_of
from anychip.contract import CommunicationError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from anychip.comm.gloo import Gloo
    from anychip.comm.shared_memory import SharedMemory

HostTransport = Literal["shared_memory", "sockets"]
HOST_TRANSPORTS: tuple[HostTransport, ...] = ("shared_memory", "sockets")

_CALLER = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")  # of the kernel: process, user, group
_GREETING_S = 5.0


class Seat(NamedTuple):
    """This rank's, as far as connections between hosts need it.

    Attributes:
        address: of this machine, at which its ranks listen.
        wish: what the user has asked for; None: memory where it can be, else sockets.
    """

    rank: int
    world_size: int
    address: str
    timeout_s: float
    wish: HostTransport | None = None


class _Said(NamedTuple):
    """What a rank says of itself.

    Attributes:
        host: the same text on ranks that can share memory.
        missing: why this one cannot; else empty.
        socket: of rank 0: where it hands out the file.
    """

    wish: str | None
    host: str
    missing: str
    socket: str


def connect(store: Store, seat: Seat) -> Gloo | SharedMemory:
    """The connections of this rank; all ranks of the job call this.

    Raises:
        CommunicationError: on all ranks: what was asked for cannot be had, or is not the same.
    """
    host, missing = _host(), _missing()
    listener = None if missing or seat.rank or seat.wish == "sockets" else _listener()
    place = "" if listener is None else listener.getsockname()[1:].decode()
    keys = part_of(store, "hosts")
    keys.set(str(seat.rank), json.dumps(_Said(seat.wish, host, missing, place)))
    try:
        found = keys.multi_get([str(rank) for rank in range(seat.world_size)])
        said = [_Said(*json.loads(text)) for text in found]
        why_not = _why_not(seat, said)
        if not why_not:
            return _share(seat, said[0].socket, listener)
    finally:
        if listener is not None:
            listener.close()
    from anychip.comm.gloo import Gloo

    return Gloo(store, seat.rank, seat.world_size, seat.address, seat.timeout_s, why_not)


def _why_not(seat: Seat, said: list[_Said]) -> str:
    """Why the ranks share no memory; empty when they do. The same on all ranks."""
    where = f"world, rank {seat.rank} of {seat.world_size}: start"
    if len({one.wish for one in said}) > 1:
        wishes = ", ".join(f"rank {rank}: {one.wish or 'unset'}" for rank, one in enumerate(said))
        raise CommunicationError(
            where, f"ANYCHIP_TRANSPORT must be the same on all ranks: {wishes}"
        )
    if seat.wish == "sockets":
        return "as ANYCHIP_TRANSPORT says"
    lacking = next(((rank, one.missing) for rank, one in enumerate(said) if one.missing), None)
    others = tuple(rank for rank, one in enumerate(said) if one.host != said[0].host)
    why_not = ""
    if lacking is not None:
        why_not = f"no shared memory on rank {lacking[0]}: {lacking[1]}"
    elif others:
        why_not = f"no shared memory: {ranks_text(others)} and rank 0 have not one host and user"
    if why_not and seat.wish == "shared_memory":
        raise CommunicationError(where, f"ANYCHIP_TRANSPORT=shared_memory: {why_not}", ranks=others)
    return why_not


def _host() -> str:
    """The same text on processes that one kernel, network and user have."""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{kernel} {os.stat('/proc/self/ns/net').st_ino} {os.geteuid()}"


def _missing() -> str:
    from anychip.comm import shared_memory

    return shared_memory.load()[1]


def _listener() -> socket.socket:
    """A socket in the abstract namespace, under a name that nobody guesses."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.bind(f"\0anychip-{secrets.token_hex(16)}")
    found.listen(1024)
    return found


def _share(seat: Seat, place: str, listener: socket.socket | None) -> SharedMemory:
    from anychip.comm import shared_memory

    where = f"world, rank {seat.rank} of {seat.world_size}: start"
    try:
        if listener is not None:
            descriptor = _make_file(shared_memory.nbytes(seat.world_size))
            _hand_out(descriptor, listener, seat, where)
        else:
            descriptor = _fetch(place, seat)
        return shared_memory.SharedMemory(descriptor, seat.rank, seat.world_size)
    except OSError as error:
        text = f"shared memory: {error}; ANYCHIP_TRANSPORT=sockets does without"
        raise CommunicationError(where, text) from error


def _make_file(nbytes: int) -> int:
    """A file of zeros that nobody can make shorter, which would kill who reads there."""
    found = os.memfd_create("anychip", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(found, nbytes)
    fcntl.fcntl(found, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return found


def _hand_out(descriptor: int, listener: socket.socket, seat: Seat, where: str) -> None:
    """Gives the file to all other ranks, as often as they ask."""
    absent, deadline = set(range(1, seat.world_size)), time.monotonic() + seat.timeout_s
    while absent:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            caller = listener.accept()[0]
        except TimeoutError:
            late = tuple(sorted(absent))
            text = f"{ranks_text(late)} did not fetch the shared memory in {seat.timeout_s:g} s"
            raise CommunicationError(where, text, ranks=late) from None
        with caller, suppress(OSError, struct.error):
            caller.settimeout(_GREETING_S)
            if _user(caller) == os.geteuid():
                (rank,) = _CALLER.unpack(caller.recv(_CALLER.size, socket.MSG_WAITALL))
                socket.send_fds(caller, [b"\0"], [descriptor])
                absent.discard(rank)


def _fetch(place: str, seat: Seat) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.settimeout(seat.timeout_s)
        end.connect(f"\0{place}")
        if _user(end) != os.geteuid():
            raise PermissionError(f"user {_user(end)} hands out what rank 0 should")
        end.sendall(_CALLER.pack(seat.rank))
        _, found, _, _ = socket.recv_fds(end, 1, 1)
    if not found:
        raise ConnectionError("rank 0 has handed out nothing")
    os.set_inheritable(found[0], False)
    return found[0]


def _user(end: socket.socket) -> int:
    """Whose process is at the other end, as the kernel says it."""
    told = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(told)[1])
