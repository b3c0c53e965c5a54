"""Does every method of the device part do what its docstring says?

Types, the range of indices, what is current in which thread, waiting, properties, that operators
work on every device, and that what is not declared says so. Graphs are in :mod:`.graphs`.
"""

import contextvars
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from anychip.conformance.case import Case, Context, check, check_equal_bits, expect_error
from anychip.conformance.chapters import graphs
from anychip.conformance.oracles import oracle_of
from anychip.conformance.surroundings import again, in_thread
from anychip.conformance.trial import Trial
from anychip.contract import (
    API_VERSION,
    HOST,
    Backend,
    DeviceProperties,
    OperatorTable,
    Probe,
    UnsupportedError,
)
from anychip.dispatch import selection
from anychip.dispatch.operator import registered
from anychip.runtime import table_faults

T = TypeVar("T")
ROWS = "device/rows"
"""The case that every run has where it fails."""
ONCE = {ROWS, "device/operators"}
"""What the operators chapter asks from elsewhere, and what does not depend on the place."""
OUT_OF_RANGE: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "negative": lambda count: (-1, -count, -(2**32)),
    "beyond": lambda count: (count, count + 1, 127, 2**31, 2**32, 2**64),
    "float": lambda count: (0.5, 0.0, float(count - 1)),
    "text": lambda count: ("0", "", b"0"),
    "bool": lambda count: (False, True),
    "numpy": lambda count: (np.int64(-1), np.int32(count), np.float64(0)),
}
"""What is no index of a device, by how many there are. A numpy integer within is asked apart."""
LEAST_BYTES = 1 << 24
"""Of a device's memory: this suite needs more."""
LOWEST_RATE = 1e6
"""Bytes or operations per second below which a figure has another unit."""


def cases(context: Context) -> Iterator[Case]:
    """A case per question; index questions per method; and all of them again from elsewhere."""
    asked = list(of_methods())
    yield from asked
    yield from again("device", asked, ONCE)
    yield from graphs.cases(context)
    for capability, calls in GROUPS.items():
        if capability not in context.backend.capabilities:
            for name, method_call in calls.items():
                bound = partial(check_undeclared, capability=capability, call=method_call)
                yield Case(id=f"device/undeclared/{name}", run=bound)
    # Both import the compiler, which takes longer than the rest of this chapter.
    yield Case(id="device/compile_backend", run=compile_backend, full=True)
    yield Case(id="device/compile", run=compile_runs, full=True)


def of_methods() -> Iterator[Case]:
    """What is asked about one method after the other, and of some about the first calls of all."""
    yield Case(id="device/first-answers", run=first_answers)
    yield Case(id="device/first-calls", run=first_calls, capability="streams")
    for name, run in PLAIN.items():
        yield Case(id=f"device/{name}", run=run)
    for method, (call, capability) in INDEXED.items():
        for label, wrong in OUT_OF_RANGE.items():
            run = partial(check_range, call=call, wrong=wrong)
            yield Case(id=f"device/index/{method}.{label}", run=run, capability=capability)
        run = partial(check_every_index, call=call)
        yield Case(id=f"device/index/{method}.every", run=run, capability=capability)
    yield Case(id="device/stream_types", run=stream_types, capability="streams")


# Class attributes and probe


def identity(context: Context) -> None:
    """Names, versions and tables have the types that the contract names."""
    backend = context.backend
    for name, kind in (("name", str), ("device_type", str), ("operators", OperatorTable)):
        value = getattr(backend, name)
        check(isinstance(value, kind), f"{name}: {kind.__name__} expected, got {value!r}")
    check(
        backend.c10d_backend is None or isinstance(backend.c10d_backend, str),
        f"c10d_backend: str or None expected, got {backend.c10d_backend!r}",
    )
    check(
        backend.api[0] == API_VERSION[0] and backend.api[1] <= API_VERSION[1],
        f"api {backend.api} does not fit {API_VERSION}",
    )
    text = backend.identity()
    check(
        isinstance(text, str) and text and "\n" not in text, f"identity(): one line, got {text!r}"
    )


def rows(context: Context) -> None:
    """Every row, of packs too, fits its operator: a misspelt one serves nobody, and nobody asks."""
    found = row_faults(context.backend)
    check(not found, "rows that serve nobody:\n" + "\n".join(found))


def row_faults(backend: Backend) -> list[str]:
    """What is wrong with the tables that serve the backend's devices."""
    providers = selection.providers_for(backend.device_type)
    return table_faults(provider.table for provider in providers)


