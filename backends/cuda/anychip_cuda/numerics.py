"""torch's process-wide switches for speed against digits, held still around one call.

A row promises the digits of its operator, whatever the process was told: float32 products in
float32, sums of 16-bit products in float32. The switches are put back as they were found. While a
call is being queued other threads see them too, which can only make their results more exact, or
their kernels slower.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

_C: Any = torch._C
_FULL = "ieee"


Found = tuple[Any, ...]


class Held:
    """Switches that are set while anybody is within, and put back by whoever leaves last.

    Calls of several threads overlap. If each put back what it found, the first to leave would take
    the switches from the others, and the last one leave them as another had set them, for good.

    Args:
        set: sets the switches; returns what they were.
        put_back: is given that.
    """

    def __init__(self, set: Callable[[], Found], put_back: Callable[[Found], None]) -> None:
        self._set, self._put_back = set, put_back
        self._lock, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._found = self._set()
            self._inside += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._put_back(self._found)


def _set_products() -> Found:
    precision = _C._get_fp32_precision_getter("cuda", "matmul")
    bf16 = _C._get_cublas_allow_bf16_reduced_precision_reduction()
    fp16 = _C._get_cublas_allow_fp16_reduced_precision_reduction()
    sums = _C._get_cublas_allow_fp16_accumulation()
    if precision not in (_FULL, "none"):
        _C._set_fp32_precision_setter("cuda", "matmul", _FULL)
    _C._set_cublas_allow_bf16_reduced_precision_reduction(*_refused(bf16))
    _C._set_cublas_allow_fp16_reduced_precision_reduction(*_refused(fp16))
    if sums:
        _C._set_cublas_allow_fp16_accumulation(False)
    return precision, bf16, fp16, sums


def _put_back_products(found: Found) -> None:
    precision, bf16, fp16, sums = found
    if precision not in (_FULL, "none"):
        _C._set_fp32_precision_setter("cuda", "matmul", precision)
    _C._set_cublas_allow_bf16_reduced_precision_reduction(*_listed(bf16))
    _C._set_cublas_allow_fp16_reduced_precision_reduction(*_listed(fp16))
    if sums:
        _C._set_cublas_allow_fp16_accumulation(True)


exact_products = Held(_set_products, _put_back_products)
"""Within it products of cuBLAS are exact but for float32 sums, and one rounding at the end.

Off are TF32, which has 10 bits, sums of partial results in 16 bits, and sums in float16.
"""


def _set_convolutions() -> Found:
    precision = _C._get_fp32_precision_getter("cuda", "conv")
    found = precision, _C._get_cudnn_deterministic(), _C._get_cudnn_benchmark()
    _C._set_fp32_precision_setter("cuda", "conv", _FULL)
    _C._set_cudnn_deterministic(True)
    _C._set_cudnn_benchmark(False)
    return found


def _put_back_convolutions(found: Found) -> None:
    precision, deterministic, benchmark = found
    _C._set_fp32_precision_setter("cuda", "conv", precision)
    _C._set_cudnn_deterministic(deterministic)
    _C._set_cudnn_benchmark(benchmark)


exact_convolutions = Held(_set_convolutions, _put_back_convolutions)
"""Within it convolutions of cuDNN are of float32 numbers, and repeat in bits.

Off are TF32, algorithms whose sums come in any order, and the choice of the algorithm by time.
"""


def _listed(found: Any) -> tuple[bool, ...]:
    """Arguments of the setter that make ``found``; older versions of torch have one flag."""
    return found if isinstance(found, tuple) else (found,)


def _refused(found: Any) -> tuple[bool, ...]:
    """Arguments that refuse 16-bit sums and leave the second flag, splitting, as it was."""
    return (False, *_listed(found)[1:])
