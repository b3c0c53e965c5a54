"""torch_npu's switch of the process for speed against digits, held still around one call.

The switch for the same bits on every run is torch's own: some of CANN's gradients add what several
cores computed in the order in which they finish, unless determinism is asked for
(aclrtCtxSetSysParamOpt); torch_npu asks for it when torch does, at the call, before the work is
queued.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch


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
