"""Devices of torch.cuda: what is known of them, and work that is recorded and queued again.

Streams, events, generators and the current device are the contract's own defaults, which stand on
torch.cuda.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from anychip.contract import DeviceInterface, DeviceProperties, Graph
from anychip_cuda import nvml

_WARMUP_CALLS = 3
"""Libraries choose algorithms, and make handles and workspaces, on their first calls."""

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_RATES: tuple[tuple[str, float, float], ...] = (
    ("NVIDIA B200", 2250e12, 75e12),
    ("NVIDIA GH200", 989e12, 67e12),
    ("NVIDIA H200 NVL", 835e12, 60e12),
    ("NVIDIA H200", 989e12, 67e12),
    ("NVIDIA H100 NVL", 835e12, 60e12),
    ("NVIDIA H100 PCIe", 756e12, 51e12),
    ("NVIDIA H100", 989e12, 67e12),
    ("NVIDIA H20", 148e12, 44e12),
    ("NVIDIA A100", 312e12, 19.5e12),
    ("NVIDIA L40S", 362e12, 91.6e12),
    ("NVIDIA L4", 121e12, 30.3e12),
)
"""Beginning of the name, then flop/s of dense matrix products of 16-bit floats with float32 sums,
and of float32. The first that fits counts. Source: NVIDIA's data sheets of these parts."""


class CudaDevice(DeviceInterface):
    """What torch.cuda and NVIDIA's management library say."""

    def properties(self, index: int | None = None) -> DeviceProperties:
        return _properties(self.check_index(index))

    def capture(self, work: Callable[[], Any]) -> Graph:
        self.require("graphs", "capture()")
        before = torch.cuda.current_stream()
        stream = torch.cuda.Stream()
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            for _ in range(_WARMUP_CALLS):
                work()
        before.wait_stream(stream)
        recorded = torch.cuda.CUDAGraph()
        # Its pool is its own: what it writes is not given to other work between two replays.
        with torch.cuda.graph(recorded):
            result = work()
        return CudaGraph(recorded, result)

    @property
    def compile_backend(self) -> str:
        return "inductor"

    def identity(self) -> str:
        """Name, compute capability, driver and CUDA version of torch."""
        if not self.device_count():
            return "no device"
        known = torch.cuda.get_device_properties(0)
        driver = nvml.driver_version() or "unknown"
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
        return f"{known.name} ({known.major}.{known.minor}), driver {driver}, {built}"


class CudaGraph(Graph):
    """A CUDA graph with a memory pool of its own."""

    def __init__(self, recorded: torch.cuda.CUDAGraph, result: Any) -> None:
        self._recorded, self.result = recorded, result

    def replay(self) -> None:
        self._recorded.replay()


@cache
def _properties(index: int) -> DeviceProperties:
    known: Any = torch.cuda.get_device_properties(index)
    more = nvml.Facts() if torch.version.hip else nvml.facts(str(getattr(known, "uuid", "")))
    return DeviceProperties(
        name=known.name,
        total_memory=known.total_memory,
        dtypes=frozenset({_FP32, _BF16, _FP16}),
        flops=rates(known.name),
        # A slice has a part of the device's bandwidth; how much is not said.
        bandwidth=None if more.divided else more.bandwidth,
        link_bandwidth=more.link_bandwidth,
    )


def rates(name: str) -> dict[torch.dtype, float]:
    """Peak dense matrix rates in flop/s by dtype; empty for a part that is not in the table.

    A slice of a device (MIG) has a part of them, and is not in the table.
    """
    if " MIG " in name:
        return {}
    for beginning, narrow, wide in _RATES:
        rest = name.removeprefix(beginning)
        if rest != name and not rest[:1].isalnum():
            return {_BF16: narrow, _FP16: narrow, _FP32: wide}
    return {}
