"""How a call gets on: in the caller's thread, or in one of its group's.

A call that is waited for at once is driven by the caller. One that is not goes to its group's
thread, so that sums are made and second halves are sent while the caller computes; a caller that
waits before the thread has begun does it himself. Where a call is made of messages, its steps are a
generator that posts them and yields them to be waited for.
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Literal, Protocol

import torch
from torch import Tensor

from anychip.contract import TransportError, Work


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


class Driven(Work, ABC):
    """A call that gets on in the thread that waits for it: the caller's, or its group's.

    Args:
        outputs: tensors that it writes.
    """

    def __init__(self, outputs: Sequence[Tensor], timeout_s: float) -> None:
        self._outputs, self._deadline = outputs, time.monotonic() + timeout_s
        self._error: Exception | None = None
        self._finished, self._lock = False, threading.Lock()

    @abstractmethod
    def _run(self) -> None:
        """Does all that is left; called once."""

    def is_done(self) -> bool:
        return self._finished

    def wait(self) -> None:
        error = self.drive()
        if error is not None:
            raise error

    def drive(self) -> Exception | None:
        """Does all that is left, if nobody has; the error, if it failed."""
        with self._lock:
            if not self._finished:
                try:
                    self._run()
                except RuntimeError as error:
                    self._error = error
                self._finish()
            return self._error

    def _finish(self) -> None:
        # Tensors are written past autograd, which has to know that saved values are old.
        torch.autograd.graph.increment_version([t for t in self._outputs if not t.is_inference()])
        # The thread, and who keeps the work, holds no tensor for longer than the call takes.
        self._outputs, self._finished = (), True


class StepwiseCall(Driven):
    """A call of several steps. Its first messages are posted when it is made.

    Args:
        steps: see :data:`Steps`.
        outputs: tensors that the steps write.
    """

    def __init__(self, steps: Steps, outputs: Sequence[Tensor], timeout_s: float) -> None:
        super().__init__(outputs, timeout_s)
        self._steps = steps
        self._posted: list[tuple[int, Message]] | None = next(steps, None)
        if self._posted is None:
            self._finish()

    def _run(self) -> None:
        waited = -1
        try:
            while self._posted is not None:
                for peer, message in self._posted:
                    waited = peer
                    left = self._deadline - time.monotonic()
                    message.wait(timedelta(seconds=max(left, 0.0) + _TICK_S))
                self._posted = next(self._steps, None)
        except TransportError:
            raise
        except RuntimeError as error:
            is_late = time.monotonic() >= self._deadline
            how: Literal["late", "lost"] = "late" if is_late else "lost"
            raise TransportError(str(error), (waited,), how) from error

    def _finish(self) -> None:
        super()._finish()
        self._posted, self._steps = None, iter(())


_Started = tuple[Driven, Callable[[Exception], None]]


class Progress:
    """The thread of a group in which its asynchronous calls get on, in the order of the calls."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[_Started | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"anychip {name}", daemon=True)
        self._thread.start()

    def add(self, call: Driven, on_error: Callable[[Exception], None]) -> None:
        """Takes a call; it will be driven after those before it."""
        self._calls.put((call, on_error))

    def close(self) -> None:
        """Ends the thread after the calls that it has, which fail when connections are closed."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (started := self._calls.get()) is not None:
            call, on_error = started
            error = call.drive()
            if error is not None:
                on_error(error)
