"""Who sends the heartbeats of this process? A native thread, which needs nothing of Python's.

A rank whose interpreter is held by a long call in C is alive, and says so; one that is stopped
falls silent with all its threads. Each beat also says how often the listening thread has turned,
which is Python's: whether a rank is alive and whether it gets on are two questions. Where the
library is missing, Python's thread sends the beats, and silence means less.
"""

import contextlib
import ctypes
import os
import socket
import threading
from typing import Any

from anychip.comm import frames, native

_SEND_MS = 1000
_ABI = 1


def load() -> tuple[Any, str]:
    """The library, or None and why there is none."""
    library, missing = native.load("_heartbeat", "anychip_heartbeat_abi", _ABI)
    if library is not None:
        library.anychip_heartbeat_new.restype = ctypes.c_void_p
    return library, missing


class Heartbeat:
    """Sends frames on connections: those that it is given, and a beat in every interval.

    Attributes:
        missing: why beats need Python here; empty when they do not.
    """

    def __init__(self, rank: int, interval_s: float) -> None:
        self._library, self.missing = load()
        self._rank, self._lock, self._ticks = rank, threading.Lock(), 0
        self._keys: dict[int, bytes] = {}
        self._numbers: dict[tuple[int, bool], int] = {}
        self._handle = ctypes.c_void_p()
        if self._library is not None:
            milliseconds = ctypes.c_int64(max(1, round(interval_s * 1000)))
            self._handle.value = self._library.anychip_heartbeat_new(milliseconds)
            if self._handle.value is None:
                self._library, self.missing = None, "the system gave no thread"

    def add(self, descriptor: int, key: bytes) -> None:
        """Takes a connection, whose file descriptor stays open until it is removed."""
        with self._lock:
            self._keys[descriptor] = key
        if self._library is not None:
            content = frames.body(frames.Frame(frames.BEAT, self._rank), 0)
            self._library.anychip_heartbeat_add(self._handle, descriptor, key, content)

    def remove(self, descriptor: int) -> None:
        """Sends nothing more on a connection, which may then be closed."""
        with self._lock:
            if self._keys.pop(descriptor, None) is None:
                return
            for is_beat in (False, True):
                self._numbers.pop((descriptor, is_beat), None)
        if self._library is not None:
            self._library.anychip_heartbeat_remove(self._handle, descriptor)

    def tick(self) -> None:
        """The listening thread turns: beats say so, or are sent here."""
        if self._library is not None:
            self._library.anychip_heartbeat_tick(self._handle)
            return
        self._ticks += 1
        for descriptor in list(self._keys):
            self.send(descriptor, frames.Frame(frames.BEAT, self._rank, self._ticks))

    def send(self, descriptor: int, frame: frames.Frame) -> None:
        """Sends a frame; waits a second for room. A connection that is gone tells its reader."""
        with self._lock:
            place = (descriptor, frame.kind == frames.BEAT)
            number = self._numbers.get(place, 0)
            if descriptor not in self._keys:
                return
            self._numbers[place] = number + 1
            sealed = frames.seal(self._keys[descriptor], frames.body(frame, number))
            if self._library is None:
                _send(descriptor, sealed)
                return
            # Under the lock: frames leave in the order of their numbers, whichever threads send.
            self._library.anychip_heartbeat_send(
                self._handle, descriptor, sealed, len(sealed), ctypes.c_int64(_SEND_MS)
            )

    def close(self) -> None:
        """Ends the thread."""
        if self._library is not None and self._handle.value is not None:
            self._library.anychip_heartbeat_free(self._handle)
            self._handle.value = None
            self._library = None


def _send(descriptor: int, data: bytes) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as end, contextlib.suppress(OSError):
        end.settimeout(_SEND_MS / 1000)
        end.sendall(data)
