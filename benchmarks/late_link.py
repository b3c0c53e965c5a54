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


class LateLink(Transport):
    """Another transport, whose calls take ``delay_s`` more from begin to end."""

    def __init__(self, inner: Transport, delay_s: float) -> None:
        self._inner, self._delay_s = inner, delay_s
        self.device, self.capabilities = inner.device, inner.capabilities
        self.num_tags, self.reduces_on_host = inner.num_tags, inner.reduces_on_host
        self.description = f"{inner.description}, {delay_s * 1e3:g} ms late"

    def _call(self, call: CollectiveCall) -> Work:
        return _LateWork(getattr(self._inner, call.name)(call), self._delay_s)

    all_reduce = all_gather = reduce_scatter = broadcast = all_to_all = _call

    def barrier(self, call: CollectiveCall) -> Work:
        return _LateWork(self._inner.barrier(call), self._delay_s)

    def exchange(self, transfers: Sequence[Transfer]) -> Work:
        return _LateWork(self._inner.exchange(transfers), self._delay_s)

    def part(self, group: Membership) -> Transport:
        return LateLink(self._inner.part(group), self._delay_s)

    def proceed(self, work: Work, on_error: Callable[[Exception], None]) -> None:
        if isinstance(work, _LateWork):
            self._inner.proceed(work.inner, on_error)

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()


class _LateWork(Work):
    def __init__(self, inner: Work, delay_s: float) -> None:
        self.inner, self._ready_at = inner, time.monotonic() + delay_s

    def is_done(self) -> bool:
        return self.inner.is_done() and time.monotonic() >= self._ready_at

    def wait(self) -> None:
        self.inner.wait()
        time.sleep(max(0.0, self._ready_at - time.monotonic()))


def late(comm: Communicator, delay_s: float) -> Communicator:
    """A group of the same ranks over such a link. All ranks call it."""
    group = comm.split([list(range(comm.world_size))], name="late")
    if isinstance(group, Group):
        group.transport = LateLink(group.transport, delay_s)
    return group
