"""Devices of torch_npu: what is known of them, and errors of their work in one type.

Streams, events, generators and the current device are the contract's own defaults, which stand on
torch.npu.
"""

from __future__ import annotations

from typing import Any

from anychip.contract import DeviceInterface, DeviceProperties
from anychip_npu import adapter, cann
from anychip_npu.errors import is_of_queue, told


class NpuDevice(DeviceInterface):
    """What torch_npu and CANN say."""

    def device_module(self) -> Any:
        return adapter.module().npu

    def device_count(self) -> int:
        return 0 if adapter.obstacle() else int(self.device_module().device_count())

    def set_device(self, index: int) -> None:
        with told(f"npu: set_device({index})"):
            super().set_device(index)

    def synchronize(self, index: int | None = None) -> None:
        """As the contract says.

        Raises:
            DeviceError: what was queued has failed: CANN's status, its name and its message.
        """
        with told(f"npu: synchronize(device {'current' if index is None else index})"):
            try:
                super().synchronize(index)
            except RuntimeError as error:
                if is_of_queue(error):
                    # A launch had failed, and nothing was waited for. The device has the status,
                    # if it is the device's fault.
                    super().synchronize(index)
                raise

    def properties(self, index: int | None = None) -> DeviceProperties:
        """Name, memory and dtypes.

        The vendor publishes matrix rates for servers, not for each part by the name that CANN
        gives it (one name has bins of several clocks), so that no rate is given.
        """
        import torch

        module = self.device_module()
        known = module.get_device_properties(self.check_index(index))
        dtypes = {torch.float32, torch.float16}
        if module.is_bf16_supported():
            dtypes.add(torch.bfloat16)
        return DeviceProperties(
            name=str(known.name),
            total_memory=int(known.total_memory),
            dtypes=frozenset(dtypes),
        )

    def identity(self) -> str:
        """Name, driver, CANN and torch_npu."""
        if not self.device_count():
            return "no device"
        driver = cann.driver_version() or "unknown"
        made = f"CANN {cann.version() or 'unknown'}, torch_npu {adapter.versions().adapter}"
        return f"{self.properties(0).name}, driver {driver}, {made}"
