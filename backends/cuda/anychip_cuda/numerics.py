"""torch's process-wide switches for speed against digits, held still around one call.

A row promises the digits of its operator, whatever the process was told: float32 products in
float32, sums of 16-bit products in float32. The switches are put back as they were found. While a
call is being queued other threads see them too, which can only make their results more exact, or
their kernels slower.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

_C: Any = torch._C
_FULL = "ieee"


class ExactProducts:
    """Within it products of cuBLAS are exact but for float32 sums, and one rounding at the end.

    Off are TF32, which has 10 bits, sums of partial results in 16 bits, and sums in float16.
    """

    def __enter__(self) -> None:
        self._precision = _C._get_fp32_precision_getter("cuda", "matmul")
        self._bf16 = _C._get_cublas_allow_bf16_reduced_precision_reduction()
        self._fp16 = _C._get_cublas_allow_fp16_reduced_precision_reduction()
        self._sums = _C._get_cublas_allow_fp16_accumulation()
        if self._precision not in (_FULL, "none"):
            _C._set_fp32_precision_setter("cuda", "matmul", _FULL)
        _C._set_cublas_allow_bf16_reduced_precision_reduction(*_refused(self._bf16))
        _C._set_cublas_allow_fp16_reduced_precision_reduction(*_refused(self._fp16))
        if self._sums:
            _C._set_cublas_allow_fp16_accumulation(False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._precision not in (_FULL, "none"):
            _C._set_fp32_precision_setter("cuda", "matmul", self._precision)
        _C._set_cublas_allow_bf16_reduced_precision_reduction(*_listed(self._bf16))
        _C._set_cublas_allow_fp16_reduced_precision_reduction(*_listed(self._fp16))
        if self._sums:
            _C._set_cublas_allow_fp16_accumulation(True)


class ExactConvolutions:
    """Within it convolutions of cuDNN are of float32 numbers, and repeat in bits.

    Off are TF32, algorithms whose sums come in any order, and the choice of the algorithm by time.
    """

    def __enter__(self) -> None:
        self._precision = _C._get_fp32_precision_getter("cuda", "conv")
        self._deterministic = _C._get_cudnn_deterministic()
        self._benchmark = _C._get_cudnn_benchmark()
        _C._set_fp32_precision_setter("cuda", "conv", _FULL)
        _C._set_cudnn_deterministic(True)
        _C._set_cudnn_benchmark(False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _C._set_fp32_precision_setter("cuda", "conv", self._precision)
        _C._set_cudnn_deterministic(self._deterministic)
        _C._set_cudnn_benchmark(self._benchmark)


def _listed(found: Any) -> tuple[bool, ...]:
    """Arguments of the setter that make ``found``; older versions of torch have one flag."""
    return found if isinstance(found, tuple) else (found,)


def _refused(found: Any) -> tuple[bool, ...]:
    """Arguments that refuse 16-bit sums and leave the second flag, splitting, as it was."""
    return (False, *_listed(found)[1:])
