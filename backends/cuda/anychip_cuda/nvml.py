"""What does NVIDIA's management library know that torch does not: memory clocks, links, slices.

Every answer may be missing: the library, a symbol of it, a figure of one device. It is None then.

Source: NVML API reference, Device Queries, NvLink Methods and Field Value Queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import cffi  # type: ignore[import-untyped]

LIBRARY = "libnvidia-ml.so.1"

_SUCCESS = 0
_CLOCK_MEMORY = 2  # nvmlClockType_t
_LINK_MBPS = 90  # NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
_MAX_LINKS = 36
"""More than any device has; a link that there is not is answered with an error."""

_ffi: Any = cffi.FFI()
_ffi.cdef("""
    typedef void* nvmlDevice_t;
    typedef struct {
        unsigned int fieldId, scopeId;
        long long timestamp, latencyUsec;
        int valueType, nvmlReturn;
        union { double d; unsigned int ui; unsigned long long ull; long long ll; } value;
    } nvmlFieldValue_t;
    int nvmlInit_v2(void);
    int nvmlShutdown(void);
    int nvmlSystemGetDriverVersion(char* version, unsigned int length);
    int nvmlDeviceGetHandleByUUID(const char* uuid, nvmlDevice_t* device);
    int nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, int type, unsigned int* mhz);
    int nvmlDeviceGetMemoryBusWidth(nvmlDevice_t device, unsigned int* bits);
    int nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int* current, unsigned int* pending);
    int nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, unsigned int* active);
    int nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t* values);
""")


class Facts(NamedTuple):
    """What is known of one device.

    Attributes:
        bandwidth: bytes/s of its memory: two transfers per clock over the width of the bus.
        link_bandwidth: bytes/s over all its active NVLinks, per direction.
        links: active NVLinks.
        divided: whether it is divided into slices (MIG).
    """

    bandwidth: float | None = None
    link_bandwidth: float | None = None
    links: int | None = None
    divided: bool | None = None


def driver_version(library: str = LIBRARY) -> str | None:
    """The driver's release, like "580.65.06"."""
    with _opened(library) as nvml:
        call = _symbol(nvml, "nvmlSystemGetDriverVersion")
        room = _ffi.new("char[]", 96)
        if call is None or call(room, len(room)) != _SUCCESS:
            return None
        return bytes(_ffi.string(room)).decode(errors="replace")


def facts(uuid: str, library: str = LIBRARY) -> Facts:
    """What is known of the device with this UUID, with or without its prefix; never raises."""
    with _opened(library) as nvml:
        device = _device(nvml, uuid)
        if device is None:
            return Facts()
        links = _active_links(nvml, device)
        speed = _field(nvml, device, _LINK_MBPS) if links else None
        return Facts(
            bandwidth=_bandwidth(nvml, device),
            link_bandwidth=links * speed * 1e6 if links and speed else None,
            links=links,
            divided=_divided(nvml, device),
        )


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """The library between its start and its end; None when it cannot be used."""
    try:
        nvml = _ffi.dlopen(path)
    except OSError:
        yield None
        return
    start, end = _symbol(nvml, "nvmlInit_v2"), _symbol(nvml, "nvmlShutdown")
    if start is None or end is None or start() != _SUCCESS:
        yield None
        return
    try:
        yield nvml
    finally:
        end()


def _symbol(nvml: Any, name: str) -> Callable[..., int] | None:
    """A function of the library; older ones lack some."""
    return None if nvml is None else getattr(nvml, name, None)


def _device(nvml: Any, uuid: str) -> Any:
    call, handle = _symbol(nvml, "nvmlDeviceGetHandleByUUID"), _ffi.new("nvmlDevice_t*")
    if call is None:
        return None
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    return next((handle[0] for n in names if call(n.encode(), handle) == _SUCCESS), None)


def _number(nvml: Any, name: str, device: Any, *arguments: int) -> int | None:
    """What a call writes to its last argument, an unsigned int."""
    call, value = _symbol(nvml, name), _ffi.new("unsigned int*")
    if call is None or call(device, *arguments, value) != _SUCCESS:
        return None
    return int(value[0])


def _bandwidth(nvml: Any, device: Any) -> float | None:
    mhz = _number(nvml, "nvmlDeviceGetMaxClockInfo", device, _CLOCK_MEMORY)
    bits = _number(nvml, "nvmlDeviceGetMemoryBusWidth", device)
    return 2 * mhz * 1e6 * bits / 8 if mhz and bits else None


def _active_links(nvml: Any, device: Any) -> int | None:
    if _symbol(nvml, "nvmlDeviceGetNvLinkState") is None:
        return None
    states = (_number(nvml, "nvmlDeviceGetNvLinkState", device, n) for n in range(_MAX_LINKS))
    return sum(1 for state in states if state == 1)


def _field(nvml: Any, device: Any, field: int) -> int | None:
    call, value = _symbol(nvml, "nvmlDeviceGetFieldValues"), _ffi.new("nvmlFieldValue_t*")
    value.fieldId = field
    if call is None or call(device, 1, value) != _SUCCESS or value.nvmlReturn != _SUCCESS:
        return None
    return int(value.value.ui)


def _divided(nvml: Any, device: Any) -> bool | None:
    call, modes = _symbol(nvml, "nvmlDeviceGetMigMode"), _ffi.new("unsigned int[2]")
    if call is None or call(device, modes, modes + 1) != _SUCCESS:
        return None
    return bool(modes[0])
