"""Wrong backends that the streams chapter has to find: on a device that is really asynchronous."""

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tests.meta.asynchronous import (
    AsynchronousBackend,
    AsynchronousMemory,
    Deferring,
    Event,
    Progress,
    Reading,
    Stream,
)
from tests.meta.honest import make_table, reference_rows
from tests.meta.wrong import Call, Wrong, with_method, wrong_parts

NeverHolds = with_method(Event, "wait", lambda *_: None)


class HoldsOne(Event):
    """The first that waits takes the record away."""

    is_taken = False

    def record(self, stream: Any = None) -> None:
        self.is_taken = False
        super().record(stream)

    def wait(self, stream: Any = None) -> None:
        if not self.is_taken:
            super().wait(stream)
        self.is_taken = True


class StampedWhenQueued(Event):
    def record(self, stream: Any = None) -> None:
        super().record(stream)
        stamp = self.times = []
        stamp.append(time.perf_counter())


class WaitsForTheLast(Stream):
    """There is room for one event only."""

    def wait_event(self, event: Any) -> None:
        self.awaited = event

    def add(self, call: Callable[[], Any]) -> None:
        awaited = self.__dict__.pop("awaited", None)
        if awaited is not None:
            awaited.wait(self)
        super().add(call)


class TwoLanes(Stream):
    """Every second piece goes to another thread."""

    def __init__(self, *, has_thread: bool = True) -> None:
        super().__init__(has_thread=has_thread)
        self.lane = Stream() if has_thread else None
        self.turn = 0

    def add(self, call: Callable[[], Any]) -> None:
        self.turn += 1
        if self.lane is not None and self.turn % 2 and self.turn > 2:
            self.lane.add(call)
        else:
            super().add(call)


class WaitsOneLate(Stream):
    """What is waited for holds back the piece after the next one."""

    def wait_event(self, event: Any) -> None:
        self.late = event

    def add(self, call: Callable[[], Any]) -> None:
        super().add(call)
        late = self.__dict__.pop("late", None)
        if late is not None:
            late.wait(self)


class BusyWithTheLast(Progress):
    """What is being done counts as done."""

    def is_complete(self) -> bool:
        with self.changed:
            return self.done >= self.queued - 1

    def wait(self) -> None:
        with self.changed:
            end = self.queued - self.is_short
            self.changed.wait_for(lambda: self.done >= end)

    is_short = 0


class AllButTheLast(BusyWithTheLast):
    is_short = 1
    is_complete = Progress.is_complete


def _counting(progress: type[Progress]) -> type[Stream]:
    """Streams that count otherwise."""
    return type("Counting", (Stream,), {"progress_type": progress})


class CompleteFromTheFirst(Event):
    """Complete once, complete for ever."""

    def query(self) -> bool:
        self.is_over = getattr(self, "is_over", False) or super().query()
        return self.is_over

    def synchronize(self) -> None:
        if not self.query():
            super().synchronize()
            self.query()


def _event_on_current(self: AsynchronousBackend, *, timing: bool = False) -> Any:
    made: Any = Event()
    made.record = lambda stream: Event.record(made, self.current_stream())
    return made


def _all_but_a_named_one(self: AsynchronousBackend, index: int | None = None) -> None:
    if index is None:
        AsynchronousBackend.synchronize(self)
    self.check_index(index)


def _pool_of_four(self: AsynchronousBackend, index: int | None = None) -> Any:
    pool = vars(self).setdefault("pool", [])
    if len(pool) < 4:
        pool.append(AsynchronousBackend.stream(self, index))
        return pool[-1]
    self.turn = getattr(self, "turn", 0) + 1
    return pool[self.turn % 4]


def _is_within(target: torch.Tensor, source: torch.Tensor) -> bool:
    return target.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def _small_copy_at_once(
    memory: Any, right: Call, target: Any, source: Any, stream: Any = None
) -> None:
    """One element is copied by the host."""
    if source.numel() > 1 or stream is None:
        right(target, source, stream)
    else:
        target.copy_(source)


