"""Memory of a device: torch's caching allocator, and the driver's own figures.

Statistics, peak, copies and running out are the contract's defaults: torch.cuda has calls of these
meanings, and raises ``torch.OutOfMemoryError`` with the sizes itself.
"""

from __future__ import annotations

import torch

from anychip.contract import Memory


class CudaMemory(Memory):
    """What differs from the contract's defaults: before the first use, and page-locked memory."""

    def reset_peak(self, index: int | None = None) -> None:
        torch.cuda.init()  # an allocator that was not started has no counters to set
        super().reset_peak(index)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory.

        Raises:
            torch.OutOfMemoryError: the driver cannot lock so much; torch itself names no sizes.
        """
        try:
            return super().pinned(nbytes)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "out of memory" not in str(error):
                raise
            raise torch.OutOfMemoryError(
                f"backend {self.backend.name!r}: cannot allocate {nbytes} bytes of page-locked "
                "host memory: the driver has no more to give"
            ) from error
