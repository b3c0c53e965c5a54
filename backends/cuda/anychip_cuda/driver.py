"""What does NVIDIA's driver say of its devices? Asked by ctypes, without torch or a device context.

Source: CUDA driver API, chapters Initialization, Version Management and Device Management; none of
their calls makes a context. The kernel's part of the driver is seen by its files.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any, NamedTuple

LIBRARY = "libcuda.so.1"

_MULTIPROCESSORS, _COMPUTE_MODE, _MAJOR, _MINOR = 16, 20, 75, 76  # CUdevice_attribute
COMPUTE_MODES = {0: "default", 2: "prohibited", 3: "exclusive process"}
NO_DEVICE = 100


class Part(NamedTuple):
    """One device, in the driver's order.

    Attributes:
        name: the vendor's; for a slice of a device (MIG) it names the slice.
        capability: compute capability, (major, minor).
        multiprocessors: how many there are.
        memory_nbytes: all of it.
        compute_mode: a value of COMPUTE_MODES.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_nbytes: int
    compute_mode: str


class Answer(NamedTuple):
    """What the driver said.

    Attributes:
        version: newest CUDA version that it runs, (major, minor); None when there is no driver.
        parts: the devices that this process may use.
        code: status of the first call that failed, or 0.
        label: the driver's name for it, or why there is no driver.
    """

    version: tuple[int, int] | None = None
    parts: tuple[Part, ...] = ()
    code: int = 0
    label: str = ""


class _Failed(Exception):
    def __init__(self, code: int) -> None:
        self.code = code


def version(library: str = LIBRARY) -> tuple[int, int] | None:
    """The newest CUDA version that the driver runs; None without one. Initialises nothing."""
    try:
        return _version(ctypes.CDLL(library))
    except (OSError, AttributeError, _Failed):
        return None


def ask(library: str = LIBRARY) -> Answer:
    """What the driver says; never raises.

    Args:
        library: file name of the driver's library.
    """
    try:
        driver = ctypes.CDLL(library)
        found = _version(driver)
    except (OSError, AttributeError, _Failed):
        return Answer(label=f"{library} cannot be used")
    try:
        _call(driver.cuInit, 0)
        count = ctypes.c_int(0)
        _call(driver.cuDeviceGetCount, ctypes.byref(count))
        return Answer(found, tuple(_part(driver, index) for index in range(count.value)))
    except _Failed as failure:
        return Answer(found, (), failure.code, _label(driver, failure.code))


def _call(function: Any, *arguments: Any) -> None:
    code = function(*arguments)
    if code:
        raise _Failed(code)


def _version(driver: ctypes.CDLL) -> tuple[int, int]:
    number = ctypes.c_int(0)
    _call(driver.cuDriverGetVersion, ctypes.byref(number))
    return number.value // 1000, number.value % 1000 // 10


def _part(driver: ctypes.CDLL, index: int) -> Part:
    device, name, nbytes = ctypes.c_int(0), ctypes.create_string_buffer(256), ctypes.c_size_t(0)
    _call(driver.cuDeviceGet, ctypes.byref(device), index)
    _call(driver.cuDeviceGetName, name, len(name), device)
    _call(driver.cuDeviceTotalMem_v2, ctypes.byref(nbytes), device)

    def attribute(number: int) -> int:
        value = ctypes.c_int(0)
        _call(driver.cuDeviceGetAttribute, ctypes.byref(value), number, device)
        return value.value

    mode = attribute(_COMPUTE_MODE)
    return Part(
        name.value.decode(errors="replace"),
        (attribute(_MAJOR), attribute(_MINOR)),
        attribute(_MULTIPROCESSORS),
        nbytes.value,
        COMPUTE_MODES.get(mode, f"mode {mode}"),
    )


def _label(driver: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    known = driver.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value
    return text.value.decode() if known and text.value else f"error {code}"


class Files(NamedTuple):
    """The kernel's part of the driver.

    Attributes:
        installed: devices that the kernel module serves, whether or not this process may use them.
        forbidden: device files that this process may not open for reading and writing.
    """

    installed: int
    forbidden: tuple[str, ...]


def files(proc: Path = Path("/proc/driver/nvidia"), dev: Path = Path("/dev")) -> Files:
    """What the kernel module shows in the file system."""
    served = proc / "gpus"
    installed = len(list(served.iterdir())) if served.is_dir() else 0
    nodes = sorted([*dev.glob("nvidia[0-9]*"), *dev.glob("nvidiactl")])
    return Files(installed, tuple(str(n) for n in nodes if not os.access(n, os.R_OK | os.W_OK)))