class CopiesKeepNothing(AsynchronousMemory):
    """Who lets go of a tensor hands its memory to others."""

    def copy_async(self, target: Any, source: Any, stream: Any = None) -> None:
        if stream is None or source._is_view():
            super().copy_async(target, source, stream)
            return
        held = weakref.ref(source)

        def run() -> None:
            found = held()
            target.copy_(torch.full_like(target, -1.0) if found is None else found)

        stream.add(run)


class PartsNotKept(AsynchronousMemory):
    """What a view is a part of is looked for by the view's address, and not found."""

    def copy_async(self, target: Any, source: Any, stream: Any = None) -> None:
        if stream is None or not source.storage_offset():
            super().copy_async(target, source, stream)
            return
        held, kept = weakref.ref(source), source.detach()
        stream.add(lambda: target.copy_(kept if held() is not None else torch.zeros_like(kept)))


class SkippedIfDropped(Event):
    """A wait for an event that nobody holds any more is skipped."""

    def wait(self, stream: Any = None) -> None:
        reached, held = self.reached, weakref.ref(self)
        if reached is not None:
            stream.add(lambda: held() is not None and reached.wait())


class MasksAtOnce(Deferring):
    """How many numbers a mask has is asked without waiting."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default and args[0].dtype == torch.bool:
            return func(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def _stays_after_a_key_press(self: AsynchronousBackend, stream: Any) -> Any:
    before, self.thread.stream = self.current_stream(), stream
    try:
        with self.mode_type(stream), self.read_type(stream):
            yield
    except Exception:
        self.thread.stream = before
        raise
    self.thread.stream = before


class ReadsMuchEarly(Reading):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cpu and args[0].nbytes >= 1 << 20:
            return func(*args)
        return super().__torch_function__(func, types, args, kwargs)


class CountsWithoutALock(Progress):
    """Two threads that queue at once are counted once."""

    def count_queued(self) -> None:
        known = self.queued
        time.sleep(0)
        self.queued = known + 1

    def wait(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.done >= self.queued)


def _until_idle(stream: Stream, right: Call, other: Stream) -> None:
    """Holds a stream until the other one has nothing left, also of what it is given later."""
    stream.add(lambda: [time.sleep(1e-4) for _ in iter(other.progress.is_complete, True)])


def _of_32(self: AsynchronousBackend, index: int | None = None) -> None:
    """Which streams are busy stands in 32 bits."""
    self.check_index(index)
    for progress in {n % 32: p for n, (_, p) in enumerate(self.streams)}.values():
        progress.wait()


def _of_the_current(self: AsynchronousBackend, index: int | None = None) -> Any:
    """A stream is entered under the device that is current."""
    made = AsynchronousBackend.stream(self, index)
    vars(self).setdefault("under", []).append((self.current_device(), made))
    return made


def _entered(self: AsynchronousBackend, index: int | None = None) -> None:
    found = self.check_index(index)
    for device, stream in vars(self).get("under", []):
        if device == found:
            stream.synchronize()


class RecordsElsewhere(Event):
    """Records on the stream that was made last."""

    def record(self, stream: Any = None) -> None:
        super().record(_made.get("last", stream))


class MadeLast(Stream):
    def __init__(self, *, has_thread: bool = True) -> None:
        super().__init__(has_thread=has_thread)
        if has_thread:
            _made["last"] = self


_made: dict[str, Any] = {}


class SourceIsReadLate(AsynchronousMemory):
    """The source goes through a staging room that is filled when somebody waits for the device."""

    def copy_async(self, target: Any, source: Any, stream: Any = None) -> None:
        if stream is None:
            super().copy_async(target, source)
            return
        staged: Any = self.backend.__dict__.setdefault("staged", [])
        staged.append((target, source))

    @staticmethod
    def synchronize(backend: Any, index: int | None = None) -> None:
        AsynchronousBackend.synchronize(backend, index)
        for target, source in backend.__dict__.pop("staged", []):
            target.copy_(source)


def _shared_room() -> Any:
    """A table whose gelu goes through one room, whatever the stream."""
    rows, room = reference_rows(), torch.empty(0)
    right = rows["gelu", "forward"]

    def gelu(x: torch.Tensor, *, approximate: str) -> Any:
        y = right(x, approximate=approximate)
        if y.numel() > room.numel():
            room.resize_(y.numel())
        part = room[: y.numel()]
        part.copy_(y.view(-1))
        time.sleep(0.01)
        return part.clone().view(y.shape)

    return make_table({**rows, ("gelu", "forward"): gelu})


def _of_this_thread(self: AsynchronousBackend, index: int | None = None) -> None:
    self.check_index(index)
    for stream in list(getattr(self.thread, "streams", [])):
        Stream.synchronize(stream)


def _stream_of_this_thread(self: AsynchronousBackend, index: int | None = None) -> Any:
    made = AsynchronousBackend.stream(self, index)
    if not hasattr(self.thread, "streams"):
        self.thread.streams = []
    self.thread.streams.append(made)
    return made


@contextmanager
def _stays(self: AsynchronousBackend, stream: Any) -> Any:
    self.thread.stream = stream
    with self.mode_type(stream):
        yield
    self.thread.stream = self.first  # not what was current before, and not after an exception


class _OneForAll(threading.local):
    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_Shared, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(_Shared, name)


class _Shared:
    """Attributes of every thread."""


def _per_process(self: AsynchronousBackend) -> None:
    AsynchronousBackend.__init__(self)
    for name in list(vars(_Shared)):
        if name == "stream":
            delattr(_Shared, name)
    self.thread = _OneForAll()


def _current_only(self: AsynchronousBackend, index: int | None = None) -> None:
    self.check_index(index)
    self.current_stream().synchronize()


def _of_held_streams(self: AsynchronousBackend, index: int | None = None) -> None:
    self.check_index(index)
    for stream, progress in list(self.streams):
        if stream() is not None:
            progress.wait()


wrong = partial(wrong_parts, AsynchronousBackend, chapter="streams")
PARTS = {
    Event: "event_type", Stream: "stream_type", Deferring: "mode_type", Reading: "read_type",
    AsynchronousMemory: "memory_type",
}  # fmt: skip


def wrong_method(name: str, bug: str, select: str, of: type, method: str, change: Call) -> Wrong:
    """``change(part, right, *args)`` in place of a method of a part of the backend."""
    return wrong(name, bug, select, **{PARTS[of]: with_method(of, method, change)})


def ours_at_once(mode: Any, right: Call, func: Any, call: Callable[[], Any]) -> None:
    """Kernels of ours are launched on a stream that is not the one of the mode."""
    call() if func.namespace == "anychip" else right(func, call)


class OfItsStream(Event):
    """Has the time since its stream's first event."""

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        self.first = stream.__dict__.setdefault("first", self.times)

    def elapsed_time(self, end_event: Any) -> float:
        ends = (event.times[0] - event.first[0] for event in (end_event, self))
        return float(1000 * (next(ends) - next(ends)))


