"""A device that is really asynchronous, for tests: host memory, and a worker thread per stream.

Within ``use_stream`` a dispatch mode takes what torch would compute, hands out tensors for the
results, and leaves the computing to the stream's thread, which waits a little before each piece,
at random from a seed: a read that comes too soon does find old values. On the first stream, work
is done at once, as on the host.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from anychip.comm.group import Group
from anychip.contract import Communicator, Memory
from tests.meta.honest import CountingMemory, HonestBackend, make_table, reference_rows

LONGEST_S = 0.001
"""Of the delay before a piece of work."""
VALUES_NEEDED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operators whose call does not return before the host knows values."""
HOST_READS = {
    torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.to, torch.Tensor.numpy,
    torch.Tensor.__repr__,
}  # fmt: skip
"""Methods by which the host reads what is the host's memory already: no operator is called."""


class Progress:
    """How many pieces of work a stream was given, and how many of them it has done.

    Attributes:
        error: what the first raised of those since somebody waited, who is told of it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queued = self.done = 0
        self.error: BaseException | None = None

    def count_queued(self) -> None:
        with self.changed:
            self.queued += 1

    def count_done(self) -> None:
        with self.changed:
            self.done += 1
            self.changed.notify_all()

    def wait(self) -> None:
        """Until what is queued now is done."""
        with self.changed:
            end = self.queued
            self.changed.wait_for(lambda: self.done >= end)
            error, self.error = self.error, None
        if error is not None:
            raise error

    def is_complete(self) -> bool:
        with self.changed:
            return self.done == self.queued


class Stream(torch.Stream):
    """Work in order, done by a thread of its own; without one, by whoever queues it."""

    count = 0
    progress_type: ClassVar[type[Progress]] = Progress

    def __new__(cls, *args: Any, **named: Any) -> Stream:
        made: Stream = super().__new__(cls, device="cpu")
        return made

    def __init__(self, *, has_thread: bool = True) -> None:
        Stream.count += 1
        self.work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.progress = self.progress_type()
        self.has_thread = has_thread
        if has_thread:
            known = (self.work, self.progress, Stream.count)  # not the stream, which would stay
            threading.Thread(target=_do, args=known, daemon=True).start()
            weakref.finalize(self, self.work.put, None)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    def add(self, call: Callable[[], Any]) -> None:
        """Queues a piece of work."""
        if self.has_thread:
            self.progress.count_queued()
            self.work.put(call)
        else:
            call()

    def mark(self) -> threading.Event:
        """Set when the stream has come this far."""
        reached = threading.Event()
        self.add(reached.set)
        return reached

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.add(stream.mark().wait)

    def synchronize(self) -> None:
        self.progress.wait()

    def query(self) -> bool:
        return self.progress.is_complete()

    def record_event(self, event: Any = None) -> Any:
        event.record(self)
        return event


def _do(work: queue.SimpleQueue[Callable[[], Any] | None], progress: Progress, seed: int) -> None:
    delays = random.Random(seed)
    while (call := work.get()) is not None:
        time.sleep(delays.random() * LONGEST_S)
        # Autograd has seen the call, and has counted the version of what it writes.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            try:
                call()
            except Exception as error:  # the stream goes on
                progress.error = progress.error or error
        del call
        progress.count_done()


class Event(torch.Event):
    """A place in a stream."""

    reached: threading.Event | None = None
    times: list[float]

    def __new__(cls) -> Event:
        made: Event = super().__new__(cls, "cpu")
        return made

    def record(self, stream: Any = None) -> None:
        self.times = times = []
        stream.add(lambda: times.append(time.perf_counter()))
        self.reached = stream.mark()

    def wait(self, stream: Any = None) -> None:
        if self.reached is not None:
            stream.add(self.reached.wait)

    def query(self) -> bool:
        return self.reached is None or self.reached.is_set()

    def synchronize(self) -> None:
        if self.reached is not None:
            self.reached.wait()

    def elapsed_time(self, end_event: Any) -> float:
        return float(1000 * (end_event.times[0] - self.times[0]))


class Deferring(TorchDispatchMode):
    """Queues what torch is asked to compute on a stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        returns = [value.alias_info for value in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in returns):
            return func(*args, **kwargs)  # a view: it has no data of its own
        if "empty" in func.name():
            return func(*args, **kwargs)  # memory, whose content nobody has promised
        if VALUES_NEEDED & set(func.tags):
            self.needs_values(func)
            return func(*args, **kwargs)
        if not any("Tensor" in str(value.type) for value in func._schema.returns):
            self.stream.synchronize()
            return func(*args, **kwargs)  # of the host: a device, a number
        if func._schema.is_mutable:
            self.defer(func, lambda: func(*args, **kwargs))
            return args[0] if returns else None
        outputs = self.room(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.stream.synchronize()  # what it reads beside the generator's state, which is now's
            with _disable_current_modes():  # those of streams around this one too
                drawn = func(*args, **kwargs)
            self.defer(func, lambda: fill(outputs, drawn))
            return outputs
        self.defer(func, lambda: fill(outputs, func(*args, **kwargs)))
        return outputs

    def defer(self, func: Any, call: Callable[[], Any]) -> None:
        """Leaves a call to the stream."""
        self.stream.add(call)

    def needs_values(self, func: Any) -> None:
        """The host is about to read, and waits for the stream."""
        self.stream.synchronize()

    def room(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Tensors for the results, of which only the shapes are known yet."""
        key = func, described(args), described(tuple(kwargs.items()))
        if key not in FORMS:
            with FakeTensorMode(allow_non_fake_inputs=True):
                FORMS[key] = func(*like(args), **like(kwargs))
        return like(FORMS[key])


FORMS: dict[Any, Any] = {}
"""Results without data, by what was called with which shapes: to find them out takes torch longer
than to compute most of them."""


def described(value: Any) -> Any:
    """Of a tensor what the form of a result depends on; of all else what it is."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    is_several = isinstance(value, (list, tuple))
    return tuple(map(described, value)) if is_several else (type(value), value)


def like(values: Any) -> Any:
    """The same, with tensors of the same form in place of tensors."""

    def empty(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)

    return tree_map(empty, values)


class Reading(TorchFunctionMode):
    """Lets the host wait for the stream where it reads a tensor without an operator."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func not in HOST_READS or (func is torch.Tensor.to and "cpu" not in args):
            return func(*args, **named)
        self.wait(func)
        with _disable_current_modes():
            return func(*args, **named)

    def wait(self, func: Any) -> None:
        """Before the host reads by a method."""
        self.stream.synchronize()


def fill(outputs: Any, found: Any) -> None:
    """Copies results to where they were promised."""
    pairs = zip(outputs, found, strict=True) if isinstance(outputs, tuple | list) else None
    for target, source in pairs or [(outputs, found)]:
        target.copy_(source)


class AsynchronousMemory(CountingMemory):
    """A queued copy holds its tensors; there is no allocator of a device to tell of them."""

    def copy_async(
        self, target: Tensor, source: Tensor, stream: torch.Stream | None = None
    ) -> None:
        if stream is None:
            target.copy_(source, non_blocking=True)
            return
        with self.backend.use_stream(stream):
            target.copy_(source, non_blocking=True)


class OrderedGroup(Group):
    """Each call comes when the stream that is current has done its work."""

    streams: Any

    def _refuse(self, call: Callable[[], str]) -> None:
        self.streams.current_stream().synchronize()
        super()._refuse(call)


class AsynchronousBackend(HonestBackend):
    """The host with streams of worker threads."""

    capabilities: Mapping[str, int] = {**HonestBackend.capabilities, "streams": 1}
    operators = make_table(reference_rows())
    stream_type: ClassVar[type[Stream]] = Stream
    event_type: ClassVar[type[Event]] = Event
    mode_type: ClassVar[type[Deferring]] = Deferring
    read_type: ClassVar[type[Reading]] = Reading
    memory_type: ClassVar[type[Memory]] = AsynchronousMemory

    def __init__(self) -> None:
        super().__init__()
        self.first = self.stream_type(has_thread=False)
        self.streams: list[tuple[weakref.ref[Stream], Progress]] = []

    @cached_property
    def memory(self) -> Memory:
        return self.memory_type(self)

    def communicator(self, **settings: Any) -> Communicator:
        found = super().communicator(**settings)
        assert isinstance(found, Group)
        found.__class__ = OrderedGroup
        found.streams = self  # type: ignore[attr-defined]
        return found

    def synchronize(self, index: int | None = None) -> None:
        self.check_index(index)
        for _, progress in list(self.streams):
            progress.wait()

    def stream(self, index: int | None = None) -> torch.Stream:
        self.check_index(index)
        # Of those that nobody holds, which have no thread then, the ones that still have work.
        self.streams = [s for s in self.streams if s[0]() or not s[1].is_complete()]
        made = self.stream_type()
        self.streams.append((weakref.ref(made), made.progress))
        return made

    def current_stream(self, index: int | None = None) -> torch.Stream:
        self.check_index(index)
        found: torch.Stream = getattr(self.thread, "stream", self.first)
        return found

    def set_random_state(self, state: Tensor, index: int | None = None) -> None:
        """Now: torch clones the state by an operator, whose result it reads before any stream."""
        self.current_stream(index).synchronize()
        with _disable_current_modes():
            super().set_random_state(state, index)

    @contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        before = self.current_stream()
        self.thread.stream = stream
        try:
            with self.mode_type(stream), self.read_type(stream):
                yield
        finally:
            self.thread.stream = before

    def event(self, *, timing: bool = False) -> torch.Event:
        return self.event_type()
