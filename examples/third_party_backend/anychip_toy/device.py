"""The toy's device part: the one device that the host is.

A chip with a torch adapter deletes this file: the contract's defaults ask the adapter's module.
"""

from __future__ import annotations

import os
import platform

import torch

from anychip.contract import DeviceInterface, DeviceProperties


class ToyDevice(DeviceInterface):
    """torch's ``cpu`` has one device, which has no index, and its work is done when a call ends."""

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
            name=platform.processor() or platform.machine(),
            total_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            dtypes=frozenset({torch.float32}),  # numpy has no bfloat16
        )