def capabilities(context: Context) -> None:
    """Names of groups that exist, with a version each; memory_peak is about memory_stats."""
    declared = context.backend.capabilities
    for name, version in declared.items():
        check(type(version) is int and version >= 1, f"{name}: a version >= 1, got {version!r}")
    if "memory_peak" in declared:
        check("memory_stats" in declared, "memory_peak is declared, and memory_stats is not")


def probe(context: Context) -> None:
    """It runs, so it says ready, with as many devices as there are; and it says so twice."""
    answers = [context.backend.probe() for _ in range(2)]
    for answer in answers:
        check(isinstance(answer, Probe), f"a Probe expected, got {answer!r}")
        check(answer.status == "ready", f"it runs, and says {answer.status}: {answer.reason}")
        count = context.backend.device_count()
        check(answer.device_count == count, f"{answer.device_count} probed, {count} counted")
        kind = "host" if context.backend.is_host else "accelerator"
        check(answer.kind == kind, f"a ready {kind} expected, got {answer.kind!r}")
        text = answer.reason
        check(isinstance(text, str) and "\n" not in text, f"reason: one line, got {text!r}")


# Devices


def device_count(context: Context) -> None:
    """An int of at least 1 on a backend that runs; the same on every call."""
    count = exactly(int, "device_count()", context.backend.device_count())
    check(count >= 1, f"at least 1 expected, got {count}")
    check(count == context.backend.device_count(), "the number of devices changes between calls")


def device(context: Context) -> None:
    """A torch.device of the backend's type; without an index the current one."""
    backend = context.backend
    current = exactly(torch.device, "device()", backend.device())
    check(current.type == backend.device_type, f"type {backend.device_type!r}, got {current}")
    for index in range(backend.device_count()):
        found = exactly(torch.device, f"device({index})", backend.device(index))
        only = backend.device_count() == 1 and found.index is None
        check(found.type == backend.device_type and (found.index == index or only), f"got {found}")
    check(current == backend.device(backend.current_device()), f"device() is {current}")


def current_device(context: Context) -> None:
    """An int, never text or a torch.device; what set_device said; asking does not move it."""
    backend, every = context.backend, range(context.backend.device_count())
    before = exactly(int, "current_device()", backend.current_device())
    refused = partial(expect_error, torch.OutOfMemoryError, "more bytes than any device has")
    asked: dict[str, Callable[[], object]] = {
        "itself": lambda: None, "properties": backend.properties, "probe": backend.probe,
        "identity": backend.identity, "device": lambda: backend.device(0),
        "synchronize": lambda: backend.synchronize(0),
        "refusals": lambda: [refused(backend.memory.allocate, 5 * 2**56, i) for i in every],
    }  # fmt: skip
    try:
        for index, (name, call) in itertools.product(every, asked.items()):
            result: Any = backend.set_device(index)  # type: ignore[func-returns-value]
            check(result is None, f"set_device returns None, got {result!r}")
            call()
            found = exactly(int, "current_device()", backend.current_device())
            check(found == index, f"set_device({index}), then {name}: current_device() is {found}")
        # As a task does it: a thread has one current device, whatever its context is.
        contextvars.copy_context().run(backend.set_device, every[0])
        found = backend.current_device()
        check(found == every[0], f"set_device({every[0]}) in a context, and after it: {found}")
    finally:
        backend.set_device(before)


def new_thread(context: Context) -> None:
    """A new thread starts at device 0, and what it sets is its own."""
    backend = context.backend

    def start_and_set() -> int:
        started = backend.current_device()
        backend.set_device(0)
        return started

    last = backend.device_count() - 1
    before = backend.current_device()
    backend.set_device(last)
    try:
        started = in_thread(start_and_set)
        check(exactly(int, "current_device() in a thread", started) == 0, f"got {started}")
        moved = backend.current_device()
        check(moved == last, f"a thread's set_device(0) moved this thread from {last} to {moved}")
        # Threads that have ended leave their numbers to new ones, and nothing else.
        for _ in range(4):
            in_thread(lambda: backend.set_device(last))
        later = [in_thread(backend.current_device) for _ in range(4)]
        check(not any(later), f"after threads that set device {last}, new ones start at {later}")
    finally:
        backend.set_device(before)


def any_thread(context: Context) -> None:
    """Methods answer in another thread as they do here."""
    backend = context.backend

    def answers() -> list[Any]:
        every = range(backend.device_count())
        found = [(backend.device(i), backend.properties(i), backend.memory.info(i).total)
                 for i in every]  # fmt: skip
        return [len(every), backend.identity(), backend.probe().status, found]

    there, here = in_thread(answers), answers()
    check(there == here, f"{here} expected in a new thread, got {there}")


