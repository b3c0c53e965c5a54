"""What does CANN say, beyond torch_npu? Its C API by cffi: versions, part, devices, errors.

Every function is optional, symbol by symbol: an older CANN lacks some, and the answer is None then.
The libraries are opened on demand, and stay open. Nothing here makes a context or allocates.

Source: AscendCL API reference (C), chapters System Configuration, Device Management and Error
Handling; https://www.hiascend.com/document.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import cffi  # type: ignore[import-untyped]

LIBRARIES = (
    "libascendcl.so",
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
)
"""What torch_npu is linked with, in the order in which a person finds the reason."""
DEVICE_FILES = Path("/dev")
INSTALLATIONS = (
    Path("/usr/local/Ascend/cann"),
    Path("/usr/local/Ascend/ascend-toolkit"),
    Path("/usr/local/Ascend/nnae"),
    Path.home() / "Ascend/cann",
    Path.home() / "Ascend/ascend-toolkit",
)
"""Where CANN's installer puts it for root and for a user; each has a set_env.sh."""
DRIVER = Path("/usr/local/Ascend/driver/version.info")

_SUCCESS = 0
_NAME_BYTES, _VERSION_BYTES = 128, 256

_ffi: Any = cffi.FFI()
_ffi.cdef("""
    int aclsysGetVersionStr(char* package, char* version);
    int aclsysGetCANNVersion(int package, void* version);
    const char* aclrtGetSocName(void);
    int aclrtGetDeviceCount(uint32_t* count);
    const char* aclGetRecentErrMsg(void);
    int aclrtDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer);
""")


class DeviceFiles(NamedTuple):
    """The kernel driver's files.

    Attributes:
        devices: how many there are, ``davinci0``, ``davinci1`` ...
        forbidden: those, and the manager's, that this process may not read and write.
    """

    devices: int
    forbidden: tuple[str, ...]


@cache
def _opened(name: str) -> Any:
    """A library, or the loader's words on why it cannot be opened."""
    try:
        return _ffi.dlopen(name)
    except OSError as error:
        # cffi adds what it has tried after the loader.
        return str(error).partition("  Additionally")[0].rstrip(".")


def missing_library(names: tuple[str, ...] = LIBRARIES) -> str:
    """The loader's words on the first library that cannot be opened; "" when all can."""
    return next((found for name in names if isinstance(found := _opened(name), str)), "")


def _call(name: str) -> Any:
    """A function of libascendcl, or None."""
    library = _opened(LIBRARIES[0])
    return None if isinstance(library, str) else getattr(library, name, None)


def version() -> str | None:
    """CANN's version, like "8.5.0"."""
    call = _call("aclsysGetVersionStr")
    if call is not None:
        name, room = _ffi.new("char[]", b"CANN"), _ffi.new("char[]", _VERSION_BYTES)
        if call(name, room) == _SUCCESS:
            return _text(room)
    call, room = _call("aclsysGetCANNVersion"), _ffi.new("char[]", 4096)
    if call is None or call(0, room) != _SUCCESS:
        return None
    return _text(room)[:_NAME_BYTES] or None


def part() -> str | None:
    """The name of the part (SoC), like "Ascend910B1". torch_npu must have started CANN before."""
    call = _call("aclrtGetSocName")
    found = _ffi.NULL if call is None else call()
    return None if found == _ffi.NULL else _text(found)


def device_count() -> int | None:
    """Devices that this process may use."""
    call, count = _call("aclrtGetDeviceCount"), _ffi.new("uint32_t*")
    return int(count[0]) if call is not None and call(count) == _SUCCESS else None


def recent_message() -> str:
    """CANN's message on the calling thread's last error, or ""; asking takes it away."""
    call = _call("aclGetRecentErrMsg")
    found = _ffi.NULL if call is None else call()
    return "" if found == _ffi.NULL else _text(found)


def can_reach(device: int, peer: int) -> bool | None:
    """Whether a device can address the memory of another one."""
    call, can = _call("aclrtDeviceCanAccessPeer"), _ffi.new("int32_t*")
    if call is None or call(can, device, peer) != _SUCCESS:
        return None
    return bool(can[0])


def device_files(directory: Path | None = None) -> DeviceFiles:
    """What the kernel driver shows. A container sees what it was given."""
    folder = directory or DEVICE_FILES
    devices = sorted(p for p in folder.glob("davinci*") if p.name[len("davinci") :].isdigit())
    nodes = [*devices, *folder.glob("davinci_manager")]
    return DeviceFiles(
        len(devices), tuple(str(n) for n in nodes if not os.access(n, os.R_OK | os.W_OK))
    )


def environment_script(places: tuple[Path, ...] | None = None) -> Path | None:
    """The script that sets CANN's environment, of the first installation that is found."""
    scripts = [place / "set_env.sh" for place in places or INSTALLATIONS]
    return next((script for script in scripts if script.is_file()), None)


def driver_version(file: Path | None = None) -> str | None:
    """The kernel driver's version, like "24.1.rc3", from the file that its installer leaves."""
    try:
        lines = (file or DRIVER).read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition("=")
        if name.strip().lower() == "version":
            return value.strip()
    return None


def _text(found: Any) -> str:
    return bytes(_ffi.string(found)).decode(errors="replace").strip()
