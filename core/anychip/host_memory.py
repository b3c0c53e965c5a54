"""Memory of the host that is kept: torch's tensors there in blocks that are used again.

The C library gives large blocks back to the system when they are freed, and gets them again as
pages filled with zeros, one fault for each. A training step allocates the same sizes every time, so
all of that is waste. :func:`keep` replaces torch's allocator for tensors of the host, from
64 KiB on, by one that keeps blocks, aligns those of 2 MiB and more to 2 MiB and asks for huge
pages (csrc/host/blocks.h says how). It holds for the whole process, whoever makes the tensors: so
it is the user's decision, here or by ``ANYCHIP_HOST_MEMORY=kept``, and never the package's.
"""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

from anychip.contract import AnychipError
from anychip.torch_extension import TorchExtension

EXTENSION = TorchExtension(
    name="host", title="the allocator of host memory for torch", takes="some seconds",
    says="torch_memory",
)  # fmt: skip
LIMIT_PART = 4
"""Free blocks hold at most one of so many parts of the memory there is, unless told otherwise."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Statistics(NamedTuple):
    """Of kept blocks since the process began.

    Attributes:
        allocated: bytes of blocks in use, rounded up to their class, by at most an eighth.
        reserved: bytes of all blocks, free ones included.
        peak_allocated: the highest ``allocated`` since then or :func:`reset_peak`.
        taken: how many blocks came from the system.
        reused: how many requests were served by one that had been freed.
    """

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    taken: int = 0
    reused: int = 0


class _Statistics(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in Statistics._fields]


@cache
def _library() -> ctypes.CDLL:
    library = EXTENSION.load()
    library.anychip_host_keep.argtypes = [ctypes.c_size_t, ctypes.c_bool]
    library.anychip_host_keep.restype = ctypes.c_bool
    library.anychip_host_trim.argtypes = [ctypes.c_size_t]
    library.anychip_host_statistics.argtypes = [ctypes.POINTER(_Statistics)]
    return library


def keep(limit: int | None = None, *, huge_pages: bool = True) -> None:
    """Makes torch's tensors of the host from now on in blocks that are kept; again: other limits.

    The library that does it is built with g++ on the first use with a minor of torch, in some
    seconds. Processes that are forked keep, too.

    Args:
        limit: bytes that free blocks may hold, before the one that has been free for longest goes
            back to the system; None: a quarter of the memory that this process may use.
        huge_pages: ask for pages of 2 MiB where blocks are that large.

    Raises:
        ValueError: a negative limit.
        BuildError: the library has to be built, and cannot be.
        AnychipError: another package has replaced torch's allocator.
    """
    if limit is not None and limit < 0:
        raise ValueError(f"host_memory.keep: limit must be at least 0 bytes, got {limit}")
    allowed = total_memory() // LIMIT_PART if limit is None else limit
    if not _library().anychip_host_keep(allowed, huge_pages):
        raise AnychipError(
            "host_memory.keep: torch's allocator of host memory has been replaced by something else"
            " in this process already, and only one can be: leave it, or do not import that"
        )


def _kept_once() -> ctypes.CDLL | None:
    """The library, if this process has ever kept: nothing is built to say that nothing is kept."""
    return _library() if _library.cache_info().currsize else None


def stop() -> None:
    """Gives torch its own allocator back, and the system every block as soon as it is free."""
    if library := _kept_once():
        library.anychip_host_stop()


def trim(keep: int = 0) -> None:
    """Gives free blocks back to the system until they hold at most ``keep`` bytes."""
    if library := _kept_once():
        library.anychip_host_trim(keep)


def statistics() -> Statistics:
    """What is kept now; zeros in a process that has never kept."""
    found = _Statistics()
    if library := _kept_once():
        library.anychip_host_statistics(ctypes.byref(found))
    return Statistics(*(getattr(found, name) for name in Statistics._fields))


def reset_peak() -> None:
    """Sets ``peak_allocated`` to what is allocated now."""
    if library := _kept_once():
        library.anychip_host_reset_peak()


def total_memory() -> int:
    """Bytes that this process may use: the machine's, or the limit of its control group."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, _CGROUP_LIMITS):
        text = path.read_text().strip() if path.is_file() else ""
        found += [int(text)] if text.isdigit() else []
    return min(found)
