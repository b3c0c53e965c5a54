"""Wrong backends that are right in the place from which one asks first, and at the first use."""

import threading
from collections.abc import Callable
from typing import Any

from tests.meta.asynchronous import AsynchronousBackend, AsynchronousMemory, Event, Stream
from tests.meta.wrong import Wrong, with_method, wrong_parts

Place = Callable[[AsynchronousBackend, int], bool]
Effect = Callable[..., Any]


def _in_thread(backend: AsynchronousBackend, times: int) -> bool:
    return threading.current_thread() is not threading.main_thread()


def _on_stream(backend: AsynchronousBackend, times: int) -> bool:
    return getattr(backend.thread, "stream", backend.first) is not backend.first


def _in_both(backend: AsynchronousBackend, times: int) -> bool:
    return _in_thread(backend, times) and _on_stream(backend, times)


def _later(backend: AsynchronousBackend, times: int) -> bool:
    return times == 4


def _nothing(right: Effect, *args: Any, **named: Any) -> None:
    return None


def _true(right: Effect, *args: Any, **named: Any) -> bool:
    return True


def _zero(right: Effect, *args: Any, **named: Any) -> Any:
    return 0.0 * right(*args, **named)


def _upper_half_gone(right: Effect, seed: int, index: int | None = None) -> Any:
    return right(seed & 0xFFFFFFFF, index)


def _other_total(right: Effect, index: int | None = None) -> Any:
    found = right(index)
    return found._replace(allocated=found.allocated + (1 << 30))


PARTS: dict[type, str] = {
    AsynchronousMemory: "memory_type", Stream: "stream_type", Event: "event_type",
}  # fmt: skip


def wrong(name: str, chapter: str, part: type, method: str, place: Place, effect: Effect) -> Wrong:
    """A method that has an effect of its own in a place."""
    served: list[AsynchronousBackend] = []

    def change(owner: Any, right: Effect, *args: Any, **named: Any) -> Any:
        owner.times = getattr(owner, "times", 0) + 1
        backend = owner if isinstance(owner, AsynchronousBackend) else served[-1]
        is_wrong = place(backend, owner.times)
        return effect(right, *args, **named) if is_wrong else right(*args, **named)

    def entered(backend: AsynchronousBackend) -> None:
        served.append(backend)
        AsynchronousBackend.__init__(backend)

    changed = with_method(part, method, change)
    whole = part is AsynchronousBackend
    parts = {method: vars(changed)[method]} if whole else {PARTS[part]: changed}
    select = "again or often" if chapter == "streams" else "again"
    return wrong_parts(
        AsynchronousBackend, name, "right in one place alone", select, chapter=chapter,
        __init__=entered, **parts,
    )  # fmt: skip


CATALOGUE: tuple[Wrong, ...] = (
    wrong("other-statistics-in-a-thread", "memory", AsynchronousMemory, "stats", _in_thread,
          _other_total),
    wrong("copies-of-a-thread-are-lost", "memory", AsynchronousMemory, "copy_async", _in_thread,
          _nothing),
    wrong("peak-stays-on-a-stream", "memory", AsynchronousMemory, "reset_peak", _on_stream,
          _nothing),
    wrong("device-set-on-a-stream", "device", AsynchronousBackend, "set_device", _on_stream,
          _true),
    wrong("seeds-cut-in-a-thread", "random", AsynchronousBackend, "generator", _in_thread,
          _upper_half_gone),
    wrong("state-set-on-a-stream", "random", AsynchronousBackend, "set_random_state", _on_stream,
          _nothing),
    wrong("state-set-in-a-thread-on-a-stream", "random", AsynchronousBackend, "set_random_state",
          _in_both, _nothing),
    wrong("host-does-not-wait-on-a-stream", "streams", Event, "synchronize", _on_stream, _nothing),
    wrong("wait-for-a-stream-in-a-thread", "streams", Stream, "wait_stream", _in_thread, _nothing),
    wrong("idle-in-a-thread-on-a-stream", "streams", Stream, "query", _in_both, _true),
    wrong("fourth-record-is-lost", "streams", Event, "record", _later, _nothing),
    wrong("fourth-wait-of-an-event", "streams", Event, "wait", _later, _nothing),
    wrong("fourth-wait-for-a-stream", "streams", Stream, "wait_stream", _later, _nothing),
    wrong("fourth-time-is-none", "streams", Event, "elapsed_time", _later, _zero),
)  # fmt: skip
