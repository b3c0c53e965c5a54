"""Loading of the kernels, the reason when there are none, and where a launch goes.

The module links neither torch nor the driver: it loads on a machine that has no device.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

BUILD_COMMAND = "pip install . -Ccmake.define.ANYCHIP_CUDA=ON"
INTERFACE = 5
"""The version of the native module's signatures that this code calls."""

_MISSING = "_native_missing.txt"

Place = tuple[int, int]
"""Index of a device, and the address of a stream on it."""


def _load() -> tuple[ModuleType | None, str | None]:
    try:
        from anychip_cuda import _cuda  # type: ignore[attr-defined, unused-ignore]
    except ImportError as error:
        note = resources.files("anychip_cuda") / _MISSING
        if note.is_file():
            return None, note.read_text().strip()
        return (
            None,
            f"the CUDA kernels cannot be loaded ({error}); this builds them: {BUILD_COMMAND}",
        )
    found = _cuda.build_info()["abi"]
    if found != INTERFACE:
        return None, (
            f"the CUDA kernels have interface {found}, and this version calls {INTERFACE}; "
            f"this builds them again: {BUILD_COMMAND}"
        )
    return _cuda, None


module, problem = _load()
"""The native module or None; the reason for None, with the command that helps."""


def current_place(tensor: Tensor) -> Place:
    """The device of ``tensor``, and torch's current stream there."""
    index = tensor.get_device()
    return index, torch._C._cuda_getCurrentRawStream(index)


class Kernels:
    """The kernels of one native module, and how a call finds its device and stream.

    Attributes:
        native: the module, of which every function takes a device and a stream last.
        place: gives both for a tensor of the call.
        codes: dtype to the module's number for it.
    """

    def __init__(self, native: Any, place: Callable[[Tensor], Place]) -> None:
        self.native, self.place = native, place
        self.codes: dict[torch.dtype, int] = {
            torch.float32: native.FLOAT32,
            torch.bfloat16: native.BFLOAT16,
            torch.float16: native.FLOAT16,
        }
        self._multiprocessors: dict[int, int] = {}

    def multiprocessors(self, tensor: Tensor) -> int:
        """How many multiprocessors the tensor's device has; asked once per device."""
        index = max(tensor.get_device(), 0)
        if index not in self._multiprocessors:
            self._multiprocessors[index] = self.native.multiprocessors(index)
        return self._multiprocessors[index]


def address(tensor: Tensor | None) -> int:
    """What a kernel takes for a tensor; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def empty_like(x: Tensor) -> Tensor:
    """Room of x's shape and dtype, whose elements lie one after the other."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