def first_calls(context: Context) -> None:
    """New events are as many, and once the device was waited for nothing is left to do before one;
    new streams are as many, and none is the current one.
    """
    backend, times = context.backend, range(16)
    events = [backend.event() for _ in times]
    check(len({id(event) for event in events}) == len(times), "two calls of event() gave one event")
    x = torch.zeros(1 << 16, device=context.device)
    for number, event in enumerate(events):
        for _ in times:
            x += 1.0
        event.record(backend.current_stream())
        backend.synchronize()
        check(event.query() is True, f"call {number + 1} of synchronize() came back too soon")
    made = [backend.stream() for _ in range(8)]
    for place, stream in enumerate(made):
        check(stream == stream, "a stream is not equal to itself")
        check(stream not in made[:place], f"two of {len(made)} calls of stream() gave one stream")
    check(backend.current_stream() not in made, "stream() gave the current stream")


def first_answers(context: Context) -> None:
    """The first answers of all follow what changes: none is that of the call before.

    So what is allocated, a generator's state, the current stream, and which device None means: by
    an index and by None, on a stream and on none, of one device and another.
    """
    backend, count = context.backend, context.backend.device_count()
    before, streams = backend.current_device(), "streams" in backend.capabilities
    try:
        for number in range(16):
            place = number % count
            backend.set_device(place)
            index = place if number // count % 2 else None
            context.call = f"round {number + 1}, device {place}, asked for {index}"
            check(backend.current_device() == place, f"the current device is not {place}")
            plain = backend.current_stream(index) if streams else None
            with ExitStack() as on_stream:
                if streams and number % 4 > 1:
                    stream = backend.stream()
                    on_stream.enter_context(backend.use_stream(stream))
                    check(backend.current_stream(index) == stream, "another stream is current")
                backend.device(count - 1 - place)
                found = backend.device(index)
                check(found.index in (place, None), f"device({index}) is {found}")
                _follows(backend, index)
            if streams:
                same = backend.current_stream(index) == plain
                check(same, "behind a block with another stream that one is still current")
    finally:
        backend.set_device(before)


def _follows(backend: Backend, index: int | None) -> None:
    """What is allocated grows and falls; a generator whose state is put back repeats itself, and
    so does a new one of the same seed alone.
    """
    nbytes, held, device = 8 << 20, list[torch.UntypedStorage](), backend.device(index)
    if "memory_stats" in backend.capabilities:
        start = backend.memory.stats(index).allocated
        for blocks in (1, 2, 1, 0):
            held = held[:blocks]
            held += [backend.memory.allocate(nbytes, index) for _ in range(blocks - len(held))]
            found = backend.memory.stats(index).allocated - start
            right = blocks * nbytes - nbytes // 2 < found < 2 * blocks * nbytes + nbytes // 2
            check(right, f"{blocks} blocks of {nbytes} bytes, `allocated` is {found} higher")
    states, drawn = list[torch.Tensor](), list[torch.Tensor]()
    for _ in range(2):
        states.append(backend.random_state(index))
        drawn.append(torch.rand(8, device=device).cpu())
    check(not torch.equal(*states), "a generator was drawn from, and its state is the same")
    for state, numbers in reversed([*zip(states, drawn, strict=True)]):  # not as it comes anyway
        backend.set_random_state(state, index)
        check_equal_bits("a state put back", torch.rand(8, device=device).cpu(), numbers)
    seeds = (5 + (1 << 41), 6 + (1 << 40)) * 2  # a host draws by the lower halves alone
    made = [backend.generator(seed, index) for seed in seeds]
    for seed, generator in zip(seeds, made, strict=True):
        known = generator.initial_seed()
        check(known == seed, f"generator({seed}).initial_seed() is {known}")
    one, other, *again = (torch.rand(8, generator=g, device=device).cpu() for g in made)
    check(not torch.equal(one, other), f"generators of {seeds[0]} and {seeds[1]} give the same")
    for seed, first, second in zip(seeds, (one, other), again, strict=False):
        check_equal_bits(f"a second generator of {seed}", second, first)


def synchronize(context: Context) -> None:
    """Returns None, and afterwards queued work is done."""
    x = torch.arange(1 << 16, dtype=torch.float32, device=context.device)
    for _ in range(20):
        x = x + 1.0
    result: Any = context.backend.synchronize()  # type: ignore[func-returns-value]
    check(result is None, f"None expected, got {result!r}")
    want = torch.arange(1 << 16, dtype=torch.float32) + 20.0
    check_equal_bits("20 additions", x, want.to(context.device))


