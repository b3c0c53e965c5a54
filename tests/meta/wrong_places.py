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


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _true(*_: Any, **__: Any) -> bool:
    return True


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


def _in_both(*asked: Any) -> bool:
    return _in_thread(*asked) and _on_stream(*asked)


def _fourth(backend: AsynchronousBackend, times: int) -> bool:
    return times == 4


Backend, Memory = AsynchronousBackend, AsynchronousMemory
CATALOGUE: tuple[Wrong, ...] = tuple(wrong(*entry) for entry in (
    ("other-statistics-in-a-thread", "memory", Memory, "stats", _in_thread, _other_total),
    ("copies-of-a-thread-are-lost", "memory", Memory, "copy_async", _in_thread, _nothing),
    ("peak-stays-on-a-stream", "memory", Memory, "reset_peak", _on_stream, _nothing),
    ("device-set-on-a-stream", "device", Backend, "set_device", _on_stream, _true),
    ("seeds-cut-in-a-thread", "random", Backend, "generator", _in_thread,
     lambda right, seed, index=None: right(seed & 0xFFFFFFFF, index)),
    ("state-set-on-a-stream", "random", Backend, "set_random_state", _on_stream, _nothing),
    ("state-set-in-a-thread-on-a-stream", "random", Backend, "set_random_state", _in_both,
     _nothing),
    ("host-does-not-wait-on-a-stream", "streams", Event, "synchronize", _on_stream, _nothing),
    ("wait-for-a-stream-in-a-thread", "streams", Stream, "wait_stream", _in_thread, _nothing),
    ("idle-in-a-thread-on-a-stream", "streams", Stream, "query", _in_both, _true),
    ("fourth-record-is-lost", "streams", Event, "record", _fourth, _nothing),
    ("fourth-wait-of-an-event", "streams", Event, "wait", _fourth, _nothing),
    ("fourth-wait-for-a-stream", "streams", Stream, "wait_stream", _fourth, _nothing),
    ("fourth-time-is-none", "streams", Event, "elapsed_time", _fourth,
     lambda right, end: 0.0 * right(end)),
))  # fmt: skip
