"""Wrong backends that the device chapter has to find."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from anychip.contract import DeviceProperties, MemoryStats, OperatorTable, Probe
from anychip.operators import rms_norm
from tests.meta.honest import CAPACITY, DEVICES, CountingMemory, HonestBackend
from tests.meta.wrong import Wrong, wrong_device


def _any_index(self: HonestBackend, index: int | None) -> int:
    return self.current_device() if index is None else index


def _lenient(accepts: Callable[[Any], bool], number: Callable[[Any], int]) -> Any:
    """Takes some of what is no index for one."""

    def check_index(self: HonestBackend, index: Any) -> int:
        return number(index) if accepts(index) else HonestBackend.check_index(self, index)

    return check_index


def _but_for_the_fourth(self: HonestBackend, index: int) -> None:
    self.thread.sets = getattr(self.thread, "sets", 0) + 1
    if self.thread.sets != 4:
        HonestBackend.set_device(self, index)


class AnyIndex(CountingMemory):
    """Statistics are the same whatever is asked for, so that nobody looks at it."""

    def stats(self, index: Any = None) -> MemoryStats:
        return super().stats()


def _in_the_main_thread_only(self: HonestBackend) -> Probe:
    if threading.current_thread() is threading.main_thread():
        return HonestBackend.probe(self)
    return Probe.unavailable("no context")


class _OneForAllThreads:
    index = 0


def _set_for_all_threads(self: HonestBackend, index: int) -> None:
    _OneForAllThreads.index = self.check_index(index)


def _moving_properties(self: HonestBackend, index: int | None = None) -> DeviceProperties:
    self.thread.index = self.check_index(index)
    return HonestBackend.properties(self, index)


def _counted_identity(self: HonestBackend) -> str:
    self.asked = getattr(self, "asked", 0) + 1
    return f"honest, asked {self.asked} times"


def _first_only(self: HonestBackend, index: int | None = None) -> DeviceProperties:
    known = HonestBackend.properties(self, index)
    return known if self.check_index(index) == 0 else replace(known, total_memory=0)


def _moves_to(self: HonestBackend, index: int | None = None) -> torch.device:
    self.thread.index = self.check_index(index)
    return HonestBackend.device(self, index)


def _moves_and_refuses(self: HonestBackend, index: int) -> None:
    if isinstance(index, int):
        self.thread.index = index
    self.check_index(index)


def _one_row(operator: str, **conditions: Any) -> OperatorTable:
    table = OperatorTable()
    table.forward(operator, **conditions)(rms_norm.forward)
    return table


class ByNumberOfThread(HonestBackend):
    """Numbers are given again when a thread has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.index_of: dict[int, int] = {}

    def current_device(self) -> int:
        return self.index_of.get(threading.get_ident(), 0)

    def set_device(self, index: int) -> None:
        self.index_of[threading.get_ident()] = self.check_index(index)


def _declares(**changes: Any) -> Callable[..., DeviceProperties]:
    """Properties of which some are others."""
    return lambda self, index=None: replace(HonestBackend.properties(self, index), **changes)


