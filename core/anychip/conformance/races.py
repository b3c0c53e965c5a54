"""Writes on a stream, and readers that come too soon unless something holds them back."""

from __future__ import annotations

import time
import weakref

import torch
from torch import Tensor

from anychip.conformance.case import Context, check, check_equal_bits
from anychip.contract import Backend

WRITES = 8
LONG_MS = 3.0
"""Each piece of a race takes so long, if the largest tensor allows it."""
SMALLEST, LARGEST = 1 << 16, 1 << 28
READ = 4096
"""Elements of the read, at the end of the tensor, where writes arrive last."""


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
