"""How a call of several steps gets on: in the caller's thread, or in one of its own.

The steps of a call are a generator that posts messages and yields them to be waited for. A call
that is waited for at once is driven by the caller. One that is not goes to its group's thread, so
that sums are made and second halves are sent while the caller computes; a caller that waits before
the thread has begun does it himself.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Protocol

import torch

from anychip.contract.communicator import Work
from anychip.contract.errors import CommunicationError


class Message(Protocol):
    """A send or receive under way, as torch.distributed hands it out."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Blocks until it is done; raises RuntimeError when it failed or the time is over."""
        ...


_TICK_S = 0.002
"""gloo counts whole milliseconds: without it, its time is over before ours is."""

Steps = Iterator[list[tuple[int, Message]]]
"""Messages to wait for, each with the rank at its other end; the next step follows when all are
done."""


class StepwiseCall(Work):
    """A call under way. Its first messages are posted when it is made.

    Args:
        steps: see :data:`Steps`.
        outputs: tensors that the steps write.
        explain: gives the error for a message that failed: (rank at its other end, the failure,
            whether the time was over).
    """

    def __init__(
        self,
        steps: Steps,
        outputs: list[torch.Tensor],
        timeout_s: float,
        explain: Callable[[int, Exception, bool], CommunicationError],
    ) -> None:
        self._steps, self._outputs, self._explain = steps, outputs, explain
        self._deadline = time.monotonic() + timeout_s
        self._error: CommunicationError | None = None
        self._finished, self._lock = False, threading.Lock()
        self._posted: list[tuple[int, Message]] | None = next(steps, None)
        if self._posted is None:
            self._finish()

    def is_done(self) -> bool:
        return self._finished

    def wait(self) -> None:
        self.drive()
        error = self._error
        if error is not None:
            raise CommunicationError(error.where, error.reason, ranks=error.ranks)

    def drive(self) -> None:
        """Does all steps that are left; keeps an error for :meth:`wait`."""
        with self._lock:
            while self._posted is not None and self._error is None:
                waited = -1
                try:
                    for peer, message in self._posted:
                        waited = peer
                        left = self._deadline - time.monotonic()
                        message.wait(timedelta(seconds=max(left, 0.0) + _TICK_S))
                    self._posted = next(self._steps, None)
                except CommunicationError as error:
                    self._error = error
                except RuntimeError as error:
                    is_late = time.monotonic() >= self._deadline
                    self._error = self._explain(waited, error, is_late)
            if not self._finished:
                self._finish()

    def _finish(self) -> None:
        # Messages are written past autograd, which has to know that saved values are old.
        for tensor in self._outputs:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        self._posted = None
        self._finished = True


class Progress:
    """The thread of a group in which its asynchronous calls get on, in the order of the calls."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[StepwiseCall | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"anychip {name}", daemon=True)
        self._thread.start()

    def add(self, call: StepwiseCall) -> None:
        """Takes a call; it will be driven after those before it."""
        self._calls.put(call)

    def close(self) -> None:
        """Ends the thread after the calls that it has, which fail when connections are closed."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.drive()
