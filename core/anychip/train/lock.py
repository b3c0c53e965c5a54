"""Who may write into a directory? One at a time, by a lock that ends with the process."""

import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anychip.contract import AnychipError

NAME = ".lock"
"""Of the file that is locked; one of a process that was killed says nothing, and is taken over."""

_HOLDER = re.compile(r"process \d+ on [\w.-]{1,64}", re.ASCII)


class DirectoryInUseError(AnychipError, ValueError):
    """Another process, or another part of this one, writes into the directory."""


@contextmanager
def hold(directory: Path, *, wait_s: float = 0.0, taken: int | None = None) -> Iterator[None]:
    """Nobody else who asks writes into a directory until the block ends, or the process.

    Args:
        wait_s: for one that has it.
        taken: what :func:`take` gave to the process that has started this one.

    Raises:
        DirectoryInUseError: one still has it.
        OSError: the directory is not there or cannot be written, or its file system has no locks.
    """
    path, deadline = directory / NAME, time.monotonic() + wait_s
    while (descriptor := _locked(path) if taken is None else taken) is None:
        if time.monotonic() >= deadline:
            raise DirectoryInUseError(
                f"{directory} is in use: {_holder(path)} writes into it; wait until it has ended, "
                "or end it, or name another directory"
            )
        time.sleep(0.01)
    try:
        # On a full disk nobody is named, and nothing else changes.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        try:
            with suppress(OSError):  # in a directory that is read-only by now it stays, unlocked
                path.unlink()
        finally:
            os.close(descriptor)


def take(directory: Path) -> int | None:
    """The lock as a descriptor, for a process that is to :func:`hold` it; None: somebody has it.

    The lock ends when everybody has closed it.
    """
    return _locked(directory / NAME)


def is_held(directory: Path) -> bool:
    """Whether somebody writes into a directory now."""
    try:
        descriptor = os.open(directory / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _locked(path: Path) -> int | None:
    """The descriptor of the file, locked; None: somebody else has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who had it has removed the file: then that of whoever comes next is another one.
        if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        os.close(descriptor)
        raise OSError(error.errno, f"cannot be locked: {error.strerror}", str(path)) from error
    os.close(descriptor)
    return None


def _holder(path: Path) -> str:
    try:
        text = path.read_bytes()[:200].decode("utf-8", errors="replace")
    except OSError:
        text = ""
    return text if _HOLDER.fullmatch(text) else "another process"
