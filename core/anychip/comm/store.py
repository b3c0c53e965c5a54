"""A connection to the job's store that can be cut, and parts of a store with keys of their own.

torch gives no access to a store's connection: it is the one that opens when it is made. Whoever
asks the store of a process that is stopped would wait for ever.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def part_of(store: Store, prefix: str) -> Store:
    """A part of a store with keys of its own."""
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(prefix, store)


class Connection:
    """A connection to a store that nobody else uses.

    Attributes:
        store: asked by it.
    """

    def __init__(self, store: Any) -> None:
        port = getattr(_underlying(store), "port", None)
        before = _connections_to(port)
        self.store: Store = store.clone()
        opened = [found for found in _connections_to(port) if found not in before]
        self._socket = socket.socket(fileno=os.dup(opened[0])) if opened else None

    def abort(self) -> None:
        """Wakes whoever waits for an answer."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives up the handle; the store closes its end by itself."""
        if self._socket is not None:
            self._socket.close()


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
    with contextlib.suppress(OSError, IndexError, TypeError, ValueError):
        end = socket.socket(fileno=number)
        try:
            return int(end.getpeername()[1])
        finally:
            end.detach()
    return None
