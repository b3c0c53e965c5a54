"""How a figure is taken: candidates interleaved in rounds, the median over rounds.

A shared machine is slow in stretches; interleaving gives every candidate its part of them, and a
ratio is taken within a round before the median, so that it does not depend on which round was slow.
Each round has an order of its own: whoever comes after a candidate that leaves the caches full, as
a large copy does, is slower for many calls, by a third where they are large.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

Timed = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Under:
    """A call that is timed within a block, like a policy, which is entered once per round."""

    block: Callable[[], AbstractContextManager[object]]
    call: Timed

    def __call__(self) -> object:
        with self.block():
            return self.call()


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Seconds per call of one candidate, one entry per round."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median over rounds, in seconds."""
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """Fastest round, in seconds."""
        return min(self.seconds)

    def over(self, base: Samples) -> float:
        """Median over rounds of the difference to another candidate, in seconds."""
        return statistics.median(a - b for a, b in zip(self.seconds, base.seconds, strict=True))

    def ratio(self, base: Samples) -> float:
        """Median over rounds of this time divided by another candidate's."""
        return statistics.median(a / b for a, b in zip(self.seconds, base.seconds, strict=True))


def interleave(
    calls: Mapping[str, Timed],
    *,
    rounds: int,
    window: float,
    synchronize: Timed,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Samples]:
    """Times every call in every round, in an order that is the same in every run.

    Args:
        calls: name to the call.
        rounds: at least 3.
        window: seconds that one candidate runs per round, about.
        synchronize: returns when the device has finished.
        progress: told the round that was finished.
    """
    if rounds < 3:
        raise ValueError(f"rounds must be at least 3, got {rounds}")
    counts = {name: _calls_per_window(call, window, synchronize) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    chance = random.Random(rounds)
    for number in range(rounds):
        for name, call in chance.sample(list(calls.items()), len(calls)):
            seconds[name].append(_measure(call, counts[name], synchronize) / counts[name])
        progress(number + 1)
    return {name: Samples(name=name, seconds=tuple(taken)) for name, taken in seconds.items()}


def _calls_per_window(call: Timed, window: float, synchronize: Timed) -> int:
    call()
    count = 1
    while True:
        # The shorter of two: one may have been interrupted, and the count stays for all rounds.
        taken = min(_measure(call, count, synchronize) for _ in range(2))
        if taken >= window / 4:
            return max(1, round(count * window / taken))
        count *= 4


def _measure(call: Timed, count: int, synchronize: Timed) -> float:
    if isinstance(call, Under):
        with call.block():
            return _measure(call.call, count, synchronize)
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    return time.perf_counter() - start
