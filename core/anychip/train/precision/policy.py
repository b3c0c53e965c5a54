"""In which dtype a model computes: fp32, or bf16 or fp16 by autocast over float32 parameters."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from anychip.contract import Backend, UnsupportedError
from anychip.train.precision.scaling import LossScaling

NAMES = ("fp32", "bf16", "fp16", "auto")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_REDUCIBLE = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionPolicy:
    """A precision, decided.

    Attributes:
        name: ``fp32``, ``bf16`` or ``fp16``.
        device_type: torch's device type that autocast works on.
        why: how it was decided, for people.
        reduce_dtype: in which gradients go between ranks and are added up.
        loss_scaling: of fp16; None: the loss is not scaled.
    """

    name: str
    device_type: str
    why: str
    reduce_dtype: torch.dtype = torch.float32
    loss_scaling: LossScaling | None = None

    @property
    def dtype(self) -> torch.dtype:
        """In which matrix products run."""
        return _DTYPES[self.name]

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of the forward pass. Matrix products run in ``name``; parameters are float32."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)


def policy(
    name: str,
    backend: Backend,
    *,
    reduce_dtype: torch.dtype = torch.float32,
    loss_scaling: LossScaling | None = None,
) -> PrecisionPolicy:
    """The precision for a backend.

    Args:
        name: ``fp32``, ``bf16``, ``fp16``, or ``auto``: bf16 where the backend's properties give
            a higher rate for it than for float32. A backend that gives no rates gets fp32.
        reduce_dtype: float32, or bfloat16: half the bytes between ranks, with the sum over the
            ranks rounded to it.
        loss_scaling: for fp16; its defaults when None.

    Raises:
        UnsupportedError: bf16 or fp16 on a device without it.
        ValueError: another name or reduce_dtype, or loss scaling without fp16.
    """
    if name not in NAMES:
        raise ValueError(f"precision must be one of {', '.join(NAMES)}, got {name!r}")
    if reduce_dtype not in _REDUCIBLE:
        known = ", ".join(map(_dtype_name, _REDUCIBLE))
        raise ValueError(f"reduce_dtype must be one of {known}, got {_dtype_name(reduce_dtype)}")
    if loss_scaling is not None and name != "fp16":
        raise ValueError(f"loss_scaling is for precision 'fp16', got it with {name!r}")
    properties = backend.properties()
    why = "asked for"
    if name == "auto":
        rates = properties.flops
        full, half = rates.get(torch.float32, math.inf), rates.get(torch.bfloat16, 0.0)
        name = "bf16" if half > full else "fp32"
        why = (
            f"auto: {half / 1e12:.1f} Tflop/s in bf16 and {full / 1e12:.1f} in float32, says "
            f"{properties.name}"
            if half and full < math.inf
            else f"auto: {properties.name} does not say how fast it is in bf16"
        )
    if name != "fp32" and _DTYPES[name] not in properties.dtypes:
        known = ", ".join(sorted(map(_dtype_name, properties.dtypes)))
        raise UnsupportedError(f"{properties.name} does not compute in {name}; it has {known}")
    return PrecisionPolicy(
        name=name, device_type=backend.device_type, why=why, reduce_dtype=reduce_dtype,
        loss_scaling=(loss_scaling or LossScaling()) if name == "fp16" else None,
    )  # fmt: skip


def common_policy(name: str, backend: Backend, decided: Sequence[str]) -> PrecisionPolicy:
    """The precision of a rank in a job of several chips: what all can, where each decides.

    Args:
        name: as of :func:`policy`.
        decided: the names that :func:`policy` gives for the chips of the job.
    """
    if len({*decided}) == 1:
        return policy(name, backend)
    why = f"{name}: the chips of the job decide for {' and '.join(sorted({*decided}))}"
    return replace(policy("fp32", backend), why=why)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
