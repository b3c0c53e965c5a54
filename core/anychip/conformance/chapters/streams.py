"""Are streams and events what orders the work, and nothing else?

Work on one stream is in order. A stream that waits for an event, or for a stream, sees what was
written before; so does the host after it has waited; and a query says done when it is done. Each
question is a race: writes on one stream, and a read that comes too soon unless the wait under test
holds it back. Each write is long, so that a wait that misses the last one loses. On a chip whose
streams are not really asynchronous such a case cannot fail. How long a write takes is measured
first, since a race that is over at once shows nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from anychip import ops
from anychip.conformance import races
from anychip.conformance.case import Case, Context, check, check_equal_bits
from anychip.conformance.races import READ, WRITES, Race, race_size, wait_until
from anychip.conformance.surroundings import again, in_thread
from anychip.contract import HOST

TIMES, SHORT = 8, 2
"""How often one event is used, each time behind so many writes."""
PATIENT_MS = {"quick": 1200.0, "full": 6000.0}
"""How long everybody has to be able to wait, as far as a stream takes so much work at once."""
DEEP = {"quick": 1500, "full": 5000}
"""Pieces of work that wait at once: more than a ring of 1024 has places."""


def cases(context: Context) -> Iterator[Case]:
    """Where the backend declares streams."""
    asked = [Case(id=f"streams/{n}", run=q, capability="streams") for n, q in QUESTIONS.items()]
    yield from asked
    yield from again("streams", asked, ONCE)


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
    for how, record in (races.RECORDS if "event" in what else races.NO_RECORD).items():
        race = Race(context)
        event = record(race)
        wait(race, event, race.reader)
        found = [race.read_on()]
        wait(race, event, race.backend.current_stream())
        found.append(race.read())
        for reader, result in zip(("a new stream", "the first stream"), found, strict=True):
            race.check(f"read on {reader} behind {what} ({how})", result)
    race = Race(context, context.backend.current_stream()).start()
    wait(race, race.event(), race.reader)
    race.check(f"read on a new stream behind {what} of the first stream", race.read_on())


def two_waiters(context: Context) -> None:
    """Two streams wait for one event; and one of them for a second event, of a stream long done."""
    race = Race(context)
    readers, done = [race.reader, race.backend.stream()], race.backend.event()
    done.record(race.idle)
    event = race.start().event()
    found = []
    for reader in readers:
        reader.wait_event(event)
        reader.wait_event(done)
        found.append(race.read_on(reader))
    del event, done  # whoever waits needs them no more
    for number, result in enumerate(found):
        race.check(f"read behind two events, by stream {number} of two", result)


def waiters_anew(context: Context) -> None:
    """One stream after the other waits for one event; each may have the handle of the last one."""
    race = Race(context)
    event, found = race.start().event(), list[list[Tensor]]()
    for number in range(5):
        reader = race.backend.stream()
        event.wait(reader)
        if number != 2:  # which goes as it has come
            found.append(race.read_on(reader))
        del reader
    for number, result in enumerate(found):
        race.check(f"read behind one event, by stream {number} of several", result)


def event_let_go(context: Context) -> None:
    """A stream that is told to wait needs no event: nobody holds it when the stream comes to it."""
    for name in ("event.wait", "wait_event"):
        busy, race = Race(context).start(), Race(context).start().start().start()
        WAITS[name](race, race.event(), busy.stream)
        what = f"read behind {name}() of an event that was let go"
        race.check(what, race.read_on(busy.stream), 3.0 * race.want)


def wait_is_for_this_record(context: Context) -> None:
    """A wait stands for the record at hand: one that comes later, elsewhere, changes nothing."""
    busy, race = Race(context), Race(context)
    busy.start()
    event = race.start().start().start().event()  # done after the other one, which waits for it
    event.wait(busy.stream)
    event.record(race.idle)
    found = race.read_on(busy.stream)
    what = "read behind an event that was recorded on an idle stream later"
    race.check(what, found, 3.0 * race.want)


def deep(context: Context) -> None:
    """A busy stream takes all that it is given, and loses nothing."""
    race, count = Race(context).start(4 * WRITES), DEEP[context.level]
    with race.backend.use_stream(race.stream):
        for _ in range(count):
            race.x[-READ:].add_(1.0)
    wait_until(race.stream.query, "stream.query()")  # an event could be lost as well
    race.check(f"read behind {count} small writes", race.read(), 4.0 * race.want + count)


def two_threads(context: Context) -> None:
    """Two threads give one stream work at once: it has all of it to do, and the host waits."""
    race, count = Race(context).start(), DEEP[context.level] // 5

    def add(part: Tensor) -> None:
        with race.backend.use_stream(race.stream):
            for _ in range(count):
                part.add_(1.0)

    parts = race.x[-READ:].split(READ // 2)
    threads = [threading.Thread(target=add, args=[part]) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    race.stream.synchronize()
    race.check(f"read behind {count} writes of each of two threads", race.read(), race.want + count)


def in_turn(context: Context) -> None:
    """Two streams that wait for each other in turn: for what was queued before, not for later."""
    race = Race(context).start()
    for _ in range(3):
        race.reader.wait_stream(race.stream)
        with race.backend.use_stream(race.reader):
            race.x.mul_(2.0)
        race.stream.wait_stream(race.reader)
        with race.backend.use_stream(race.stream):
            race.x.add_(1.0)
    for stream in (race.stream, race.reader):
        wait_until(stream.query, "stream.query() of two that wait for each other")
    race.check("read behind two streams in turn", race.read(), 8.0 * race.want + 7.0)


def many_streams(context: Context) -> None:
    """synchronize() waits for every one of many streams: the first takes longest."""
    race = Race(context)
    others = [race.backend.stream() for _ in range(70)]
    for stream in others:
        with race.backend.use_stream(stream):
            torch.ones(1, device=race.x.device)
    race.start()
    race.backend.synchronize()
    race.check("read after synchronize() of 71 streams", race.read())


def of_another_device(context: Context) -> None:
    """A stream is of the device that it was made for, whichever one is current."""
    backend, last = context.backend, context.backend.device_count() - 1
    stream = backend.stream(last)
    x = torch.zeros(race_size(context), device=backend.device(last))
    backend.synchronize(last)
    with backend.use_stream(stream):
        for _ in range(WRITES):
            x += 1.0
    backend.synchronize(last)
    want = torch.full((READ,), float(WRITES))
    check_equal_bits(f"read after synchronize({last})", x[-READ:].cpu(), want)
    before = backend.current_device()
    with suppress(KeyError), backend.use_stream(stream):
        raise KeyError("on purpose")
    after = backend.current_device()
    check(after == before, f"device {after} is current after a block on a stream of {last}")


def large_reads(context: Context) -> None:
    """The host that reads much waits for the current stream too."""
    for name in ("host", "to", "numpy", "tolist"):
        race = Race(context).start()
        with race.backend.use_stream(race.stream):
            found = races.HOST_READS[name](race.x[-(1 << 18) :])
        wrong = int((torch.as_tensor(found) != race.want).sum())
        check(wrong == 0, f"{name} of much: {wrong} of {len(found)} numbers are from before")


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
    race.check("read at the end of a chain", race.read_on(before), 8.0 * race.want + 7.0)


def operator_on_stream(context: Context) -> None:
    """Operators of ours run on the current stream, behind what is queued there."""
    weight = torch.ones(READ, device=context.device)
    race = Race(context).start()  # which has waited for the weight
    context.call = "ops.gelu(x) and others behind long writes of x on a stream"
    with race.backend.use_stream(race.stream):
        results = _several(race.x[-READ:].view(1, -1), weight)
    race.backend.synchronize()
    wanted = _several(torch.full((1, READ), race.want, device=context.device), weight)
    for name, got, want in zip(("gelu", "rms_norm", "softmax"), results, wanted, strict=True):
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


def copy_on_stream(context: Context, *, current: bool) -> None:
    """A copy is work of its stream: behind what was queued, and done where its event is.

    To the device, from it, on it and within one tensor; of one element, of a number that no vector
    has, with gaps, of much, and to and from other dtypes.
    """
    for name, part, dtype in races.PARTS:
        race = Race(context)
        count = race.x[part].numel()
        source = torch.arange(2, count + 2, dtype=dtype)
        kept, there = source.clone(), torch.zeros(count, dtype=dtype, device=context.device)
        back, late = torch.zeros(2, count, dtype=dtype)
        within = race.x[: count if count <= race.x.numel() // 2 else 0]
        last = slice(count - within.numel(), None)
        pairs = [(back, race.x[part]), (there, race.x[part]), (race.x[part], source),
                 (within, race.x[part][last]), (late, race.x[part])]  # fmt: skip
        race.backend.synchronize()  # or zeros of the current stream may come last
        race.start()
        for target, given in pairs:
            if current:
                with race.backend.use_stream(race.stream):
                    race.backend.memory.copy_async(target, given)
            else:
                race.backend.memory.copy_async(target, given, race.stream)
        event = race.event()
        event.wait(race.reader)
        with race.backend.use_stream(race.reader):
            twin = there + 0
        event.synchronize()
        found = [back.clone(), late.clone()]
        source.fill_(-1.0)  # the stream has passed the copies
        race.settle()
        want = torch.full((count,), race.want, dtype=dtype)
        check_equal_bits(f"copied to the host behind the writes, {name}", found[0], want)
        check_equal_bits(f"copied on the device, {name}", twin.cpu(), want)
        check_equal_bits(f"copied to the device, {name}", race.x[part].cpu(), kept.float())
        check_equal_bits(f"copied within one tensor, {name}", within.cpu(), kept.float()[last])
        check_equal_bits(f"copied to the host behind that, {name}", found[1], kept)


def copied_by_its_event(context: Context) -> None:
    """An event behind a long copy is not done before it, though nothing else is between them."""
    source = torch.full((1 << 21,), 7.0, device=context.device)
    kept = source.cpu()
    for to in (HOST, context.device):
        target = torch.zeros(1 << 21, device=to)
        race = Race(context)  # which has waited for the zeros
        race.backend.memory.copy_async(target, source, race.start(1).stream)
        event = race.event()
        event.synchronize()
        found = target[-READ:].clone()  # at once
        race.settle()
        check_equal_bits(f"copied to {to}, read after its event", found.cpu(), kept[-READ:])


def copied_is_kept(context: Context) -> None:
    """A copy holds its source: memory that its last holder lets go of is not used again before."""

    def on_device(numel: int) -> Tensor:
        return torch.empty(numel, device=context.device)

    def pinned(numel: int) -> Tensor:
        return context.backend.memory.pinned(4 * numel).view(torch.float32)

    has_pinned = "pinned_memory" in context.backend.capabilities
    makers = (on_device, pinned) if has_pinned else (on_device,)
    for make, start in product(makers, (0, 64)):  # of a part, too
        race = Race(context).start()
        target = torch.zeros(READ, device=context.device)
        source = make(start + READ).fill_(7.0)
        source = source[start:] if start else source
        race.stream.wait_stream(race.backend.current_stream())
        race.backend.memory.copy_async(target, source, race.stream)
        del source
        others = [make(start + READ).fill_(-1.0) for _ in range(8)]
        race.settle()
        del others
        what = f"copied from what was let go, {make.__name__}, from element {start} on"
        check_equal_bits(what, target.cpu(), torch.full((READ,), 7.0))


def let_go(context: Context) -> None:
    """Queued work is done, and waited for, if an exception ends its block and nobody holds it."""
    race = Race(context)
    with suppress(KeyError), race.backend.use_stream(race.stream):
        race.start()
        raise KeyError("on purpose")
    race.stream = race.idle
    race.backend.synchronize()
    race.check("read after an exception, and synchronize() without the stream", race.read())


def host_waits(
    context: Context, *, what: str, wait: Callable[..., Any], thread: bool = False
) -> None:
    """After the host has waited, what was recorded is done, for whoever looks."""
    for how, record in (races.RECORDS if "event" in what else races.NO_RECORD).items():
        race = Race(context)
        event = record(race)
        call = partial(wait, race, event)
        in_thread(call) if thread else call()
        first = race.read()
        check(event.query() is True, f"event.query() is not True after {what}")
        race.check(f"read after {what} ({how})", first)
        race.check(f"read on another stream after {what} ({how})", race.read_on())
    race = Race(context, context.backend.current_stream()).start()
    call = partial(wait, race, race.event())
    in_thread(call) if thread else call()
    race.check(f"read on another stream after {what} of the first stream", race.read_on())


def until_idle(race: Race, _: torch.Event) -> None:
    """After stream.synchronize() the stream is idle."""
    race.stream.synchronize()
    check(race.stream.query() is True, "stream.query() is not True after stream.synchronize()")


def host_reads(context: Context, *, what: str, read: Callable[[Tensor], Any]) -> None:
    """The host that reads a tensor waits for the current stream, in whatever way it reads."""
    race = Race(context).start()
    with race.backend.use_stream(race.stream):
        found = read(race.x[-3:])
    both = found, read(torch.full((3,), race.want, device=context.device))
    found, want = (each.tolist() if hasattr(each, "tolist") else each for each in both)
    check(found == want, f"{what} behind the writes: {want!r} expected, got {found!r}")


def patience(context: Context) -> None:
    """Nobody gives up: streams and the host wait for long work, all of them at once."""
    race = Race(context).start()
    race.backend.synchronize()
    begin = time.perf_counter()
    race.start().backend.synchronize()
    took = (time.perf_counter() - begin) * 1000
    count = WRITES * min(max(1, int(PATIENT_MS[context.level] / took)), 100)
    event = race.start(count).event()
    found: dict[str, list[Tensor]] = {}

    def look(name: str, wait: Callable[..., Any]) -> None:
        wait(race, event)
        found[name] = race.read()

    for name, hold in WAITS.items():
        reader = race.backend.stream()
        hold(race, event, reader)
        found[name] = race.read_on(reader)
    threads = [threading.Thread(target=look, args=each) for each in HOST_WAITS.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in (*WAITS, *HOST_WAITS):
        check(name in found, f"{name} ended in an exception")
        race.check(f"read after {name} of {count} writes", found[name], 2 * race.want + count)


def used_often(context: Context, *, what: str, wait: Callable[..., Any]) -> None:
    """The same event and streams, used again and again: each time like the first."""
    race = Race(context)
    readers = [race.reader] if what in WAITS else []
    start, event, first = (race.backend.event(timing=True) for _ in range(3))
    first.record(race.stream)
    last = 0.0
    for number in range(1, TIMES + 1):
        begin = time.perf_counter()
        start.record(race.stream)
        race.start(SHORT)
        event.record(race.stream)
        wait(race, event, *readers)
        found = race.read_on() if readers else race.read()
        race.check(f"read after {what}, time {number} of one event", found, number * float(SHORT))
        check(event.query() is True, f"query() is not True after the work, time {number}")
        took, host = start.elapsed_time(event), (time.perf_counter() - begin) * 1000
        check(0.0 < took <= 1.1 * host + 1.0, f"{took} ms, time {number}, of {host:.3g} ms")
        check(start.elapsed_time(event) == took, "elapsed_time() has another answer when repeated")
        since = first.elapsed_time(event)
        check(since > last, f"recorded again, after {last:.3g} ms, an event is at {since:.3g} ms")
        last = since


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
    """elapsed_time(): milliseconds that add up, those that the host has seen; after any wait."""
    for name, wait in HOST_WAITS.items():
        race = Race(context)
        events = [race.backend.event(timing=True) for _ in range(3)]
        begin = time.perf_counter()
        events[0].record(race.stream)
        for event in events[1:]:
            race.start()
            event.record(race.stream)
        wait(race, events[-1])
        host = (time.perf_counter() - begin) * 1000
        start, middle, end = events
        found = start.elapsed_time(end)
        check(isinstance(found, float), f"elapsed_time(): a float expected, got {found!r}")
        what = f"elapsed_time() of work of {host:.3g} ms, those of the host by {name}"
        check(0.1 * host <= found <= 1.1 * host + 1.0, f"{what}: {found:.3g} ms")
        parts = [start.elapsed_time(middle), middle.elapsed_time(end)]
        check(min(parts) > 0.0, f"work between events took {parts} ms")
        apart = abs(sum(parts) - found)
        check(apart <= 0.05 + 1e-3 * found, f"{parts} ms one after the other are {found} ms")
        check(start.elapsed_time(start) == 0.0, "an event is 0 ms after itself")
        with race.backend.use_stream(race.reader):
            check(start.elapsed_time(end) == found, "while another stream is current it differs")
        across = race.backend.event(timing=True)
        across.record(race.backend.stream())  # after all of the work, which the host has waited for
        across.synchronize()
        took, host = start.elapsed_time(across), (time.perf_counter() - begin) * 1000
        what = f"an event of another stream is {took:.3g} ms after the first"
        check(found - 0.05 <= took <= 1.1 * host + 1.0, f"{what}, {found:.3g} to {host:.3g}")


def use_stream_restores(context: Context) -> None:
    """Blocks nest, and an exception leaves one like its end does; so does a key press."""
    backend, before = context.backend, context.backend.current_stream()
    streams = (before, backend.stream(), backend.stream())
    errors = KeyError, KeyboardInterrupt
    for outer, inner, error in product(streams, streams, errors):  # also one within itself
        with backend.use_stream(outer):
            with backend.use_stream(inner):
                with suppress(error), backend.use_stream(outer):
                    raise error("on purpose")
                check(backend.current_stream() == inner, "after an exception no stream returned")
            check(backend.current_stream() == outer, "the outer stream did not return")
        check(backend.current_stream() == before, "the first stream did not return")


def current_per_thread(context: Context) -> None:
    """A thread's stream is its own: none begins with another's, none changes another's."""
    backend = context.backend
    mine, theirs, shared = (backend.stream() for _ in range(3))
    entered, leave = threading.Event(), threading.Event()

    def other() -> bool:
        begun = backend.current_stream()
        with backend.use_stream(theirs):
            with backend.use_stream(shared):  # where the other thread is, and which it leaves first
                entered.set()
                leave.wait(races.PATIENCE_S)
            return begun not in (mine, shared) and backend.current_stream() == theirs

    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(in_thread(other)))
    with backend.use_stream(mine):
        with backend.use_stream(shared):
            thread.start()
            entered.wait(races.PATIENCE_S)
        kept = backend.current_stream() == mine
        leave.set()
        thread.join()
    check(kept, "another thread's use_stream() changed the stream of this one")
    check(answers == [True], "a thread began with, or lost its stream to, another thread's")


