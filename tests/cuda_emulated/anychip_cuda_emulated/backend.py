"""The rows of anychip_cuda over tensors of the host, computed by the emulator."""

import importlib.util
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from anychip.contract import Backend, DeviceProperties, Memory, MemoryInfo, Probe
from anychip_cuda import operators  # noqa: F401 - declares the rows
from anychip_cuda.native import Kernels, Place
from anychip_cuda.table import make_table

MODULE_VARIABLE = "ANYCHIP_CUDA_EMULATED"
"""Path of an ``_emu`` module to load instead of the one next to this file: a sanitized one, say."""


def load_emulator() -> ModuleType:
    """The module ``_emu``.

    Raises:
        ImportError: it is not there; the message says how to build it.
    """
    named = os.environ.get(MODULE_VARIABLE)
    found = [Path(named)] if named else sorted(Path(__file__).parent.glob("_emu.*.so"))
    if not found or not found[0].is_file():
        raise ImportError(
            f"no emulated CUDA kernels: {named or '_emu.*.so'} is not there; build them: "
            "make cuda-emulator"
        )
    spec = importlib.util.spec_from_file_location("_emu", found[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def host_place(tensor: Tensor) -> Place:
    """The emulator has one device, whose work is done when a call returns."""
    return 0, 0


class HostMemory(Memory):
    """Memory of the host, as its kernel reports it."""

    def info(self, index: int | None = None) -> MemoryInfo:
        self.backend.check_index(index)
        page = os.sysconf("SC_PAGE_SIZE")
        return MemoryInfo(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page)


class CudaEmulatedBackend(Backend):
    """The host, with the CUDA backend's kernels."""

    name = "cuda-emulated"
    device_type = "cpu"
    c10d_backend = "gloo"
    api = (2, 0)
    capabilities: Mapping[str, int] = {}

    def __init__(self) -> None:
        self.kernels = Kernels(load_emulator(), host_place)
        self.operators = make_table(self.kernels, mapped=False)  # type: ignore[misc]

    def probe(self) -> Probe:
        return Probe.ready(1, kind="host", reason="CUDA kernels on the host")

    @cached_property
    def memory(self) -> Memory:
        return HostMemory(self)

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
            name="CUDA emulator", total_memory=self.memory.info().total,
            dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        )  # fmt: skip
