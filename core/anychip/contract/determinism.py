"""torch's process-wide switch for the same bits on every run, held still around one call.

For rows that call kernels of torch or of its adapters, and promise what those give only if asked.
"""

from __future__ import annotations

from typing import Any

import torch

from anychip.contract import settings

_C: Any = torch._C


class SameBits:
    """Within it torch, and an adapter that reads its switch, take deterministic kernels.

    The switch is put back as it was found. While a call is being queued other threads see it too,
    which can only make their results the same on every run, or their kernels slower. Nothing is
    filled: that would cost a pass over every tensor that the call allocates.
    """

    def __enter__(self) -> None:
        settings.turns += 1
        self._mode = _C._get_deterministic_algorithms()
        self._warns = _C._get_deterministic_algorithms_warn_only()
        self._fills = _C._get_deterministic_fill_uninitialized_memory()
        _C._set_deterministic_fill_uninitialized_memory(False)
        _C._set_deterministic_algorithms(True, warn_only=False)

    def __exit__(self, *exception: object) -> None:
        settings.turns += 1
        _C._set_deterministic_algorithms(self._mode, warn_only=self._warns)
        _C._set_deterministic_fill_uninitialized_memory(self._fills)
