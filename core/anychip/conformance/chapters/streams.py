"""Are streams and events what orders the work, and nothing else?

Work on one stream is in order. A stream that waits for an event, or for a stream, sees what was
written before; so does the host after it has waited; and a query says done when it is done. Each
question is a race: long writes on one stream, and a read that comes too soon unless the wait under
test holds it back. On a chip whose streams are not really asynchronous such a case cannot fail.
The length of the writes is measured first, since a race that is over at once shows nothing.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anychip import ops
from anychip.conformance.case import Case, CheckFailedError, Context, check, check_equal_bits
from anychip.conformance.chapters.device import in_thread
from anychip.contract import Backend

WRITES = 32
LONG_MS = 10.0
"""The writes of a race take so long, if the largest tensor allows it."""
SMALLEST, LARGEST = 1 << 16, 1 << 26
READ = 4096
"""Elements of the read, at the end of the tensor, where writes arrive last."""
PATIENCE_S = 30.0


def cases(context: Context) -> Iterator[Case]:
    """Where the backend declares streams."""
    for name, run in QUESTIONS.items():
        yield Case(id=f"streams/{name}", run=run, capability="streams")
    yield Case(id="streams/graph", run=graph_on_stream, capability="graphs")


class Race:
    """Long writes on a stream of its own, and what a reader has to find.

    Attributes:
        x: becomes WRITES everywhere.
        stream: on which it does.
    """

    def __init__(self, context: Context) -> None:
        self.context, self.backend = context, context.backend
        self.x = torch.zeros(race_size(context), device=context.device)
        self.stream = self.backend.stream()
        self.idle = self.backend.stream()  # made later, and never used: nothing may mean this one
        self.backend.synchronize()

    def start(self) -> Race:
        """Queues the writes."""
        with self.backend.use_stream(self.stream):
            write(self.x)
        return self

    def event(self) -> torch.Event:
        """An event behind the writes."""
        event = self.backend.event()
        event.record(self.stream)
        return event

    def read(self) -> Tensor:
        """What the current stream finds."""
        return self.x[-READ:] * 1.0

    def read_on(self, stream: torch.Stream | None = None) -> Tensor:
        """What a stream finds; without one, what one finds that waits for nothing."""
        with self.backend.use_stream(stream or self.backend.stream()):
            return self.read()

    def check(self, what: str, found: Tensor, want: float = float(WRITES)) -> None:
        """Compares a read, once all is done."""
        self.backend.synchronize()
        check_equal_bits(what, found.cpu(), torch.full((READ,), want))


def write(x: Tensor) -> None:
    """Long work on the current stream: x grows by WRITES."""
    for _ in range(WRITES):
        x += 1.0


_sizes: weakref.WeakKeyDictionary[Backend, int] = weakref.WeakKeyDictionary()


def race_size(context: Context) -> int:
    """Elements of a tensor on which the writes take LONG_MS, measured once per backend."""
    if context.backend not in _sizes:
        _sizes[context.backend] = _measured_size(context)
    return _sizes[context.backend]


def _measured_size(context: Context) -> int:
    numel = SMALLEST
    while numel < LARGEST:
        x = torch.zeros(numel, device=context.device)
        context.backend.synchronize()
        with context.backend.use_stream(context.backend.stream()):
            start = time.perf_counter()
            write(x)
        context.backend.synchronize()
        if (time.perf_counter() - start) * 1000 >= LONG_MS:
            break
        numel *= 4
    return numel


# Order


def in_order(context: Context) -> None:
    """Work of one stream follows what was queued before it."""
    race = Race(context).start()
    with race.backend.use_stream(race.stream):
        found = race.read()
        race.x.zero_()
        later = race.read()
    race.check("read behind the writes on their own stream", found)
    race.check("read behind a second write", later, 0.0)


def wait_holds_stream(context: Context, *, what: str, wait: Callable[..., Any]) -> None:
    """What a stream does behind a wait, ``wait(race, event, stream)``, sees what was written."""
    race = Race(context).start()
    event, reader = race.event(), race.backend.stream()
    wait(race, event, reader)
    race.check(f"read behind {what}", race.read_on(reader))


def current_waits(context: Context) -> None:
    """The stream on which all starts can wait too."""
    race = Race(context).start()
    race.backend.current_stream().wait_stream(race.stream)
    race.check("read on the first stream behind wait_stream()", race.read())


def last_record_counts(context: Context) -> None:
    """An event that was recorded twice stands for the second time."""
    race = Race(context)
    event = race.event()
    race.start()
    event.record(race.stream)
    reader = race.backend.stream()
    event.wait(reader)
    race.check("read behind an event that was recorded anew", race.read_on(reader))


def two_waiters(context: Context) -> None:
    """Two streams wait for one event; and one of them for a second event, of a stream long done."""
    race = Race(context)
    readers, done = [race.backend.stream() for _ in range(2)], race.backend.event()
    done.record(race.idle)
    event = race.start().event()
    found = []
    for reader in readers:
        reader.wait_event(event)
        reader.wait_event(done)
        found.append(race.read_on(reader))
    for number, result in enumerate(found):
        race.check(f"read behind two events, by stream {number} of two", result)


def wait_is_for_this_record(context: Context) -> None:
    """A wait stands for the record at hand: one that comes later, elsewhere, changes nothing."""
    busy, race = Race(context), Race(context)
    busy.start()
    event = race.start().start().start().event()  # done after the other one, which waits for it
    event.wait(busy.stream)
    event.record(race.idle)
    found = race.read_on(busy.stream)
    what = "read behind an event that was recorded on an idle stream later"
    race.check(what, found, 3.0 * WRITES)


def chain(context: Context) -> None:
    """Waits add up along a chain of streams."""
    race = Race(context).start()
    streams = [race.backend.stream() for _ in range(3)]
    before = race.stream
    for stream in streams:
        stream.wait_stream(before)
        with race.backend.use_stream(stream):
            race.x.mul_(2.0).add_(1.0)
        before = stream
    race.check("read at the end of a chain", race.read_on(before), 8.0 * WRITES + 7.0)


def operator_on_stream(context: Context) -> None:
    """Operators of ours run on the current stream, behind what is queued there."""
    race = Race(context).start()
    context.call = "ops.gelu(x) and ops.rms_norm(x) behind long writes of x on a stream"
    weight = torch.ones(READ, device=context.device)
    with race.backend.use_stream(race.stream):
        part = race.x[-READ:].view(1, -1)
        results = [ops.gelu(part), ops.rms_norm(part, weight, eps=1e-6)]
    race.backend.synchronize()
    settled = torch.full((1, READ), float(WRITES), device=context.device)
    wanted = [ops.gelu(settled), ops.rms_norm(settled, weight, eps=1e-6)]
    for name, got, want in zip(("gelu", "rms_norm"), results, wanted, strict=True):
        check_equal_bits(f"{name} behind the writes on their own stream", got.cpu(), want.cpu())


def operators_apart(context: Context) -> None:
    """Operators on two streams at once do not disturb each other: no room that both write to."""
    backend = context.backend
    weight = torch.ones(READ, device=context.device)
    inputs = [torch.full((4, READ), 1.0 + i, device=context.device) for i in range(2)]
    settled = [_several(x, weight) for x in inputs]
    backend.synchronize()
    streams = [backend.stream() for _ in inputs]
    results: list[list[Tensor]] = [[], []]
    for _ in range(8):
        for place, (stream, x) in enumerate(zip(streams, inputs, strict=True)):
            with backend.use_stream(stream):
                results[place] += _several(x, weight)
    backend.synchronize()
    for place, want in enumerate(settled):
        for got, one in zip(results[place], want * 8, strict=True):
            check_equal_bits(f"a result on stream {place} of two", got.cpu(), one.cpu())


def _several(x: Tensor, weight: Tensor) -> list[Tensor]:
    return [ops.gelu(x), ops.rms_norm(x, weight, eps=1e-6), ops.softmax(x)]


def graph_on_stream(context: Context) -> None:
    """A replay is work of the current stream: behind what is queued there, before what follows."""
    race = Race(context)
    graph = race.backend.capture(lambda: race.x[-READ:] * 2.0)
    race.start()
    with race.backend.use_stream(race.stream):
        graph.replay()
        race.x.zero_()
        found = graph.result * 1.0
    race.check("a replay's result, read behind it on its stream", found, 2.0 * WRITES)
    race.check("what a replay read behind the writes", graph.result, 2.0 * WRITES)


def copy_on_stream(context: Context) -> None:
    """A copy is work of its stream: behind what was queued, and done where its event is."""
    race = Race(context)
    backend, reader = race.backend, race.backend.stream()
    source = torch.arange(race.x.numel(), dtype=torch.float32)
    kept = source[-READ:].clone()
    race.start()
    backend.memory.copy_async(race.x, source, race.stream)
    event = race.event()
    event.wait(reader)
    found = race.read_on(reader)
    event.synchronize()
    source.fill_(-1.0)  # the stream has passed the copy
    backend.synchronize()
    check_equal_bits("read behind a copy on another stream", found.cpu(), kept)
    check_equal_bits("what was copied behind the writes", race.x[-READ:].cpu(), kept)


# The host


def host_waits(context: Context, *, what: str, wait: Callable[[Race], Any]) -> None:
    """After the host has waited, what was recorded is done, for whoever looks."""
    race = Race(context).start()
    wait(race)
    race.check(f"read after {what}", race.read_on())


def until_idle(race: Race) -> None:
    """After stream.synchronize() the stream is idle."""
    race.stream.synchronize()
    check(race.stream.query() is True, "stream.query() is not True after stream.synchronize()")


def wait_until(query: Callable[[], bool], what: str) -> None:
    """Asks until the answer is True; every answer is a bool."""
    deadline = time.monotonic() + PATIENCE_S
    while (answer := query()) is not True:
        check(answer is False, f"{what}: a bool expected, got {answer!r}")
        check(time.monotonic() < deadline, f"{what} is not True after {PATIENCE_S:g} s")
        time.sleep(0.0002)


# Events


def unrecorded(context: Context) -> None:
    """An event that was never recorded is complete: nobody waits for it."""
    backend, stream = context.backend, context.backend.stream()
    event = backend.event()
    check(event.query() is True, "query() of an event that was never recorded must be True")
    event.synchronize()
    event.wait(stream)
    with backend.use_stream(stream):
        found = torch.ones(READ, device=context.device) * 2.0
    backend.synchronize()
    check_equal_bits("work behind such an event", found.cpu(), torch.full((READ,), 2.0))


def elapsed(context: Context) -> None:
    """elapsed_time(): milliseconds, not negative, and those that the host has seen go by."""
    race = Race(context)
    start, end = (race.backend.event(timing=True) for _ in range(2))
    begin = time.perf_counter()
    start.record(race.stream)
    race.start()
    end.record(race.stream)
    race.backend.synchronize()
    host = (time.perf_counter() - begin) * 1000
    found = start.elapsed_time(end)
    check(isinstance(found, float), f"elapsed_time(): a float expected, got {found!r}")
    check(
        0.1 * host <= found <= 1.1 * host + 1.0,
        f"elapsed_time() of work for which the host has waited {host:.3g} ms: {found:.3g} ms",
    )
    check(start.elapsed_time(start) == 0.0, "an event is 0 ms after itself")


# What is current


def use_stream_restores(context: Context) -> None:
    """Blocks nest, and an exception leaves one like its end does."""
    backend = context.backend
    before, outer, inner = backend.current_stream(), backend.stream(), backend.stream()
    with backend.use_stream(outer):
        with backend.use_stream(inner):
            check(backend.current_stream() == inner, "the inner stream is not current")
        check(backend.current_stream() == outer, "the outer stream did not return")
        with suppress(KeyError), backend.use_stream(inner):
            raise KeyError("on purpose")
        check(backend.current_stream() == outer, "after an exception the stream did not return")
    check(backend.current_stream() == before, "the first stream did not return")


def current_per_thread(context: Context) -> None:
    """A thread's stream is its own: none begins with another's, none changes another's."""
    backend = context.backend
    mine, theirs = backend.stream(), backend.stream()
    entered, leave = threading.Event(), threading.Event()

    def other() -> bool:
        begun = backend.current_stream()
        with backend.use_stream(theirs):
            entered.set()
            leave.wait(PATIENCE_S)
            return begun != mine and backend.current_stream() == theirs

    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(in_thread(other)))
    with backend.use_stream(mine):
        thread.start()
        entered.wait(PATIENCE_S)
        kept = backend.current_stream() == mine
        leave.set()
        thread.join()
    check(kept, "another thread's use_stream() changed the stream of this one")
    if answers != [True]:
        raise CheckFailedError("a thread began with, or lost its stream to, another thread's")


