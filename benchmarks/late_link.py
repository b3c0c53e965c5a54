"""A link that lets wait and does not compute: what is left of overlap when bytes cost no time here.

Between processes of one host a collective is work of the very cores that train, which nothing can
hide. Behind a network card it is waiting. This transport makes calls end no sooner than a fixed
time after they began, asleep until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from anychip.comm.group import Group
from anychip.contract import CollectiveCall, Communicator, Membership, Transfer, Transport, Work


class Clock:
    """What time it is, and how much of it was slept."""

    slept_s = 0.0

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Returns when they are over."""
        time.sleep(seconds)
        self.slept_s += seconds


class LateLink(Transport):
    """Another transport, whose calls end no sooner than ``delay_s`` after they began."""

    def __init__(self, inner: Transport, delay_s: float, clock: Clock) -> None:
        self._inner, self._delay_s, self._clock = inner, delay_s, clock
        self.device, self.capabilities = inner.device, inner.capabilities
        self.num_tags, self.reduces_on_host = inner.num_tags, inner.reduces_on_host
        self.description = f"{inner.description}, {delay_s * 1e3:g} ms late"

    def _call(self, call: CollectiveCall) -> Work:
        return self._late(getattr(self._inner, call.name)(call))

    all_reduce = all_gather = reduce_scatter = broadcast = all_to_all = _call

    def barrier(self, call: CollectiveCall) -> Work:
        return self._late(self._inner.barrier(call))

    def exchange(self, transfers: Sequence[Transfer]) -> Work:
        return self._late(self._inner.exchange(transfers))

    def _late(self, work: Work) -> Work:
        return _LateWork(work, self._clock, self._clock.now() + self._delay_s)

    def part(self, group: Membership) -> Transport:
        return LateLink(self._inner.part(group), self._delay_s, self._clock)

    def proceed(self, work: Work, on_error: Callable[[Exception], None]) -> None:
        if isinstance(work, _LateWork):
            self._inner.proceed(work.inner, on_error)

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()


class _LateWork(Work):
    def __init__(self, inner: Work, clock: Clock, ready_at: float) -> None:
        self.inner, self._clock, self._ready_at = inner, clock, ready_at

    def is_done(self) -> bool:
        return self.inner.is_done() and self._clock.now() >= self._ready_at

    def wait(self) -> None:
        self.inner.wait()
        self._clock.sleep(max(0.0, self._ready_at - self._clock.now()))


def late(comm: Communicator, delay_s: float, clock: Clock) -> Communicator:
    """A group of the same ranks over such a link. All ranks call it."""
    group = comm.split([list(range(comm.world_size))], name="late")
    if isinstance(group, Group):
        group.transport = LateLink(group.transport, delay_s, clock)
    return group
