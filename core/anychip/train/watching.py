"""Where does the time of a training step go, how much memory does it take, what part of the rate?

A mark stands where a part of a step begins or ends. Where the backend has streams it is an event
on the current one, which is read when the host has waited for the step anyway; elsewhere it is the
time of the host. Nothing here waits for the device or computes on it: a step has the same bits.

Of a part within another the outer one does not count: what is sent and waited for by the update or
by a pipeline is exchange. What goes between ranks while gradients are computed is hidden there.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, NamedTuple

from anychip.contract import AnychipError, Backend

PARTS = ("data", "forward", "backward", "exchange", "update")


class Clock(NamedTuple):
    """How time is taken: a mark, and the seconds between two marks of work that is done."""

    mark: Callable[[], Any]
    seconds: Callable[[Any, Any], float]


HOST_CLOCK = Clock(time.perf_counter, lambda start, end: float(end - start))


def clock_of(chip: Backend) -> Clock | None:
    """A chip's; None: it queues work, and measures no time between events."""
    if "streams" not in chip.capabilities:
        return HOST_CLOCK

    def mark() -> Any:
        event = chip.event(timing=True)
        event.record(chip.current_stream())
        return event

    def seconds(start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    try:
        seconds(mark(), mark())
    except AnychipError:
        raise
    except (RuntimeError, AttributeError):  # a C library may be without event_elapsed
        return None
    return Clock(mark, seconds)


class Span(NamedTuple):
    """A stretch of a step, between two marks."""

    part: str
    start: Any
    end: Any


class Watch:
    """What is measured of the steps of a run, on one rank.

    Args:
        chip: whose memory and time; None: nothing is measured.
        ideal_s: what a step would take at the rates of all devices; None: nobody knows them.
    """

    def __init__(self, chip: Backend | None = None, ideal_s: float | None = None) -> None:
        self.chip, self.ideal_s = chip, ideal_s
        self.clock = None if chip is None else clock_of(chip)
        self._open: list[str] = []
        self._marks: list[tuple[str, Any]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of one step, in which :func:`part` counts, on this thread."""
        self._open, self._marks = [], []
        token = _current.set(None if self.clock is None else self)
        try:
            yield
        finally:
            _current.reset(token)

    def begin(self, name: str) -> None:
        """A part begins; what it is within goes on behind it."""
        self._open.append(name)
        self._mark()

    def end(self) -> None:
        """The part that began last ends."""
        self._open.pop()
        self._mark()

    def _mark(self) -> None:
        assert self.clock is not None
        self._marks.append((self._open[-1] if self._open else "", self.clock.mark()))

    def spans(self) -> list[Span]:
        """The stretches of the last step, one behind the other."""
        return [Span(name, start, end) for (name, start), (_, end) in pairwise(self._marks) if name]

    def memory(self) -> dict[str, int]:
        """Bytes of the device as the backend counts them, as far as it does."""
        if self.chip is None or "memory_stats" not in self.chip.capabilities:
            return {}
        found = self.chip.memory.stats()
        peak = {} if found.peak_allocated is None else {"peak_nbytes": found.peak_allocated}
        return {"allocated_nbytes": found.allocated, **peak}

    def times(self, step_s: float) -> dict[str, float]:
        """Seconds by part of a step that is done, and the part of the devices' rate."""
        found = {} if self.ideal_s is None else {"mfu": self.ideal_s / step_s}
        if self.clock is not None:
            found |= {f"{name}_s": 0.0 for name in PARTS}
            for name, start, end in self.spans():
                found[f"{name}_s"] += self.clock.seconds(start, end)
        return found


_current: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def part(name: str) -> Iterator[None]:
    """Context of a part of the step that is under way on this thread; elsewhere it is nothing."""
    watch = _current.get()
    if watch is None:
        yield
        return
    watch.begin(name)
    try:
        yield
    finally:
        watch.end()