class OfItsThread(Event):
    """Is waited for in the thread that has recorded it."""

    recorder = 0

    def record(self, stream: Any = None) -> None:
        self.recorder = threading.get_ident()
        super().record(stream)

    def wait(self, stream: Any = None) -> None:
        if self.recorder == threading.get_ident():
            super().wait(stream)


def _counts_for_two(self: AsynchronousBackend, *, timing: bool = False) -> Any:
    """Has twice the time where the first stream is not current."""
    made: Any = self.event_type()
    made.elapsed_time = lambda end: (
        Event.elapsed_time(made, end) * (1 + (self.current_stream() is not self.first))
    )
    return made


def _first_time(event: Event, right: Call, stream: Any = None) -> None:
    times = event.__dict__.get("times")
    right(stream)
    event.times = times or event.times


CATALOGUE: tuple[Wrong, ...] = (
    wrong("times-of-each-stream", "two clocks", "elapsed", event_type=OfItsStream),
    wrong_method("first-time-stays", "stale state", "often", Event, "record", _first_time),
    wrong("event-never-waits", "missing wait", "event.wait", event_type=NeverHolds),
    wrong_method("event-always-complete", "completes too early", "event.query",
                 Event, "query", lambda *_: True),
    wrong_method("host-does-not-wait", "missing wait", "event.synchronize",
                 Event, "synchronize", lambda *_: None),
    wrong_method("event-incomplete-at-first", "wrong initial state", "unrecorded", Event, "query",
                 lambda event, _: event.reached is not None and event.reached.is_set()),
    wrong_method("first-record-stays", "stale state", "event.wait", Event, "record",
                 lambda event, right, stream=None: event.reached or right(stream)),
    wrong_method("elapsed-in-seconds", "wrong unit", "elapsed", Event, "elapsed_time",
                 lambda _, right, end: right(end) / 1000),
    wrong("stamped-when-queued", "time of the host, not of the stream", "elapsed",
          event_type=StampedWhenQueued),
    wrong_method("stream-waits-for-nothing", "missing wait", "wait_stream",
                 Stream, "wait_stream", lambda *_: None),
    wrong_method("stream-waits-for-itself", "arguments swapped", "chain", Stream, "wait_stream",
                 lambda stream, *_: stream.add(stream.mark().wait)),
    wrong_method("stream-always-idle", "completes too early", "stream.query",
                 Stream, "query", lambda *_: True),
    wrong("work-out-of-order", "order within a stream lost", "order", stream_type=TwoLanes),
    wrong_method("operators-on-first-stream", "kernel on another stream", "operators",
                 Deferring, "defer", ours_at_once),
    wrong("counted-without-a-lock", "two threads at once", "shared",
          stream_type=type("Counted", (Stream,), {"progress_type": CountsWithoutALock})),
    wrong_method("waits-until-idle", "late binding", "in_turn", Stream, "wait_stream", _until_idle),
    wrong("busy-in-32-bits", "a limit of a table", "many", synchronize=_of_32),
    wrong("streams-of-the-current-device", "an argument without effect", "of_device",
          stream=_of_the_current, synchronize=_entered),
    wrong("host-reads-much-early", "missing wait", "read.large", read_type=ReadsMuchEarly),
    wrong("parts-not-kept", "free while in use", "copy.kept", memory_type=PartsNotKept),
    wrong("wait-for-a-dropped-event", "missing wait", "event.let_go", event_type=SkippedIfDropped),
    wrong("masks-read-at-once", "missing wait", "read.nonzero.mask", mode_type=MasksAtOnce),
    wrong("stream-stays-after-a-key-press", "state that is not restored", "use_stream",
          use_stream=_stays_after_a_key_press),
    wrong("stream-does-not-return", "state that is not restored", "use_stream", use_stream=_stays),
    wrong("stream-of-all-threads", "process-wide state where it must be per thread", "threads",
          __init__=_per_process),
    wrong_method("stream-does-not-wait", "missing wait", "stream.synchronize",
                 Stream, "synchronize", lambda *_: None),
    wrong("wait-one-late", "off by one", "wait_event", stream_type=WaitsOneLate),
    wrong_method("times-swapped", "arguments swapped", "elapsed", Event, "elapsed_time",
                 lambda _, right, end: -right(end)),
    wrong("recorded-elsewhere", "an argument without effect", "event.wait",
          event_type=RecordsElsewhere, stream_type=MadeLast),
    # Copies have a queue of their own, which no event of the stream knows.
    wrong_method("copy-engine-unordered", "missing wait", "copy", AsynchronousMemory, "copy_async",
                 lambda _, right, target, source, stream=None:
                 right(target, source, stream and _made.setdefault("engine", Stream()))),
    wrong("source-read-late", "free while in use", "copy", memory_type=SourceIsReadLate,
          synchronize=SourceIsReadLate.synchronize),
    wrong("room-of-all-streams", "workspace shared", "operators.apart", operators=_shared_room()),
    wrong("synchronize-own-streams", "per-thread state", "synchronize.thread",
          synchronize=_of_this_thread, stream=_stream_of_this_thread),
    # Which record is waited for is looked up when the stream comes to the wait.
    wrong_method("wait-looks-late", "late binding", "event.moved", Event, "wait",
                 lambda event, _, stream:
                 stream.add(lambda: event.reached is None or event.reached.wait())),
    wrong("event-holds-one-stream", "missing wait", "event.waiters", event_type=HoldsOne),
    wrong("last-wait-counts", "missing wait", "event.waiters", stream_type=WaitsForTheLast),
    wrong("synchronize-current-only", "missing wait", "synchronize", synchronize=_current_only),
    wrong_method("event-gives-up", "a time limit that nobody set", "patience", Event, "wait",
                 lambda event, _, stream:
                 event.reached and stream.add(partial(event.reached.wait, 0.3))),
    wrong_method("host-gives-up", "a time limit that nobody set", "patience", Event, "synchronize",
                 lambda event, _: event.reached and event.reached.wait(0.3)),
    wrong("idle-during-the-last-piece", "completes too early", "stream.query",
          stream_type=_counting(BusyWithTheLast)),
    wrong("host-waits-for-all-but-the-last", "off by one", "synchronize",
          stream_type=_counting(AllButTheLast)),
    # The event comes back as it was.
    wrong_method("record-event-forgets", "a quiet no-op", "wait_event", Stream, "record_event",
                 lambda *given: given[2]),
    wrong("complete-once-for-ever", "stale state", "event.query", event_type=CompleteFromTheFirst),
    wrong_method("overhead-in-each-time", "two answers to one question", "elapsed",
                 Event, "elapsed_time",
                 lambda event, right, end: right(end) + 0.5 * (end is not event)),
    wrong("recorded-on-the-current", "an argument without effect", "event.wait",
          event=_event_on_current),
    wrong("event-with-times-never-waits", "missing wait", "wait_event",
          event=lambda _, timing=False: NeverHolds() if timing else Event()),
    wrong("synchronize-of-an-index-is-nothing", "a quiet no-op", "synchronize.index",
          synchronize=_all_but_a_named_one),
    wrong("streams-from-a-pool-of-four", "output that is not fresh", "first-calls",
          chapter="device", stream=_pool_of_four),
    # The host does not wait where it reads by one method.
    *(
        wrong_method(f"host-reads-early-by-{method.__name__}", "missing wait", f"read.{question}",
                     Reading, "wait", lambda _, right, func, m=method: func is m or right(func))
        for method, question in ((torch.Tensor.tolist, "tolist"), (torch.Tensor.cpu, "host"),
                                 (torch.Tensor.to, "to"), (torch.Tensor.__repr__, "repr"))
    ),
    wrong_method("host-reads-numbers-early", "missing wait", "read.item", Deferring, "needs_values",
                 lambda _, right, func:
                 func is torch.ops.aten._local_scalar_dense.default or right(func)),
    # One of torch's operators is not work of the stream.
    *(
        wrong_method(f"{name}-at-once", "kernel on another stream", "wait_stream",
                     Deferring, "defer", lambda _, right, func, call, one=f"aten::{name}":
                     call() if func.name() == one else right(func, call))
        for name in ("clone", "copy_", "mul.Tensor")
    ),
    wrong_method("small-copies-at-once", "missing wait", "copy",
                 AsynchronousMemory, "copy_async", _small_copy_at_once),
    # A copy with strides is a kernel, on the first stream.
    wrong_method("copies-with-gaps-apart", "kernel on another stream", "copy",
                 AsynchronousMemory, "copy_async", lambda _, right, target, source, stream=None:
                 right(target, source,
                       stream if source.is_contiguous() and target.is_contiguous() else None)),
    wrong_method("copy-within-a-tensor-is-nothing", "a special case forgotten", "copy",
                 AsynchronousMemory, "copy_async", lambda _, right, target, source, stream=None:
                 None if _is_within(target, source) else right(target, source, stream)),
    wrong("time-of-the-current-stream", "state of another call", "elapsed", event=_counts_for_two),
    wrong_method("converted-at-the-call", "missing wait", "copy", AsynchronousMemory, "copy_async",
                 lambda _, right, target, source, stream=None:
                 right(target, source.to(target.dtype), stream)),
    wrong("waits-in-its-thread", "missing wait", "event.wait.thread", event_type=OfItsThread),
    wrong("let-go-is-not-waited-for", "missing wait", "let_go", synchronize=_of_held_streams),
    wrong_method("ring-of-1024", "dropped tail", "deep", Stream, "add", lambda stream, right, call:
                 stream.progress.queued - stream.progress.done < 1024 and right(call)),
    wrong("copies-keep-nothing", "free while in use", "copy.kept", memory_type=CopiesKeepNothing),
)  # fmt: skip