def streams_differ(context: Context) -> None:
    """Two new streams are two, and neither is the current one."""
    backend = context.backend
    first, second = backend.stream(), backend.stream()
    check(first != second, "two calls of stream() gave one stream")
    check(backend.current_stream() not in (first, second), "stream() gave the current stream")
    check(first == first, "a stream is not equal to itself")


WAITS: dict[str, Callable[..., Any]] = {
    "event.wait": lambda race, event, stream: event.wait(stream),
    "wait_event": lambda race, event, stream: stream.wait_event(event),
    "wait_stream": lambda race, event, stream: stream.wait_stream(race.stream),
}
HOST_WAITS: dict[str, tuple[str, Callable[[Race], Any]]] = {
    "event.synchronize": ("event.synchronize()", lambda race: race.event().synchronize()),
    "stream.synchronize": ("stream.synchronize()", until_idle),
    # Whichever stream is current; and the work that another thread has queued.
    "synchronize": ("backend.synchronize()", lambda race: race.backend.synchronize()),
    "synchronize.thread": (
        "synchronize() in another thread", lambda race: in_thread(race.backend.synchronize)
    ),
    "event.query": (
        "event.query() was True", lambda race: wait_until(race.event().query, "event.query()")
    ),
    "stream.query": (
        "stream.query() was True", lambda race: wait_until(race.stream.query, "stream.query()")
    ),
}  # fmt: skip
QUESTIONS: dict[str, Callable[[Context], None]] = {
    "order": in_order,
    **{name: partial(wait_holds_stream, what=f"{name}()", wait=w) for name, w in WAITS.items()},
    "wait_stream.current": current_waits,
    "event.again": last_record_counts,
    "event.waiters": two_waiters,
    "event.moved": wait_is_for_this_record,
    "chain": chain,
    "operators": operator_on_stream,
    "operators.apart": operators_apart,
    "copy": copy_on_stream,
    **{name: partial(host_waits, what=what, wait=w) for name, (what, w) in HOST_WAITS.items()},
    "unrecorded": unrecorded,
    "elapsed": elapsed,
    "use_stream": use_stream_restores,
    "threads": current_per_thread,
    "apart": streams_differ,
}