CATALOGUE: tuple[Wrong, ...] = (
    wrong_device("current-device-is-text", "wrong type of a result", check_index=_any_index,
                 current_device=lambda self: f"cpu:{getattr(self.thread, 'index', 0)}"),
    wrong_device("fourth-device-is-not-set", "a warm-up that ends", set_device=_but_for_the_fourth),
    wrong_device("index-out-of-range", "missing check of an index", check_index=_any_index),
    wrong_device("index-wraps", "an index out of range means another device",
                 check_index=lambda self, index: int(_any_index(self, index)) % DEVICES),
    wrong_device("current-device-of-all-threads", "process-wide state where it must be per thread",
                 current_device=lambda self: _OneForAllThreads.index,
                 set_device=_set_for_all_threads),
    wrong_device("query-moves-device", "a query with a side effect", properties=_moving_properties),
    wrong_device("memory-is-float", "wrong type of a result",
                 properties=_declares(total_memory=float(CAPACITY))),
    wrong_device("undeclared-stream-is-none", "a quiet no-op for what is not there",
                 stream=lambda *_, **__: None),
    wrong_device("one-device-too-many", "count off by one", device_count=lambda self: DEVICES + 1),
    wrong_device("probe-says-unavailable", "two answers to one question",
                 probe=lambda self: Probe.unavailable("no device")),
    replace(
        wrong_device("compile-backend-unknown", "a name that nobody knows",
                     compile_backend="inductor2"),
        level="full", select="compile",
    ),
    wrong_device("identity-changes", "two answers to one question", identity=_counted_identity),
    wrong_device("properties-of-the-first-only", "state of one device", properties=_first_only),
    wrong_device("device-moves-device", "a query with a side effect", device=_moves_to),
    wrong_device("device-is-text", "wrong type of a result",
                 device=lambda self, index=None: str(HonestBackend.device(self, index))),
    wrong_device("thread-begins-at-the-last", "wrong initial state",
                 current_device=lambda self: getattr(self.thread, "index", DEVICES - 1)),
    wrong_device("integers-among-floats", "a claim that is too wide",
                 properties=_declares(dtypes=HonestBackend.dtypes | {torch.int8})),
    wrong_device("rate-of-zero", "0 for unknown", properties=_declares(bandwidth=0.0)),
    wrong_device("peak-without-statistics", "a claim that is too wide",
                 capabilities={"memory_peak": 1}),
    wrong_device("version-is-true", "wrong type of a value", capabilities={"memory_stats": True}),
    wrong_device("version-of-tomorrow", "incompatible, and says nothing", api=(1, 99)),
    wrong_device("set-device-returns-it", "wrong type of a result",
                 set_device=lambda self, index: HonestBackend.set_device(self, index) or index),
    wrong_device("row-of-no-operator", "a name that nobody knows", operators=_one_row("soft_max")),
    wrong_device("limit-of-no-size", "a name that nobody knows",
                 operators=_one_row("rms_norm", limits={"width": range(1, 9)})),
    wrong_device("refused-index-stays", "an error that changes", set_device=_moves_and_refuses),
    wrong_device("bool-is-an-index", "missing check of an index",
                 check_index=_lenient(lambda index: isinstance(index, bool), int)),
    wrong_device("whole-float-is-an-index", "missing check of an index",
                 check_index=_lenient(lambda index: index in (0.0, 1.0), int)),
    wrong_device("index-from-the-end", "missing check of an index",
                 check_index=_lenient(lambda index: index in (-1, -2), lambda i: i % DEVICES)),
    wrong_device("index-of-32-bits", "an index cut short",
                 check_index=_lenient(lambda i: type(i) is int and i >> 32, lambda i: i % 2**32)),
    wrong_device("numpy-is-not-looked-at", "missing check of an index",
                 check_index=_lenient(lambda index: isinstance(index, np.integer), lambda _: 0)),
    wrong_device("none-is-the-first", "state of one device",
                 device=lambda self, index=None:
                 HonestBackend.device(self, 0 if index is None else index)),
    wrong_device("statistics-of-any-index", "missing check of an index", memory_type=AnyIndex,
                 memory=property(lambda self: self.memory_type(self))),
    wrong_device("random-state-of-any-index", "missing check of an index",
                 random_state=lambda self, index=None: torch.get_rng_state()),
    wrong_device("bandwidth-in-gigabytes", "wrong unit", properties=_declares(bandwidth=3350.0)),
    wrong_device("memory-in-kibibytes", "wrong unit",
                 properties=_declares(total_memory=CAPACITY >> 10)),
    wrong_device("host-is-an-accelerator", "two answers to one question",
                 probe=lambda self: Probe.ready(DEVICES)),
    wrong_device("probe-of-the-main-thread", "per-thread state", probe=_in_the_main_thread_only),
    Wrong(name="device-of-a-thread-that-has-ended", bug="state kept by a number that is used again",
          chapter="device", make=ByNumberOfThread),
)  # fmt: skip