WAITS: dict[str, Callable[..., Any]] = {
    "event.wait": lambda race, event, stream: event.wait(stream),
    "wait_event": lambda race, event, stream: stream.wait_event(event),
    "wait_stream": lambda race, event, stream: stream.wait_stream(race.stream),
}
IN_THREAD: dict[str, Callable[..., Any]] = {
    f"{n}.thread": lambda *given, wait=wait: in_thread(partial(wait, *given))
    for n, wait in WAITS.items()
}
HOST_WAITS: dict[str, Callable[[Race, torch.Event], Any]] = {
    "event.synchronize": lambda race, event: event.synchronize(),
    "stream.synchronize": until_idle,
    # Whichever stream is current; and the work that another thread has queued.
    "synchronize": lambda race, event: race.backend.synchronize(),
    "synchronize.index": lambda race, _: race.backend.synchronize(race.backend.current_device()),
    "event.query": lambda race, event: wait_until(event.query, "event.query()"),
    "stream.query": lambda race, event: wait_until(race.stream.query, "stream.query()"),
}
QUESTIONS: dict[str, Callable[[Context], None]] = {
    "order": in_order,
    **{
        name: partial(wait_holds_stream, what=f"{name}()", wait=wait)
        for name, wait in (WAITS | IN_THREAD).items()
    },
    "event.waiters.anew": waiters_anew,
    "event.waiters": two_waiters,
    "event.moved": wait_is_for_this_record,
    "event.let_go": event_let_go,
    "deep": deep,
    "chain": chain,
    "shared": two_threads,
    "in_turn": in_turn,
    "many": many_streams,
    "of_device": of_another_device,
    "read.large": large_reads,
    "operators": operator_on_stream,
    "operators.apart": operators_apart,
    "copy": partial(copy_on_stream, current=False),
    "copy.current": partial(copy_on_stream, current=True),
    "copy.kept": copied_is_kept,
    "copy.event": copied_by_its_event,
    **{n: partial(host_waits, what=f"{n}()", wait=w) for n, w in HOST_WAITS.items()},
    **{
        f"{n}.thread": partial(host_waits, what=f"{n}() in a thread", wait=w, thread=True)
        for n, w in HOST_WAITS.items()
    },
    **{f"read.{n}": partial(host_reads, what=n, read=r) for n, r in races.HOST_READS.items()},
    **{f"often.{n}": partial(used_often, what=n, wait=w) for n, w in (WAITS | HOST_WAITS).items()},
    "let_go": let_go,
    "patience": patience,
    "unrecorded": unrecorded,
    "elapsed": elapsed,
    "use_stream": use_stream_restores,
    "threads": current_per_thread,
}
ONCE = {f"streams/{name}" for name in (
    "deep", "patience", "elapsed", *WAITS, *IN_THREAD, *HOST_WAITS,
    *(f"{name}.thread" for name in HOST_WAITS),
)}  # fmt: skip
"""What ``often`` asks too, and long work: they are not asked again from elsewhere."""
