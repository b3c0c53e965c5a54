"""torch_npu's switch of the process for speed against digits, held still around one call.

The switch for the same bits on every run is torch's own: some of CANN's gradients add what several
cores computed in the order in which they finish, unless determinism is asked for
(aclrtCtxSetSysParamOpt); torch_npu asks for it when torch does, at the call, before the work is
queued.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch


class _ExactProducts:
    """The switch is off while anybody is within, and put back by whoever leaves last: calls of
    several threads overlap.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        matmul: Any = torch.npu.matmul  # type: ignore[attr-defined, unused-ignore]
        with self._lock:
            if not self._inside:
                self._allowed = bool(matmul.allow_hf32)
                if self._allowed:
                    matmul.allow_hf32 = False
            self._inside += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._allowed:
                torch.npu.matmul.allow_hf32 = True  # type: ignore[attr-defined, unused-ignore]


exact_products = _ExactProducts()
"""Within it float32 products keep float32's digits: HF32, which has 11 bits, is off.

torch_npu takes the switch at the call too. It is off by default:
https://www.hiascend.com/document/detail/zh/Pytorch/720/apiref/torchnpuCustomsapi/context/torch_npu-npu-matmul-allow_hf32.md
"""
