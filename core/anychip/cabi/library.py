"""The backend that is made from a chip's C library.

Operators of ATen that the library lists are called by torch's dispatcher, and those of anychip by
its rows. One of anychip's that it does not list has its reference, which is made of ATen's.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anychip.cabi import bridge, spent, table
from anychip.contract import (
    API_VERSION,
    Backend,
    BackendUnavailableError,
    DeviceError,
    DeviceProperties,
    Finding,
    Job,
    OperatorTable,
    Probe,
    Transport,
)

if TYPE_CHECKING:
    import ctypes

    from anychip.cabi.collectives import Collectives

_NAMES = ("ANYCHIP_OK", "ANYCHIP_ENOTSUP", "ANYCHIP_EINVAL", "ANYCHIP_ENOMEM", "ANYCHIP_EDEVICE",
          "ANYCHIP_EABORTED")  # fmt: skip
_lock = threading.Lock()


_attached: list[Library] = []
"""At most one: torch has one private-use device type in a process."""


def served(*, reset: bool = False) -> list[tuple[str, str, str, int]]:
    """Of the attached library: operator as it would list it, its name, native or host, calls.

    Args:
        reset: count from zero afterwards.
    """
    found: Counter[tuple[str, str, str]] = Counter()
    for chip in _attached:
        both = {"native": chip.native_calls(reset=reset), "host": chip.host_calls(reset=reset)}
        for kind, calls in both.items():
            for name, count in calls.items():
                found[spent.listed_as(name) or name, chip.name, kind] += count
    return [(*key, calls) for key, calls in found.most_common()]


class Library(Backend):
    """A backend from a shared library that keeps to ``anychip/abi.h``.

    It opens the library and reads its table; a torch device is made of it when one is first asked
    for, which on the first use with a release of torch builds the bridge.

    Args:
        path: of the library.

    Raises:
        BackendUnavailableError: it is no such library, or one of another version.
    """

    api = API_VERSION
    _collectives: Collectives | None = None

    def __init__(self, path: str | Path) -> None:
        self.table = table.read(Path(path).resolve())
        self.name = self.device_type = self.table.name
        self.capabilities = {"memory_stats": 1, "memory_peak": 1, "pinned_memory": 1}
        if self.table.has_streams:
            self.capabilities["streams"] = 1

    def probe(self) -> Probe:
        """Asks the library for its devices; opens none."""
        count = self.table.device_count()
        if isinstance(count, str):
            return Probe.unavailable(count)
        if count < 1:
            return Probe.unavailable(f"{self.table.path.name} finds no device")
        return Probe.ready(count, reason=f"{self.table.part(0)}, by {self.table.path.name}")

    def diagnose(self) -> Sequence[Finding]:
        """The library, and which optional parts it has."""
        has = [name for name in ("streams", "memory_stats") if name in self.capabilities]
        has += ["collectives"] if self.table.collectives else []
        known = f"{len(self.table.operators)} operators, {' and '.join(has)}"
        path, version = self.table.path, self.table.version or "of no stated version"
        return [Finding(True, f"{path}, {version}"), Finding(True, f"the library has {known}")]

    @cached_property
    def _bridge(self) -> ctypes.CDLL:
        """The bridge, with this library attached and torch's device named after it."""
        import torch

        with _lock:
            if hasattr(torch, self.name):
                reason = f"torch has something else called torch.{self.name}: the chip needs a name"
                raise BackendUnavailableError(self.name, "broken", reason)
            found = bridge.loaded()
            if found.anychip_bridge_attach(str(self.table.path).encode()):
                reason = found.anychip_bridge_error().decode()
                raise BackendUnavailableError(self.name, "broken", reason)
            from anychip.cabi.device_module import registered

            registered(self.name, self.device_count(), found)
            _attached.append(self)
        return found

    @cached_property
    def operators(self) -> OperatorTable:  # type: ignore[override]
        """Rows for those of anychip's operators that the library lists."""
        listed = [name for name in self.table.operators if "::" in name]
        if not listed:
            return OperatorTable()
        from anychip.cabi import own_operators

        return own_operators.rows(self.table.path.name, listed, self._serve)

    def _serve(self, name: str, schema: str) -> Any:
        import torch

        if self._bridge.anychip_bridge_serve(name.encode(), schema.encode()):
            raise RuntimeError(f"{self.name}: {self._bridge.anychip_bridge_error().decode()}")
        return getattr(torch.ops.anychip_library, schema.partition("(")[0]).default

    def device_count(self) -> int:
        count = self.table.device_count()
        return 0 if isinstance(count, str) else count

    def attach(self) -> None:
        """Makes the torch device, if it is not there; its tensors can be made from now on.

        Raises:
            BackendUnavailableError: the bridge cannot be built, or another chip has the device.
        """
        assert self._bridge

    def device_module(self) -> Any:
        self.attach()
        return super().device_module()

    def synchronize(self, index: int | None = None) -> None:
        device = self.check_index(index)
        status = self._bridge.anychip_bridge_synchronize(device)
        if status:
            label = _NAMES[-status] if 0 < -status < len(_NAMES) else "an unknown status"
            detail = self._bridge.anychip_bridge_error().decode().partition("): ")[2]
            where = f"{self.name}: synchronize(device {device})"
            error = DeviceError(where, status, label, detail)
            group = self._collectives
            if group is not None and (label == "ANYCHIP_EABORTED" or group.has_failed()):
                raise group.job.blame(where, error) from error
            raise error

    def transport(self, job: Job) -> Transport | None:
        """The library's collectives; what it does not take goes through the host, said once."""
        functions = self.table.collectives
        if functions is None:
            return None
        from anychip.cabi.collectives import Chip, Collectives

        chip = Chip(self.table, functions, self._bridge, self.current_device())
        self._collectives = found = Collectives(job, job.world, chip)
        missing = "; ".join(found.missing())
        if job.rank == 0 and missing:
            text = f"{self.name!r}: by way of the host, as its library has no: {missing}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return found

    def properties(self, index: int | None = None) -> DeviceProperties:
        import torch

        device = self.check_index(index)
        known = self.table.properties(device)
        types = {5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16}
        rates = {
            torch.float32: known.flops_float32,
            torch.float16: known.flops_float16,
            torch.bfloat16: known.flops_bfloat16,
        }
        return DeviceProperties(
            name=self.table.part(device),
            total_memory=int(known.total_memory),
            dtypes=frozenset({d for bit, d in types.items() if known.dtypes >> bit & 1}),
            flops={dtype: rate for dtype, rate in rates.items() if rate},
            bandwidth=known.bandwidth or None,
            link_bandwidth=known.link_bandwidth or None,
        )

    def identity(self) -> str:
        return f"{self.table.part(0)}, {self.table.path.name} {self.table.version}".strip()

    def host_calls(self, *, reset: bool = False) -> Counter[str]:
        """How often each operator of torch's was computed on the host, as the library has it not.

        Args:
            reset: count from zero afterwards.
        """
        return self._calls(0, reset)

    def native_calls(self, *, reset: bool = False) -> Counter[str]:
        """How often the library computed each of its operators; with :meth:`host_calls`, all calls.

        Views and copies to and from the host are no operators here.
        """
        return self._calls(1, reset)

    def _calls(self, native: int, reset: bool) -> Counter[str]:
        text = self._bridge.anychip_bridge_calls(native, int(reset)).decode()
        pairs = (line.rsplit(" ", 1) for line in text.splitlines())
        return Counter({name: int(count) for name, count in pairs})

    @contextmanager
    def profiling(self) -> Iterator[list[spent.Spent]]:
        """Context that times every operator and copy of the device, each until it has ended.

        The list that it gives is filled at the end.
        """
        found: list[spent.Spent] = []
        self._bridge.anychip_bridge_profile(1)
        try:
            yield found
        finally:
            self._bridge.anychip_bridge_profile(0)
            found += spent.parsed(self._bridge.anychip_bridge_profiled().decode())
