"""Where does this process stand in its job, and at which address does it listen?

A job is what a launcher says in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or the default
process group that the user has made. Ranks that are all on one machine listen on loopback; else
at the interface that was named, or by which the machine reaches the store: never on all. What is
in the store anybody can read and write who reaches it: the job's secret never is.
"""

from __future__ import annotations

import fcntl
import ipaddress
import secrets
import socket
import struct
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from anychip.comm import heartbeat
from anychip.comm.hosts import HostTransport
from anychip.comm.job import Rendezvous
from anychip.comm.liveness import WITHOUT_NATIVE, Liveness

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915


class Launched(NamedTuple):
    """What the environment says of this process's place.

    Attributes:
        has_store: the launcher has the store; else rank 0 makes it.
    """

    rank: int
    world_size: int
    host: str
    port: int
    has_store: bool


def rendezvous(
    launched: Callable[[], Launched | None], *, timeout_s: float, is_one_machine: bool,
    interface: str | None, secret: bytes, flight_record: Path | None,
    host_transport: HostTransport | None, given: tuple[Store, int, int] | None = None,
) -> Rendezvous | None:  # fmt: skip
    """This process's place in a job, or None when it is alone.

    Args:
        launched: what a launcher says; asked unless the user has made a default process group.
        is_one_machine: all ranks are on this one, as far as the launcher says.
        interface: name or address of the one to listen at; None: found.
        secret: of the job, for the side channel.
        flight_record, host_transport: see :class:`~anychip.comm.job.Rendezvous`.
        given: store, rank and world size of the default process group that is being made.

    Raises:
        ValueError: there is no such interface, or none by which other machines reach this one.
    """
    import torch.distributed as dist

    place: Launched | None
    store: Any
    if given is not None:
        store, rank, world_size = given
        place = Launched(rank, world_size, *_place_of(store), True)
    elif dist.is_available() and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        place = Launched(dist.get_rank(), dist.get_world_size(), *_place_of(store), True)
    else:
        store, place = None, launched()
    if place is None or place.world_size == 1:
        return None
    address = listening_address(place.host, place.port, interface, is_one_machine=is_one_machine)
    if store is None:
        store = _store(place, address, timedelta(seconds=timeout_s))
    if place.rank == 0:
        _warn(address, secret)
    ways = (partial(Liveness, address=address, secret=secret), flight_record, host_transport)
    return Rendezvous(store, place.rank, place.world_size, address, *ways)


def loopback_store(timeout: timedelta = timedelta(seconds=300)) -> TCPStore:
    """A store that only this machine reaches, at a free port."""
    return _listening_store(LOOPBACK, 0, timeout)


def one_machine() -> dict[str, str]:
    """Variables for the ranks of a new job that is all on this machine."""
    return {"ANYCHIP_SECRET": secrets.token_hex(32), "GLOO_SOCKET_IFNAME": "lo"}


def listening_address(host: str, port: int, interface: str | None, *, is_one_machine: bool) -> str:
    """The address of this machine at which a rank listens.

    Args:
        host, port: of the store; empty: it is none that is reached by network.
    """
    if interface is not None:
        return _address_of(interface)
    if is_one_machine or not host:
        return LOOPBACK
    kind = socket.SOCK_DGRAM
    family, _, _, _, place = socket.getaddrinfo(host, port or 1, type=kind)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing: the kernel says by which address it would
        return str(probe.getsockname()[0])


def _address_of(interface: str) -> str:
    with suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = struct.pack("256s", interface.encode()[:15])
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                f"ANYCHIP_INTERFACE={interface}: no address, and no interface that has one "
                f"({error.strerror}); there are {names}"
            ) from None
    return socket.inet_ntoa(found[20:24])


def _store(launched: Launched, address: str, timeout: timedelta) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    if launched.rank == 0 and not launched.has_store:
        return _kept_store(address, launched.port, timeout)
    # On one machine rank 0 listens on loopback, whatever its name; a launcher where it says.
    host = LOOPBACK if address == LOOPBACK and not launched.has_store else launched.host
    return TCPStore(host, launched.port, None, False, timeout)


@cache
def _kept_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Rank 0's; the jobs of a process follow each other in one store."""
    return _listening_store(address, port, timeout)


def _listening_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((address, port), family=family, backlog=1024)
    # torch listens at all addresses unless it is given a socket, which is its own from here on.
    return TCPStore(
        address, listener.getsockname()[1], None, True, timeout, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def _place_of(store: Any) -> tuple[str, int]:
    """Host and port of a store; empty when it is none that is reached by network."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", ""), getattr(store, "port", 0)


def _warn(address: str, secret: bytes) -> None:
    """What is not as it should be, said by rank 0 alone."""
    missing, texts = heartbeat.load()[1], []
    if missing:
        texts.append(f"ranks are lost after {WITHOUT_NATIVE} times run.heartbeat_s only: {missing}")
    if not secret:
        texts.append(
            f"the ranks' side channel is unauthenticated: whoever reaches {address} can speak for "
            "a rank; set ANYCHIP_SECRET, or ANYCHIP_SECRET_FILE, to the same on all ranks"
        )
    for text in texts:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
