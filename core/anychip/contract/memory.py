"""What a chip says about its memory: storages, statistics with a defined meaning, host copies.

Lifetime rule: a kernel runs on torch's current stream of its tensors' device. Outputs and scratch
come from torch's allocator on that stream. Code that uses another stream makes it wait for the
current one, calls ``record_stream`` on every tensor, and makes the current stream wait at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from anychip.contract.device import DeviceInterface
from anychip.contract.errors import ContractError

if TYPE_CHECKING:
    import torch


class MemoryStats(NamedTuple):
    """Bytes of one device at one moment; indices of one memory, a host's, each answer for all.

    Attributes:
        allocated: in live storages, those of torch's own tensors too; grows by at least ``n`` when
            ``n`` bytes are allocated. On the host, whose allocator is the process's, what
            ``allocate`` gave has to count; other tensors may, each once.
        reserved: held from the driver or system, free blocks included; never below ``allocated``.
        peak_allocated: highest ``allocated`` since start or the last reset; None without the
            capability ``memory_peak``. Never falls between two resets, never below ``allocated``.
    """

    allocated: int
    reserved: int
    peak_allocated: int | None


class MemoryInfo(NamedTuple):
    """Bytes of one device as the driver sees them, other processes included."""

    free: int
    total: int


class Memory:
    """The memory part of a backend; a chip overrides what torch's device module does not give."""

    def __init__(self, backend: DeviceInterface) -> None:
        self.backend = backend

    def _adapter(self, method: str, name: str) -> Any:
        """A function of the adapter's module, on which a method stands."""
        found = getattr(self.backend.device_module(), name, None)
        if found is None:
            raise ContractError(
                f"backend {self.backend.name!r}: torch.{self.backend.device_type} has no {name}(), "
                f"on which the contract's memory.{method}() stands; override {method}() in "
                f"{type(self.backend).__module__.partition('.')[0]}'s memory.py"
            )
        return found

    def allocate(self, nbytes: int, index: int | None = None) -> torch.UntypedStorage:
        """A storage of ``nbytes`` bytes, contents undefined; freed when the last reference goes.

        Raises:
            torch.OutOfMemoryError: with the sizes asked for and free. The device stays usable.
            ValueError: a size that is negative, or no integer.
        """
        import torch

        if not isinstance(nbytes, int) or nbytes < 0:
            raise ValueError(f"allocate: nbytes must be an integer of at least 0, got {nbytes!r}")
        with self.out_of_memory(nbytes, index):
            return torch.UntypedStorage(nbytes, device=self.backend.device(index))

    @contextmanager
    def out_of_memory(self, nbytes: int, index: int | None = None) -> Iterator[None]:
        """Turns an adapter's own allocation failure into ``torch.OutOfMemoryError``."""
        import torch

        try:
            yield
        except (RuntimeError, MemoryError) as error:
            free, total = self.info(index)
            raise torch.OutOfMemoryError(
                f"backend {self.backend.name!r}: cannot allocate {nbytes} bytes on "
                f"{self.backend.device(index)}: {free} of {total} bytes are free ({error})"
            ) from error

    def stats(self, index: int | None = None) -> MemoryStats:
        """Statistics of torch's allocator for the device. Needs the capability ``memory_stats``."""
        self.backend.require("memory_stats", "memory.stats()")
        device, peak = self.backend.device(index), None
        if "memory_peak" in self.backend.capabilities:
            peak = int(self._adapter("stats", "max_memory_allocated")(device))
        allocated = self._adapter("stats", "memory_allocated")(device)
        return MemoryStats(
            int(allocated), int(self._adapter("stats", "memory_reserved")(device)), peak
        )

    def reset_peak(self, index: int | None = None) -> None:
        """Sets ``peak_allocated`` to what is allocated now. Needs ``memory_peak``."""
        self.backend.require("memory_peak", "memory.reset_peak()")
        self._adapter("reset_peak", "reset_peak_memory_stats")(self.backend.device(index))

    def info(self, index: int | None = None) -> MemoryInfo:
        """Free and total bytes of the device, as the driver reports them."""
        free, total = self._adapter("info", "mem_get_info")(self.backend.device(index))
        return MemoryInfo(int(free), int(total))

    def empty_cache(self) -> None:
        """Gives cached free blocks back to the driver. What is allocated stays as it is."""
        self.backend.require("memory_stats", "memory.empty_cache()")
        self._adapter("empty_cache", "empty_cache")()

    def pinned(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` of page-locked host memory as a uint8 tensor. Needs ``pinned_memory``."""
        import torch

        self.backend.require("pinned_memory", "memory.pinned()")
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy_async(
        self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream | None = None
    ) -> None:
        """Queues ``target[...] = source`` on ``stream`` (None: the current one) and returns.

        ``source`` must stay unchanged until the stream has passed this point; both tensors are
        recorded on the stream. Complete for the host only after a synchronisation.
        """
        if stream is None:
            target.copy_(source, non_blocking=True)
            return
        with self.backend.use_stream(stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.device.type == self.backend.device_type:
                tensor.record_stream(stream)
