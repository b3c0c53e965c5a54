"""The host's device part: one device, no streams."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from anychip.contract import DeviceInterface, DeviceProperties


class CpuDevice(DeviceInterface):
    """torch has one ``cpu`` device without an index, and its work is done when a call returns."""

    def device_count(self) -> int:
        return 1

    def device(self, index: int | None = None) -> torch.device:
        self.check_index(index)
        return torch.device("cpu")

    def current_device(self) -> int:
        return 0

    def set_device(self, index: int) -> None:
        self.check_index(index)

    def synchronize(self, index: int | None = None) -> None:
        self.check_index(index)

    def properties(self, index: int | None = None) -> DeviceProperties:
        self.check_index(index)
        return DeviceProperties(
            name=model_name(),
            total_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        )

    @property
    def compile_backend(self) -> str:
        return "inductor"


def model_name() -> str:
    """The processor's name as the kernel reports it, or its architecture."""
    return _of_processor("model name") or platform.processor() or platform.machine()


def vendor() -> str:
    """Who made the processor, as it says itself, like ``GenuineIntel``; empty where it does not."""
    return _of_processor("vendor_id")


def _of_processor(field: str) -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    found = (line.split(":", 1)[1].strip() for line in lines if line.startswith(field))
    return next(found, "")
