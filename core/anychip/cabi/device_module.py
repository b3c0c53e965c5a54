"""What is ``torch.<name>`` for a chip with a C library? The functions that torch and others expect.

All but the generators stands on ``torch.accelerator``.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, accelerator
from torch.utils import backend_registration


class DeviceModule(ModuleType):
    """The module of one device type; ``torch.get_device_module(name)`` gives it."""

    def __init__(self, name: str, count: int, library: ctypes.CDLL) -> None:
        super().__init__(f"torch.{name}")
        self.name, self.count = name, count
        library.anychip_bridge_hand_out_default(1)
        try:
            devices = (torch.device(name, index) for index in range(count))
            self.default_generators = tuple(torch.Generator(device) for device in devices)
        finally:
            library.anychip_bridge_hand_out_default(0)

    current_device = staticmethod(accelerator.current_device_index)
    empty_cache = staticmethod(accelerator.empty_cache)

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count  # which torch.accelerator asks for here

    def is_initialized(self) -> bool:
        return True

    def init(self) -> None:
        """Nothing: the library opens a device when it is first used."""

    _lazy_init = init

    def _is_in_bad_fork(self) -> bool:
        return False

    def _index(self, device: Any) -> int:
        if device is None:
            return accelerator.current_device_index()
        index = device if isinstance(device, int) else torch.device(device).index
        return accelerator.current_device_index() if index is None else index

    def set_device(self, device: Any) -> None:
        accelerator.set_device_index(self._index(device))

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Context in which a device is current."""
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def synchronize(self, device: Any = None) -> None:
        accelerator.synchronize(self._index(device))

    def Stream(self, device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(torch.device(self.name, self._index(device)), priority=priority)

    def Event(self, enable_timing: bool = False, **_: Any) -> torch.Event:
        return torch.Event(self.name, enable_timing=enable_timing)

    def current_stream(self, device: Any = None) -> torch.Stream:
        return accelerator.current_stream(self._index(device))

    def set_stream(self, stream: torch.Stream) -> None:
        accelerator.set_stream(stream)

    @contextmanager
    def stream(self, stream: torch.Stream | None) -> Iterator[None]:
        """Context in which a stream is current; its device is, too."""
        if stream is None:
            yield
            return
        device = self.current_device()
        self.set_device(stream.device)
        before = self.current_stream()
        accelerator.set_stream(stream)
        try:
            yield
        finally:
            accelerator.set_stream(before)
            self.set_device(device)

    def manual_seed(self, seed: int) -> None:
        self.default_generators[self.current_device()].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def initial_seed(self) -> int:
        return self.default_generators[self.current_device()].initial_seed()

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self.default_generators[self._index(device)].get_state()

    def set_rng_state(self, new_state: Tensor, device: Any = None) -> None:
        self.default_generators[self._index(device)].set_state(new_state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return accelerator.get_memory_info(self._index(device))

    def memory_allocated(self, device: Any = None) -> int:
        return accelerator.memory_allocated(self._index(device))

    def memory_reserved(self, device: Any = None) -> int:
        return accelerator.memory_reserved(self._index(device))

    def max_memory_allocated(self, device: Any = None) -> int:
        return accelerator.max_memory_allocated(self._index(device))

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        accelerator.reset_peak_memory_stats(self._index(device))


def registered(name: str, count: int, library: ctypes.CDLL) -> DeviceModule:
    """Gives torch's private-use device type its name, and the module that goes with it."""
    backend_registration.rename_privateuse1_backend(name)
    module = DeviceModule(name, count, library)
    torch._register_device_module(name, module)
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    return module
