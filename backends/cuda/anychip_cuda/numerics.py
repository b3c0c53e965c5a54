"""torch's process-wide switches for speed against digits, held still around one call.

A row promises the digits of its operator, whatever the process was told: float32 products in
float32, sums of 16-bit products in float32. The switches are put back as they were found. While a
call is being queued other threads see them too, which can only make their results more exact, or
their kernels slower.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, ClassVar

import torch

_C: Any = torch._C
_FULL = "ieee"


class _Held:
    """Switches that are set while anybody is within, and put back by whoever leaves last.

    Calls of several threads overlap: if each put back what it found, the last one would leave what
    another had set, for good.
    """

    _lock: ClassVar[threading.Lock]
    _inside: ClassVar[int]
    _found: ClassVar[Any]

    def __init_subclass__(cls) -> None:
        cls._lock, cls._inside, cls._found = threading.Lock(), 0, None

    @staticmethod
    def set() -> Any:
        """Sets the switches; returns what :meth:`put_back` needs."""
        raise NotImplementedError

    @staticmethod
    def put_back(found: Any) -> None:
        """Makes the switches what they were."""
        raise NotImplementedError

    def __enter__(self) -> None:
        cls = type(self)
        with cls._lock:
            if not cls._inside:
                cls._found = self.set()
            cls._inside += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        cls = type(self)
        with cls._lock:
            cls._inside -= 1
            if not cls._inside:
                self.put_back(cls._found)


class ExactProducts(_Held):
    """Within it products of cuBLAS are exact but for float32 sums, and one rounding at the end.

    Off are TF32, which has 10 bits, sums of partial results in 16 bits, and sums in float16.
    """

    @staticmethod
    def set() -> Any:
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

    @staticmethod
    def put_back(found: Any) -> None:
        precision, bf16, fp16, sums = found
        if precision not in (_FULL, "none"):
            _C._set_fp32_precision_setter("cuda", "matmul", precision)
        _C._set_cublas_allow_bf16_reduced_precision_reduction(*_listed(bf16))
        _C._set_cublas_allow_fp16_reduced_precision_reduction(*_listed(fp16))
        if sums:
            _C._set_cublas_allow_fp16_accumulation(True)


class ExactConvolutions(_Held):
    """Within it convolutions of cuDNN are of float32 numbers, and repeat in bits.

    Off are TF32, algorithms whose sums come in any order, and the choice of the algorithm by time.
    """

    @staticmethod
    def set() -> Any:
        precision = _C._get_fp32_precision_getter("cuda", "conv")
        found = precision, _C._get_cudnn_deterministic(), _C._get_cudnn_benchmark()
        _C._set_fp32_precision_setter("cuda", "conv", _FULL)
        _C._set_cudnn_deterministic(True)
        _C._set_cudnn_benchmark(False)
        return found

    @staticmethod
    def put_back(found: Any) -> None:
        precision, deterministic, benchmark = found
        _C._set_fp32_precision_setter("cuda", "conv", precision)
        _C._set_cudnn_deterministic(deterministic)
        _C._set_cudnn_benchmark(benchmark)


def _listed(found: Any) -> tuple[bool, ...]:
    """Arguments of the setter that make ``found``; older versions of torch have one flag."""
    return found if isinstance(found, tuple) else (found,)


def _refused(found: Any) -> tuple[bool, ...]:
    """Arguments that refuse 16-bit sums and leave the second flag, splitting, as it was."""
    return (False, *_listed(found)[1:])
