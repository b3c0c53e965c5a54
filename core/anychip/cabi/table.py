"""Is this file a chip's library, and what does it offer? Answered from its table, without torch.

The checks are those of ``anychip/abi.h``: after them, what is read is there. A file that lies about
itself can still crash; whoever names one is protected by a probe in a child process.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from anychip.cabi.sources import header
from anychip.contract import BackendUnavailableError, DeviceError, Status

REQUIRED = (
    "device_count", "device_properties", "device_synchronize",
    "mem_alloc", "mem_free", "host_to_device", "device_to_host",
)  # fmt: skip
STREAMS = (
    "stream_create", "stream_destroy", "stream_synchronize", "stream_query", "event_create",
    "event_destroy", "event_record", "event_wait", "event_synchronize", "event_query",
)  # fmt: skip
"""All of them or none."""
_LARGEST = 1 << 16
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@cache
def interface() -> Any:
    """cffi's view of ``abi.h``: the declarations of the header itself."""
    import cffi  # type: ignore[import-untyped]

    text = header().read_text(encoding="utf-8")
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.DOTALL)
    lines = (line for line in text.splitlines() if not re.match(r"#(?!define \w+ \d)", line))
    found = cffi.FFI()
    found.cdef("\n".join(lines))
    return found


class Table(NamedTuple):
    """What a library offers.

    Attributes:
        path: of the file.
        name: of the chip and of its torch device type.
        version: the library's own, for reports; "" when it says none.
        functions: the ``anychip_library`` of this version; NULL where the library has nothing.
        operators: the names that it lists.
    """

    path: Path
    name: str
    version: str
    functions: Any
    operators: tuple[str, ...]

    @property
    def has_streams(self) -> bool:
        return all(getattr(self.functions, name) for name in STREAMS)

    @property
    def collectives(self) -> Any:
        """The ``anychip_collectives``, None unless it is whole and there are streams."""
        ffi, given = interface(), self.functions.collectives
        kind = ffi.typeof("anychip_collectives")
        if not given or given.struct_size < ffi.sizeof(kind) or not self.has_streams:
            return None
        names = [name for name, field in kind.fields if field.type.kind == "function"]
        return given if all(getattr(given, name) for name in names) else None

    def device_count(self) -> int | str:
        """The number of devices, or why there is none."""
        count = interface().new("int32_t *")
        status = self.functions.device_count(count)
        return int(count[0]) if status == 0 else f"device_count gave {self.said(status)}"

    def properties(self, index: int) -> Any:
        """The ``anychip_device_properties`` of a device.

        Raises:
            DeviceError: the library does not say them.
        """
        known = interface().new("anychip_device_properties *")
        known.struct_size = interface().sizeof("anychip_device_properties")
        status = self.functions.device_properties(index, known)
        if status != 0:
            where = f"{self.name}: device_properties(device {index})"
            raise DeviceError(where, status, "a bad status", self.said(status))
        return known

    def part(self, index: int) -> str:
        """The vendor's name for a device."""
        known = self.properties(index)  # owns the name, which is read after it
        return _text(known.name) or self.name

    def said(self, status: int) -> str:
        """What the library has to say about a status that it gave to this thread just now."""
        text = self.functions.last_error() if self.functions.last_error else None
        return f"status {status}" + (f": {_text(text)}" if text and _text(text) else "")


def read(path: Path) -> Table:
    """Opens a library and checks its table.

    Raises:
        BackendUnavailableError: it cannot be loaded, is no chip's library, or does not fit; the
            reason is one sentence.
    """
    ffi = interface()
    refuse = _Refusal(path)
    if not path.is_file():
        raise refuse("unavailable", "there is no such file")
    try:
        opened = ffi.dlopen(str(path), ffi.RTLD_NOW | ffi.RTLD_LOCAL)
    except OSError as error:
        why = str(error).partition(". Additionally")[0].rpartition(f"{path}: ")[2]
        raise refuse("broken", f"it cannot be loaded: {why}") from error
    try:
        entry = opened.anychip_entry
    except AttributeError:
        reason = "it is no chip's library: it does not export anychip_entry (anychip/abi.h)"
        raise refuse("broken", reason) from None
    table = _entered(ffi, entry, refuse)
    missing = [name for name in ("name", *REQUIRED) if not getattr(table, name)]
    if missing:
        raise refuse("broken", f"its table has NULL for {', '.join(missing)}, which are required")
    name = _text(table.name)
    if not _NAME.fullmatch(name):
        reason = f"its name is {name!r}; lower-case letters, digits and '_' were expected"
        raise refuse("broken", reason)
    listed: list[str] = []
    while table.operators and table.find_operator and table.operators[len(listed)]:
        listed.append(_text(table.operators[len(listed)]))
    version = _text(table.version) if table.version else ""
    return Table(path, name, version, table, tuple(listed))


class _Refusal:
    """Makes the error for one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, status: Status, reason: str, fix: str | None = None) -> Exception:
        return BackendUnavailableError(str(self.path), status, reason, fix)


@cache
def _host(ffi: Any) -> Any:
    """The host's table for who only asks: it offers nothing. The library may keep it."""
    host = ffi.new("anychip_host *")
    host.struct_size, host.abi_minor = ffi.sizeof("anychip_host"), _minor(ffi)
    return host


def _minor(ffi: Any) -> int:
    return int(ffi.dlopen(None).ANYCHIP_ABI_MINOR)


def _entered(ffi: Any, entry: Any, refuse: _Refusal) -> Any:
    """A copy of the library's table, zero where the library's is shorter."""
    major = int(ffi.dlopen(None).ANYCHIP_ABI_MAJOR)
    found = ffi.new("const anychip_library **")
    status = entry(major, _host(ffi), found)
    fix = f"compile it again with the abi.h of this anychip (version {major}.{_minor(ffi)})"
    if status != 0:
        raise refuse("incompatible", f"it does not offer major {major} (status {status})", fix)
    given = found[0]
    if not given:
        raise refuse("broken", "its anychip_entry succeeded, and set no table")
    size, whole = int(given.struct_size), ffi.sizeof("anychip_library")
    if not 16 <= size <= _LARGEST or size % 8:
        reason = f"its struct_size is {size}, which no table has (this version's: {whole})"
        raise refuse("broken", reason, fix)
    if given.abi_major != major:
        reason = f"it was made for version {given.abi_major} of the C interface, this is {major}"
        raise refuse("incompatible", reason, fix)
    for name in REQUIRED:
        if ffi.offsetof("anychip_library", name) + ffi.sizeof("void *") > size:
            reason = f"its table ends after {size} bytes, before the required {name}"
            raise refuse("broken", reason, fix)
    table = ffi.new("anychip_library *")
    ffi.memmove(table, given, min(size, whole))
    return table


def _text(value: Any) -> str:
    return str(interface().string(value).decode(errors="replace"))
