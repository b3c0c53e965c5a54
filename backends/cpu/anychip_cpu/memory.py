"""The host's memory part: statistics of the C library's allocator, which torch's tensors come from.

They are of the whole process, Python's own objects included. The allocator keeps no peak. Blocks
that anychip.host_memory keeps are counted with them, and given back by ``empty_cache``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import cffi  # type: ignore[import-untyped]

from anychip import host_memory
from anychip.contract import Memory, MemoryInfo, MemoryStats

_ffi = cffi.FFI()
_ffi.cdef("""
    struct mallinfo2 {
        size_t arena, ordblks, smblks, hblks, hblkhd;
        size_t usmblks, fsmblks, uordblks, fordblks, keepcost;
    };
    struct mallinfo2 mallinfo2(void);
    int malloc_trim(size_t pad);
""")
_libc: Any = _ffi.dlopen(None)


def has_statistics() -> bool:
    """Whether the C library counts: glibc since 2.33 does."""
    return hasattr(_libc, "mallinfo2")


class CpuMemory(Memory):
    """Memory of the host."""

    def stats(self, index: int | None = None) -> MemoryStats:
        self.backend.check_index(index)
        self.backend.require("memory_stats", "memory.stats()")
        info, kept = _libc.mallinfo2(), host_memory.statistics()
        # Blocks above the mmap threshold are counted apart from the arenas.
        allocated = info.uordblks + info.hblkhd + kept.allocated
        return MemoryStats(allocated, info.arena + info.hblkhd + kept.reserved, None)

    def empty_cache(self) -> None:
        self.backend.require("memory_stats", "memory.empty_cache()")
        _libc.malloc_trim(0)
        host_memory.trim()

    def info(self, index: int | None = None) -> MemoryInfo:
        self.backend.check_index(index)
        meminfo = Path("/proc/meminfo")
        if meminfo.is_file():
            lines = (line.split() for line in meminfo.read_text().splitlines())
            kib = {words[0]: int(words[1]) for words in lines if len(words) > 1}
            return MemoryInfo(kib["MemAvailable:"] * 1024, kib["MemTotal:"] * 1024)
        page = os.sysconf("SC_PAGE_SIZE")
        return MemoryInfo(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page)
