"""Memory of a device: torch_npu's caching allocator.

Statistics and peak are the contract's defaults: torch.npu has calls of these meanings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from anychip.contract import Memory, MemoryInfo
from anychip_npu import errors

if TYPE_CHECKING:
    import torch


class NpuMemory(Memory):
    """What differs from the contract's defaults: errors, and the time before the first use."""

    @contextmanager
    def out_of_memory(self, nbytes: int, index: int | None = None) -> Iterator[None]:
        """As the contract says, with the sizes, which torch_npu leaves out for very large ones.

        Raises:
            DeviceError: the allocation failed with another status than "no memory".
        """
        import torch

        try:
            yield
        except (RuntimeError, MemoryError) as error:
            known = errors.device_error(f"npu: allocate {nbytes} bytes", error)
            if known is not None and known.code != errors.NO_MEMORY:
                raise known from error
            free, total = self.info(index)
            raise torch.OutOfMemoryError(
                f"backend {self.backend.name!r}: cannot allocate {nbytes} bytes on "
                f"{self.backend.device(index)}: {free} of {total} bytes are free; {error}"
            ) from error

    def info(self, index: int | None = None) -> MemoryInfo:
        """As the contract says.

        In a thread that has set no device, torch_npu 2.13 answers for the one it used last,
        whichever is asked for. So the current one is set, which changes nothing else.
        """
        self.backend.set_device(self.backend.current_device())
        return super().info(index)

    def copy_async(
        self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream | None = None
    ) -> None:
        """As the contract says; torch_npu 2.13 takes conjugate and negative views for plain."""
        if not any(tensor.is_conj() or tensor.is_neg() for tensor in (target, source)):
            return super().copy_async(target, source, stream)
        with nullcontext() if stream is None else self.backend.use_stream(stream):
            plain = source
            if target.is_conj():
                target, plain = target.conj(), plain.conj()
            if target.is_neg():
                target, plain = target._neg_view(), plain.to(target.dtype).neg()
            super().copy_async(target, plain.resolve_conj().resolve_neg(), stream)
        if stream is not None and source.device.type == self.backend.device_type:
            source.record_stream(stream)

    def reset_peak(self, index: int | None = None) -> None:
        self.backend.device_module().init()  # an allocator that was not started has no counters
        super().reset_peak(index)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory.

        Raises:
            torch.OutOfMemoryError: there is not so much. torch_npu 2.13 does not say so: it gives a
                tensor without memory.
        """
        import torch

        room = super().pinned(nbytes)
        if nbytes and not room.data_ptr():
            raise torch.OutOfMemoryError(
                f"backend {self.backend.name!r}: cannot allocate {nbytes} bytes of page-locked "
                "host memory: CANN has no more to give"
            )
        return room
