"""Graphs for tests: the asynchronous host, which can also put work down instead of doing it.

What torch would compute goes to a list; a replay queues the list on the current stream. Tensors of
results are made once, when the work is recorded, and each graph has its own.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from anychip.contract import Graph
from tests.meta.asynchronous import AsynchronousBackend, Deferring, Stream


class Tape(Stream):
    """Takes work like a stream, and does none of it."""

    def __init__(self) -> None:
        super().__init__(has_thread=False)
        self.pieces: list[Callable[[], Any]] = []

    def add(self, call: Callable[[], Any]) -> None:
        self.pieces.append(call)

    def synchronize(self) -> None:
        raise RuntimeError("work that is recorded waits for the device")


class HostGraph(Graph):
    """The pieces of a tape, to be queued again."""

    def __init__(self, backend: Any, work: Callable[[], Any], tape: Tape, result: Any) -> None:
        self.backend, self.work, self.pieces = backend, work, tape.pieces
        self.result = result

    def replay(self) -> None:
        self.backend.current_stream().add(self.run)

    def run(self) -> None:
        """Does the work, on the thread of a stream; gradients were recorded with it."""
        with torch.no_grad():
            for piece in self.pieces:
                piece()


class RecordingBackend(AsynchronousBackend):
    """The asynchronous host with graphs."""

    capabilities: Mapping[str, int] = {**AsynchronousBackend.capabilities, "graphs": 1}
    tape_type: ClassVar[type[Tape]] = Tape
    recorder_type: ClassVar[type[Deferring]] = Deferring
    graph_type: ClassVar[type[HostGraph]] = HostGraph

    def capture(self, work: Callable[[], Any]) -> Graph:
        self.require("graphs", "capture()")
        work()
        tape: Any = self.tape_type()
        with self.recorder_type(tape):
            result = work()
        return self.graph_type(self, work, tape, result)
