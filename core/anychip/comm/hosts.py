"""How are the ranks' hosts connected: by memory where ranks share one, else by sockets?

All ranks say in the job's store where they are, and come to one answer. Memory is a file without a
name: no limit of /dev/shm counts for it, and the kernel frees it with the last process that has it.
The first rank of a host makes it and hands it to the others there by a socket without a place in
the file system, to processes of its own user only.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from anychip.comm.ledger import ranks_text
from anychip.comm.store import part_of
from anychip.contract import CommunicationError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from anychip.comm.gloo import Gloo
    from anychip.comm.hierarchical import Hosts
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
        wish: what the user has asked for; None: memory on each host where it can be, else sockets.
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
        socket: where it hands out the file, if it is the first rank of its host.
    """

    wish: str | None
    host: str
    missing: str
    socket: str


def connect(store: Store, seat: Seat) -> Gloo | SharedMemory | Hosts:
    """The connections of this rank; all ranks of the job call this.

    Raises:
        CommunicationError: on all ranks: what was asked for cannot be had, or is not the same.
    """
    host, missing = _host(), _missing()
    listener = None if missing or seat.wish == "sockets" else _listener()
    place = "" if listener is None else listener.getsockname()[1:].decode()
    keys = part_of(store, "hosts")
    keys.set(str(seat.rank), json.dumps(_Said(seat.wish, host, missing, place)))
    try:
        found = keys.multi_get([str(rank) for rank in range(seat.world_size)])
        said = [_Said(*json.loads(text)) for text in found]
        why_not, memory = _why_not(seat, said), None
        here = [rank for rank, one in enumerate(said) if one.host == host]
        can_share = seat.wish != "sockets" and not any(one.missing for one in said)
        if can_share and len(here) > 1:
            memory = _share(seat, here, said[here[0]].socket, listener)
    finally:
        if listener is not None:
            listener.close()
    if memory is not None and not why_not:
        return memory
    from anychip.comm.gloo import Gloo

    sockets = Gloo(store, seat.rank, seat.world_size, seat.address, seat.timeout_s, why_not)
    hosts = list(dict.fromkeys(one.host for one in said))
    if not can_share or len(hosts) == seat.world_size:
        return sockets
    from anychip.comm.hierarchical import Hosts

    return Hosts(sockets, memory, [hosts.index(one.host) for one in said])


def _why_not(seat: Seat, said: list[_Said]) -> str:
    """Why not all ranks share memory; empty when they do. The same on all ranks."""
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


def _share(
    seat: Seat, here: Sequence[int], place: str, listener: socket.socket | None
) -> SharedMemory:
    """The memory of the ranks ``here``, of which the first one has the place."""
    from anychip.comm import shared_memory

    where = f"world, rank {seat.rank} of {seat.world_size}: start"
    try:
        if seat.rank == here[0]:
            assert listener is not None, "a rank that can share has one"
            descriptor = _make_file(shared_memory.nbytes(len(here)))
            _hand_out(descriptor, listener, seat, set(here[1:]), where)
        else:
            descriptor = _fetch(place, seat, here[0])
        return shared_memory.SharedMemory(descriptor, seat.rank, here)
    except OSError as error:
        text = f"shared memory: {error}; ANYCHIP_TRANSPORT=sockets does without"
        raise CommunicationError(where, text) from error


def _make_file(nbytes: int) -> int:
    """A file of zeros that nobody can make shorter, which would kill who reads there."""
    found = os.memfd_create("anychip", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(found, nbytes)
    fcntl.fcntl(found, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return found


def _hand_out(
    descriptor: int, listener: socket.socket, seat: Seat, absent: set[int], where: str
) -> None:
    """Gives the file to other ranks, as often as they ask, until none is absent."""
    deadline = time.monotonic() + seat.timeout_s
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


def _fetch(place: str, seat: Seat, first: int) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.settimeout(seat.timeout_s)
        end.connect(f"\0{place}")
        if _user(end) != os.geteuid():
            raise PermissionError(f"user {_user(end)} hands out what rank {first} should")
        end.sendall(_CALLER.pack(seat.rank))
        _, found, _, _ = socket.recv_fds(end, 1, 1)
    if not found:
        raise ConnectionError(f"rank {first} has handed out nothing")
    os.set_inheritable(found[0], False)
    return found[0]


def _user(end: socket.socket) -> int:
    """Whose process is at the other end, as the kernel says it."""
    told = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(told)[1])
