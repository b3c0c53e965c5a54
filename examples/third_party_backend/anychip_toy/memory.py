"""The toy's memory part: the host's memory, whose free bytes the system knows.

A chip with a torch adapter needs this only where its adapter does not report what is asked here.
"""

from __future__ import annotations

import os

from anychip.contract import Memory, MemoryInfo


class ToyMemory(Memory):
    """Memory of the host. Without the capability ``memory_stats``, that is all there is to say."""

    def info(self, index: int | None = None) -> MemoryInfo:
        self.backend.check_index(index)
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PHYS_PAGES")
        return MemoryInfo(free * page, total * page)