def operators_everywhere(context: Context) -> None:
    """Operators give the same bits on every device: a small call of each that is bitwise."""
    backend = context.backend
    before = backend.current_device()
    try:
        for name, operator in registered().items():
            if operator.spec.determinism != "bitwise":
                continue
            call = oracle_of(operator.spec).plain[0]
            trial = Trial(operator, call, torch.float32, context.seed)
            found = []
            for index in range(backend.device_count()):
                backend.set_device(index)
                there = Context(backend, context.level, context.seed)
                found.append([y.cpu() for y in trial.run(trial.place(there))])
                context.call = f"{there.told(there.call)} on device {index}"
            for index, results in enumerate(found[1:], 1):
                for y, got, want in zip(trial.names(), results, found[0], strict=True):
                    check_equal_bits(f"{y} of {name} on device {index} and 0", got, want)
    finally:
        backend.set_device(before)


def properties(context: Context) -> None:
    """Types and plausibility; the same answer twice."""
    for index in (None, *range(context.backend.device_count())):
        known = context.backend.properties(index)
        check(isinstance(known, DeviceProperties), f"DeviceProperties expected, got {known!r}")
        check(isinstance(known.name, str) and known.name, f"a name expected, got {known.name!r}")
        total = exactly(int, "total_memory", known.total_memory)
        check(total >= LEAST_BYTES, f"total_memory is in bytes, got {total}")
        check(isinstance(known.dtypes, frozenset), f"dtypes: a frozenset, got {known.dtypes!r}")
        check(torch.float32 in known.dtypes, "every backend computes in float32")
        check(all(d.is_floating_point for d in known.dtypes), f"not only floats: {known.dtypes}")
        rates = (*known.flops.values(), known.bandwidth, known.link_bandwidth)
        for rate in rates:
            right = rate is None or LOWEST_RATE <= rate < float("inf")
            check(right, f"a rate is in bytes or operations per second or None, got {rate!r}")
        for dtype in known.flops:
            check(isinstance(dtype, torch.dtype), f"flops are by torch.dtype, got {dtype!r}")
        check(context.backend.properties(index) == known, "two calls give two answers")


def dtypes_work(context: Context) -> None:
    """torch computes on the device in every dtype that it claims."""
    for dtype in sorted(context.backend.properties().dtypes, key=str):
        x = torch.arange(1, 9, device=context.device).to(dtype)
        check_equal_bits(f"x * x in {dtype}", (x * x).cpu(), x.cpu() * x.cpu())


def compile_backend(context: Context) -> None:
    """The name of a torch.compile backend that this torch knows."""
    name = exactly(str, "compile_backend", context.backend.compile_backend)
    known = torch._dynamo.list_backends(exclude_tags=())
    check(name in known, f"torch.compile knows {known}, not {name!r}")


def compile_runs(context: Context) -> None:
    """``torch.compile`` with it gives what eager gives."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2.0 + 1.0

    compiled = torch.compile(function, backend=context.backend.compile_backend, fullgraph=True)
    x = torch.linspace(-3, 3, 1000, device=context.device)
    check(torch.allclose(compiled(x), function(x)), "compiled and eager results differ")


# Indices


def check_range(
    context: Context,
    *,
    call: Callable[[Backend, Any], Any],
    wrong: Callable[[int], tuple[Any, ...]],
) -> None:
    """An index that is no device's raises ValueError, which names the index."""
    backend = context.backend
    before = backend.current_device()
    for index in wrong(backend.device_count()):
        if isinstance(index, int) and not isinstance(index, bool):
            if 0 <= index < backend.device_count():
                continue  # of so many devices it is one
        text = str(index)
        expect_error(ValueError, f"index {index!r}", call, backend, index, mentions=(text,))
        after = backend.current_device()
        check(after == before, f"{index!r} was refused, and moved the current device to {after}")


def check_every_index(context: Context, *, call: Callable[[Backend, Any], Any]) -> None:
    """Every index of a device is accepted, and None means the current one, whichever it is.

    None of them moves the current device. A number of numpy is refused, or means what it says.
    """
    backend, every = context.backend, range(context.backend.device_count())
    before = backend.current_device()
    try:
        for current in every:
            backend.set_device(current)
            found = [call(backend, index) for index in every]
            none = call(backend, None)
            text = f"on device {current} None gives {none}, the indices give {found}"
            check(none == found[current], text)
            with suppress(ValueError):
                same = call(backend, np.int64(current))
                check(same == found[current], f"numpy's {current} gives {same}, {text}")
            after = backend.current_device()
            check(after == current, f"the current device moved from {current} to {after}")
    finally:
        backend.set_device(before)


