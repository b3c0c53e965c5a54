"""The backend named ``torch``: the contract's defaults for a device that torch knows itself.

It brings no operators; the references serve them. It is found, probed and chosen like a plugin.
"""

from typing import Any

from anychip.contract import API_VERSION, Backend, OperatorTable, Probe, hookimpl

NO_DEVICE = ""
_NEEDED = {
    "streams": ("stream", "current_stream"),
    "memory_stats": ("memory_allocated", "memory_reserved", "empty_cache"),
    "memory_peak": ("max_memory_allocated", "reset_peak_memory_stats"),
}
"""What the contract's default of each capability calls in torch's device module."""


class _TorchBackend(Backend):
    name = "torch"
    api = API_VERSION
    operators = OperatorTable()

    def __init__(self, device_type: str = NO_DEVICE) -> None:
        self.device_type = device_type

    def probe(self) -> Probe:
        """Ready when torch itself reports an accelerator that works."""
        import torch

        if self.device_type == NO_DEVICE:
            found = Probe.unavailable("torch reports no accelerator")
            return found.depending_on("*_DEVICES", "*_HOME", "LD_LIBRARY_PATH", "/dev")
        return Probe.ready(
            torch.accelerator.device_count(),
            reason=f"torch's own support for {self.device_type!r}, without operators of a plugin",
        )


def torch_backend(device_type: str) -> Backend:
    """The contract's defaults for a device type, with the capabilities that torch has for it."""
    import torch.distributed as dist

    made = _TorchBackend(device_type)
    made.capabilities = _capabilities(device_type)
    if dist.is_available():
        made.c10d_backend = dist.Backend.default_device_backend_map.get(device_type)
    return made


def _capabilities(device_type: str) -> dict[str, int]:
    import torch

    try:
        module: Any = torch.get_device_module(device_type)
    except RuntimeError:  # a type without a module of its own, like "meta"
        return {}
    found = {
        capability: 1
        for capability, names in _NEEDED.items()
        if all(hasattr(module, name) for name in names)
    }
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == device_type:
        found["pinned_memory"] = 1
    return found


@hookimpl
def anychip_backend() -> Backend:
    """The backend for the accelerator that torch reports, if it reports one."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch_backend(accelerator.type) if accelerator else _TorchBackend()
