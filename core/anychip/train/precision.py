"""In which dtype a model computes: fp32, or bf16 by autocast over float32 parameters."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from anychip.contract import Backend, UnsupportedError

NAMES = ("fp32", "bf16", "auto")


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A precision, decided.

    Attributes:
        name: ``fp32`` or ``bf16``.
        device_type: torch's device type that autocast works on.
        why: how it was decided, for people.
    """

    name: str
    device_type: str
    why: str

    def autocast(self) -> AbstractContextManager[Any]:
        """Context for the forward pass. Matrix products run in bf16; parameters stay float32."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device_type, dtype=torch.bfloat16)


def policy(name: str, backend: Backend) -> Policy:
    """The precision for a backend.

    Args:
        name: ``fp32``, ``bf16``, or ``auto``: bf16 where the backend's properties give a higher
            rate for it than for float32. A backend that gives no rates gets fp32.

    Raises:
        UnsupportedError: fp16, which needs loss scaling; or bf16 on a device without it.
        ValueError: another name.
    """
    if name == "fp16":
        raise UnsupportedError(
            "precision 'fp16' needs dynamic loss scaling, which is not part of this version; "
            "use bf16 or fp32"
        )
    if name not in NAMES:
        raise ValueError(f"precision must be one of {', '.join(NAMES)}, got {name!r}")
    properties = backend.properties()
    why = "asked for"
    if name == "auto":
        rates = properties.flops
        full, half = rates.get(torch.float32, math.inf), rates.get(torch.bfloat16, 0.0)
        name = "bf16" if half > full else "fp32"
        why = f"auto: {properties.name} declares {_rate(half)} in bf16, {_rate(full)} in float32"
    if name == "bf16" and torch.bfloat16 not in properties.dtypes:
        known = ", ".join(sorted(str(d).removeprefix("torch.") for d in properties.dtypes))
        raise UnsupportedError(f"{properties.name} does not compute in bf16; it has {known}")
    return Policy(name=name, device_type=backend.device_type, why=why)


def _rate(flops: float) -> str:
    return "no rate" if flops in (0.0, math.inf) else f"{flops / 1e12:.1f} Tflop/s"
