"""A backend that keeps to the contract: what every wrong backend of the catalogue is a twin of.

Two devices that are both the host, a current one per thread, memory that counts and has an end, and
rows for every operator that are the references. Small on purpose; each wrong backend changes one of
its methods or rows.
"""

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from anychip import contract
from anychip.operators import all_specs

DEVICES = 2
CAPACITY = 256 << 20
"""Bytes that all storages of the memory part may have together."""

Row = Callable[..., Any]


class HonestBackend(contract.Backend):
    """The host, twice."""

    name = "honest"
    device_type = "cpu"
    api = (2, 0)
    operators = contract.OperatorTable()
    capabilities: Mapping[str, int] = {"memory_stats": 1, "memory_peak": 1}
    dtypes = frozenset({torch.float32})

    def __init__(self) -> None:
        self.thread = threading.local()

    def probe(self) -> contract.Probe:
        return contract.Probe.ready(DEVICES, kind="host")

    def device_count(self) -> int:
        return DEVICES

    def current_device(self) -> int:
        return getattr(self.thread, "index", 0)

    def set_device(self, index: int) -> None:
        self.thread.index = self.check_index(index)

    def synchronize(self, index: int | None = None) -> None:
        self.check_index(index)

    def properties(self, index: int | None = None) -> contract.DeviceProperties:
        self.check_index(index)
        return contract.DeviceProperties(name="honest", total_memory=CAPACITY, dtypes=self.dtypes)

    @cached_property
    def memory(self) -> contract.Memory:
        return CountingMemory(self)


class CountingMemory(contract.Memory):
    """Storages of the host, counted, up to CAPACITY bytes."""

    def __init__(self, backend: contract.Backend) -> None:
        super().__init__(backend)
        self.allocated, self.peak = 0, 0

    def allocate(self, nbytes: int, index: int | None = None) -> torch.UntypedStorage:
        device = self.backend.device(index)
        if not isinstance(nbytes, int) or nbytes < 0:
            raise ValueError(f"allocate: nbytes must be an integer of at least 0, got {nbytes!r}")
        if self.allocated + nbytes > CAPACITY:
            self.refuse(nbytes)
        storage = torch.UntypedStorage(nbytes, device=device)
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)
        weakref.finalize(storage, self.freed, nbytes)
        return storage

    def refuse(self, nbytes: int) -> None:
        """There is no room."""
        free = CAPACITY - self.allocated
        raise torch.OutOfMemoryError(
            f"cannot allocate {nbytes} bytes: {free} of {CAPACITY} are free"
        )

    def freed(self, nbytes: int) -> None:
        """A storage of so many bytes is gone."""
        self.allocated -= nbytes

    def stats(self, index: int | None = None) -> contract.MemoryStats:
        self.backend.check_index(index)
        return contract.MemoryStats(self.allocated, CAPACITY, self.peak)

    def reset_peak(self, index: int | None = None) -> None:
        self.backend.check_index(index)
        self.peak = self.allocated

    def info(self, index: int | None = None) -> contract.MemoryInfo:
        self.backend.check_index(index)
        return contract.MemoryInfo(CAPACITY - self.allocated, CAPACITY)

    def empty_cache(self) -> None:
        return None


def reference_rows() -> dict[tuple[str, str], Row]:
    """(operator, direction) to a row that is the operator's reference."""
    rows: dict[tuple[str, str], Row] = {}
    for spec in all_specs():
        rows[spec.name, "forward"] = spec.forward
        if spec.backward is not None:
            rows[spec.name, "backward"] = spec.backward
    return rows


def make_table(rows: dict[tuple[str, str], Row]) -> contract.OperatorTable:
    """A backend's table from rows by operator and direction, which say that they are references."""
    table = contract.OperatorTable()
    for (operator, direction), row in rows.items():
        add = table.forward if direction == "forward" else table.backward
        add(operator, kind="reference")(row)
    return table


class HonestRows(HonestBackend):
    """With rows that are the references; a class that ranks, which are processes, can import."""

    operators = make_table(reference_rows())
