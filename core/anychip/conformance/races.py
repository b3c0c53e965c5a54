"""Writes on a stream, and readers that come too soon unless something holds them back."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anychip.conformance.case import Context, check, check_equal_bits
from anychip.contract import HOST, Backend

WRITES = 8
LONG_MS, PATIENCE_S = 3.0, 30.0
"""Each piece of a race takes so long, if the largest tensor allows it."""
SMALLEST, LARGEST = 1 << 16, 1 << 28
READ = 4096
"""Elements of the read, at the end of the tensor, where writes arrive last."""

END = slice(-READ, None)
PARTS: tuple[tuple[str, slice, torch.dtype], ...] = (
    ("the end", END, torch.float32), ("one element", slice(-1, None), torch.float32),
    ("an odd number", slice(1 - READ, None), torch.float32), ("as int32", END, torch.int32),
    ("8 MiB", slice(-(1 << 21), None), torch.float32),
    ("every third", slice(-READ, None, 3), torch.float32),
    ("as bfloat16", slice(-200, None), torch.bfloat16),
)  # fmt: skip
"""What is copied of float32 numbers, and to and from which dtype, which has them all."""
HOST_READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[-1].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x[-1] == WRITES),
    "int": lambda x: int(x[-1]),
    "float": lambda x: float(x.sum()),
    "repr": repr,
    "format": lambda x: f"{x[-1]}",
    "host": lambda x: x.cpu(),
    "to": lambda x: x.to(HOST),
    "numpy": lambda x: x.cpu().numpy(),
    "bytes": lambda x: (x == WRITES).cpu(),
    "equal": lambda x: torch.equal(x, x.clamp(min=float(WRITES))),
    "nonzero": lambda x: x.nonzero().tolist(),
    "mask": lambda x: x[x == WRITES].tolist(),
    # Not of all: what memory may hold from other masks.
    "nonzero.mask": lambda x: (x.cumsum(0) > WRITES).nonzero().tolist(),
    "unique": lambda x: x.unique().tolist(),
    "repeat": lambda x: x.repeat_interleave((x == WRITES).long()).tolist(),
}


class Race:
    """Long writes on a stream, of its own or a given one, and what a reader has to find.

    Attributes:
        x: becomes ``want`` everywhere.
        stream: on which it does.
        reader: another one, which was there before the writes.
    """

    want = float(WRITES)

    def __init__(self, context: Context, stream: torch.Stream | None = None) -> None:
        self.context, self.backend = context, context.backend
        self.x = torch.zeros(race_size(context), device=context.device)
        self.stream, self.reader = stream or self.backend.stream(), self.backend.stream()
        self.idle = self.backend.stream()  # made last, and never used: nothing may mean this one
        self.current = self.backend.current_stream()
        self.backend.synchronize()

    def start(self, count: int = WRITES) -> Race:
        """Queues the writes."""
        with self.backend.use_stream(self.stream):
            for _ in range(count):
                self.x += 1.0
        return self

    def event(self, **kind: bool) -> torch.Event:
        """An event behind the writes."""
        event = self.backend.event(**kind)
        event.record(self.stream)
        return event

    def read(self) -> list[Tensor]:
        """What the current stream finds, in every way in which a stream reads."""
        part, room = self.x[-READ:], torch.empty(2, READ, device=self.x.device)
        self.backend.memory.copy_async(room[0], part)
        return [part * 1.0, part.clone(), room[1].copy_(part), room[0]]

    def read_on(self, stream: torch.Stream | None = None) -> list[Tensor]:
        """What a stream finds; without one, what one finds that waits for nothing."""
        with self.backend.use_stream(stream or self.reader):
            return self.read()

    def settle(self) -> None:
        """Waits for everything; nothing but ``use_stream`` has made another stream current."""
        self.backend.synchronize()
        check(self.backend.current_stream() == self.current, "another stream stays current")

    def check(self, what: str, found: list[Tensor], want: float | None = None) -> None:
        """Compares a read, once all is done."""
        self.settle()
        for way, got in zip(("operator", "clone", "copy_", "copy_async"), found, strict=True):
            value = self.want if want is None else want
            check_equal_bits(f"{what}, by {way}", got.cpu(), torch.full((READ,), value))


def wait_until(query: Callable[[], bool], what: str) -> None:
    """Asks until the answer is True; every answer is a bool."""
    deadline = time.monotonic() + PATIENCE_S
    while (answer := query()) is not True:
        check(answer is False, f"{what}: a bool expected, got {answer!r}")
        check(time.monotonic() < deadline, f"{what} is not True after {PATIENCE_S:g} s")
        time.sleep(0.0002)


_sizes: weakref.WeakKeyDictionary[Backend, int] = weakref.WeakKeyDictionary()


def race_size(context: Context) -> int:
    """Elements of a tensor on which one write takes LONG_MS, measured once per backend."""
    if context.backend not in _sizes:
        _sizes[context.backend] = _measured_size(context)
    return _sizes[context.backend]


def _measured_size(context: Context) -> int:
    # A race has two such tensors at most.
    largest = min(LARGEST, context.backend.memory.info().free // 64)
    numel = SMALLEST
    while 4 * numel <= largest:
        x = torch.zeros(numel, device=context.device)
        context.backend.synchronize()
        with context.backend.use_stream(context.backend.stream()):
            start = time.perf_counter()
            for _ in range(WRITES):
                x += 1.0
        context.backend.synchronize()
        if (time.perf_counter() - start) * 1000 >= LONG_MS * WRITES:
            break
        numel *= 4
    return numel


def _while_another_is_current(race: Race) -> torch.Event:
    """Which stream is current means nothing to an event that is told its stream."""
    event = race.start().backend.event()
    with race.backend.use_stream(race.idle):
        event.record(race.stream)
    return event


def _again(race: Race, before: torch.Stream | None = None) -> torch.Event:
    """Recorded twice, and it stands for the second time."""
    event = race.backend.event()
    event.record(before or race.stream)
    if before is not None:
        event.synchronize()
    race.start()
    event.record(race.stream)
    return event


def _only_waiting(race: Race) -> torch.Event:
    """The stream is one that has nothing else to do than to wait for the writes."""
    race.idle.wait_event(race.start().event())
    race.stream = race.idle
    return race.backend.event()


def _behind_a_wait(race: Race) -> torch.Event:
    _only_waiting(race)
    return race.event()


RECORDS: dict[str, Callable[[Race], torch.Event]] = {
    "recorded once": lambda race: race.start().event(),
    "with times": lambda race: race.start().event(timing=True),
    "recorded anew": _again,
    "recorded anew after another stream": lambda race: _again(race, race.idle),
    "record_event": lambda race: race.start().stream.record_event(race.backend.event()),
    "recorded while another stream is current": _while_another_is_current,
    "recorded on a stream that only waits": _behind_a_wait,
}
"""How an event comes to stand behind the writes."""
NO_RECORD = {
    "no event": lambda race: race.start().backend.event(),
    "a stream that only waits": _only_waiting,
}
"""Where a stream is waited for, the last of its work is the last write."""
