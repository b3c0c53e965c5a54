"""Switches of the process for speed against digits, held still around one call.

Some of CANN's gradients add what several cores computed in the order in which they finish, unless
determinism is asked for (aclrtCtxSetSysParamOpt); torch_npu asks for it when torch does. It takes
torch's switch at the call, before the work is queued. A row promises the same bits on every run.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

_C: Any = torch._C


class SameBits:
    """Within it torch_npu asks CANN for its deterministic kernels.

    The switch is put back as it was found. While a call is being queued other threads see it too,
    which can only make their results the same on every run, or their kernels slower. Nothing is
    filled: that would cost a pass over every tensor that the call allocates.
    """

    def __enter__(self) -> None:
        self._mode = _C._get_deterministic_algorithms()
        self._warns = _C._get_deterministic_algorithms_warn_only()
        self._fills = _C._get_deterministic_fill_uninitialized_memory()
        _C._set_deterministic_fill_uninitialized_memory(False)
        _C._set_deterministic_algorithms(True, warn_only=False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _C._set_deterministic_algorithms(self._mode, warn_only=self._warns)
        _C._set_deterministic_fill_uninitialized_memory(self._fills)


class ExactProducts:
    """Within it float32 products keep float32's digits: HF32, which has 11 bits, is off.

    torch_npu takes the switch at the call too. It is off by default:
    https://www.hiascend.com/document/detail/zh/Pytorch/720/apiref/torchnpuCustomsapi/context/torch_npu-npu-matmul-allow_hf32.md
    """

    def __enter__(self) -> None:
        self._matmul: Any = torch.npu.matmul  # type: ignore[attr-defined, unused-ignore]
        self._allowed = bool(self._matmul.allow_hf32)
        if self._allowed:
            self._matmul.allow_hf32 = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._allowed:
            self._matmul.allow_hf32 = True
