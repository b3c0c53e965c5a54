"""Wrong backends that the device chapter has to find."""

from __future__ import annotations

from typing import Any

from anychip.contract import DeviceProperties, Probe
from tests.meta.honest import CAPACITY, DEVICES, HonestBackend
from tests.meta.wrong import Wrong, wrong_device


def _any_index(self: HonestBackend, index: int | None) -> int:
    return self.current_device() if index is None else index


def _wrap_around(self: HonestBackend, index: int | None) -> int:
    return self.current_device() if index is None else int(index) % DEVICES


class _OneForAllThreads:
    index = 0


def _set_for_all_threads(self: HonestBackend, index: int) -> None:
    _OneForAllThreads.index = self.check_index(index)


def _moving_properties(self: HonestBackend, index: int | None = None) -> DeviceProperties:
    self.thread.index = self.check_index(index)
    return HonestBackend.properties(self, index)


def _text_properties(self: HonestBackend, index: int | None = None) -> DeviceProperties:
    return DeviceProperties(
        name="honest",
        total_memory=float(CAPACITY),  # type: ignore[arg-type]
        dtypes=self.dtypes,
    )


def _quiet(*_: Any, **__: Any) -> None:
    return None


CATALOGUE: tuple[Wrong, ...] = (
    wrong_device(
        "current-device-is-text",
        "wrong type of a result",
        current_device=lambda self: f"cpu:{getattr(self.thread, 'index', 0)}",
        check_index=_any_index,
    ),
    wrong_device("index-out-of-range", "missing check of an index", check_index=_any_index),
    wrong_device(
        "index-wraps", "an index out of range means another device", check_index=_wrap_around
    ),
    wrong_device(
        "current-device-of-all-threads",
        "process-wide state where it must be per thread",
        current_device=lambda self: _OneForAllThreads.index,
        set_device=_set_for_all_threads,
    ),
    wrong_device("query-moves-device", "a query with a side effect", properties=_moving_properties),
    wrong_device("memory-is-float", "wrong type of a result", properties=_text_properties),
    wrong_device("undeclared-stream-is-none", "a quiet no-op for what is not there", stream=_quiet),
    wrong_device("one-device-too-many", "count off by one", device_count=lambda self: DEVICES + 1),
    wrong_device(
        "probe-says-unavailable",
        "two answers to one question",
        probe=lambda self: Probe.unavailable("no device"),
    ),
    wrong_device(
        "compile-backend-unknown", "a name that nobody knows", compile_backend="inductor2"
    ),
)
