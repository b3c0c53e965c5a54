"""Which CUDA devices are here, and whether this build can use them. It cannot: it has no kernels.

The probe asks the driver by ctypes, so that it neither imports torch nor makes a device context.
Operators, memory and collectives come with the kernels and will stand in files of those names.
"""

from __future__ import annotations

import ctypes

from anychip.contract import Backend, OperatorTable, Probe

DRIVER = "libcuda.so.1"
BUILD_COMMAND = "pip install . -Ccmake.define.ANYCHIP_CUDA=ON"


class CudaBackend(Backend):
    """NVIDIA GPUs through kernels of our own. This version was built without them."""

    name = "cuda"
    device_type = "cuda"
    c10d_backend = "nccl"
    api = (1, 0)
    operators = OperatorTable()

    def probe(self) -> Probe:
        """Always unavailable in this version; the reason says what the driver shows."""
        return Probe.unavailable(
            "built without the CUDA kernels: they are not part of this version "
            f"({describe_devices()})",
            fix=f"{BUILD_COMMAND}, in a version that has the kernels",
        )


def describe_devices(driver: str = DRIVER) -> str:
    """What the driver says about devices, in a few words; never raises.

    Args:
        driver: file name of the driver's library.

    Source: CUDA driver API, ``cuInit`` and ``cuDeviceGetCount``; neither makes a context.
    """
    try:
        library = ctypes.CDLL(driver)
        count = ctypes.c_int(0)
        status = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return f"no driver: {driver} cannot be used"
    if status:
        return f"the driver answers with error {status}"
    return f"the driver shows {count.value} device{'' if count.value == 1 else 's'}"
