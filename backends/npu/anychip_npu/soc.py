"""Which series of chips a tensor lies on: the vendor's pages state limits by series.

Atlas A2 has the Ascend 910B, Atlas A3 the Ascend 910_93.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_A2_AND_A3 = ("Ascend910B", "Ascend910_93")


def is_a2_or_a3(x: Tensor) -> bool:
    """Whether the tensor lies on a chip of the series Atlas A2 or A3."""
    return x.device.type == "npu" and _name(x.get_device()).startswith(_A2_AND_A3)


@cache
def _name(index: int) -> str:
    # Asked on every call, and the adapter takes microseconds to answer.
    npu: Any = torch.npu  # type: ignore[attr-defined, unused-ignore]
    return str(npu.get_device_name(index))


def is_recording(x: Tensor) -> bool:
    """Whether a graph is being recorded on the tensor's device, so that nothing can be read."""
    if x.device.type != "npu":
        return False
    npu: Any = torch.npu  # type: ignore[attr-defined, unused-ignore]
    return bool(npu.is_current_stream_capturing())


def keeps_infinities(x: Tensor) -> bool:
    """Whether sums that overflow become Inf, as in IEEE 754, and do not saturate."""
    return x.device.type == "npu" and _has_infinities()


@cache
def _has_infinities() -> bool:
    npu: Any = torch.npu  # type: ignore[attr-defined, unused-ignore]
    return bool(npu.utils.is_support_inf_nan())