def _set_and_return(backend: Backend, index: Any) -> int:
    before = backend.current_device()
    backend.set_device(before if index is None else index)
    found = backend.current_device()
    backend.set_device(before)
    return found


def _set_state(backend: Backend, index: Any) -> None:
    backend.set_random_state(backend.random_state(), index)


INDEXED: dict[str, tuple[Callable[[Backend, Any], Any], str | None]] = {
    "device": (lambda backend, index: backend.device(index), None),
    "set_device": (_set_and_return, None),
    "synchronize": (lambda backend, index: backend.synchronize(index), None),
    "properties": (lambda backend, index: backend.properties(index), None),
    "generator": (lambda backend, index: backend.generator(0, index).device, None),
    "random_state": (lambda backend, index: backend.random_state(index).tolist(), None),
    "set_random_state": (_set_state, None),
    "stream": (lambda backend, index: backend.stream(index).device, "streams"),
    "current_stream": (lambda backend, index: backend.current_stream(index).device, "streams"),
    "memory.info": (lambda backend, index: backend.memory.info(index).total, None),
    "memory.allocate": (lambda backend, index: backend.memory.allocate(16, index).device, None),
    "memory.allocate.nothing": (
        lambda backend, index: backend.memory.allocate(0, index).device,
        None,
    ),
    "memory.stats": (lambda backend, index: backend.memory.stats(index) and None, "memory_stats"),
    "memory.reset_peak": (lambda backend, index: backend.memory.reset_peak(index), "memory_peak"),
}
"""Methods that take an index, each giving what tells devices apart; and what it needs."""


# Streams and events, where they are declared; what they order is in the streams chapter


def stream_types(context: Context) -> None:
    """stream(), current_stream() and event() give torch's types on the device.

    New ones each time: in another thread, and where a stream is current.
    """
    backend = context.backend

    def on_stream(make: Callable[[], T]) -> T:
        with backend.use_stream(backend.stream()):
            return make()

    for stream in (backend.stream(), backend.current_stream()):
        check(isinstance(stream, torch.Stream), f"a torch.Stream expected, got {stream!r}")
    check(isinstance(backend.event(), torch.Event), "event(): a torch.Event expected")
    for make in (backend.event, backend.stream):
        made = [make(), *(where(make) for where in (in_thread, on_stream) for _ in range(2))]
        is_new = all(made[n] not in made[:n] for n in range(len(made)))
        check(is_new, f"{make.__name__}() gave in a thread or on a stream what it gave before")


# What is not declared


def check_undeclared(context: Context, *, capability: str, call: Callable[[Backend], Any]) -> None:
    """A method of a group that is not declared says so; it does not quietly do nothing."""
    what, words = f"{capability} is not declared", (capability,)
    expect_error(UnsupportedError, what, call, context.backend, mentions=words)


GROUPS: dict[str, dict[str, Callable[[Backend], Any]]] = {
    "streams": {
        "stream": lambda backend: backend.stream(),
        "current_stream": lambda backend: backend.current_stream(),
        "use_stream": lambda backend: backend.use_stream(torch.Stream(device=HOST)),
        "event": lambda backend: backend.event(),
    },
    "memory_stats": {
        "memory.stats": lambda backend: backend.memory.stats(),
        "memory.empty_cache": lambda backend: backend.memory.empty_cache(),
    },
    "memory_peak": {"memory.reset_peak": lambda backend: backend.memory.reset_peak()},
    "pinned_memory": {"memory.pinned": lambda backend: backend.memory.pinned(64)},
    "graphs": {"capture": lambda backend: backend.capture(lambda: None)},
}

PLAIN: dict[str, Callable[[Context], None]] = {
    "identity": identity,
    "rows": rows,
    "capabilities": capabilities,
    "probe": probe,
    "device_count": device_count,
    "device": device,
    "current_device": current_device,
    "new_thread": new_thread,
    "any_thread": any_thread,
    "synchronize": synchronize,
    "operators": operators_everywhere,
    "properties": properties,
    "dtypes": dtypes_work,
}


def exactly(kind: type[T], what: str, value: Any) -> T:
    """The value, which must be of this very type: no bool for an int, no subclass of str."""
    check(type(value) is kind, f"{what}: {kind.__name__} expected, got {value!r}")
    result: T = value
    return result
