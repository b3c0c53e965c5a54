"""Ctrl-C and SIGTERM between two steps: the step is finished, the checkpoint written, then it ends.

An exception in mid-step would leave parameters of which some are updated and some are not.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A run was asked to end, and has written its checkpoint.

    Attributes:
        signal: what asked: SIGINT or SIGTERM.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number


class Interruption:
    """Context in which the first signal is noted in ``signal`` and the second acts as ever.

    Entered again within itself it goes on, and ends with the inner one.
    In a thread other than the main one, where Python takes no signals, it does nothing.

    Args:
        of_rank: this process is one of a launcher's, which ends all others when it sees that one
            has failed. So no signal acts any more when the context ends by an error: it would take
            the place of what this rank has to say of that.
    """

    def __init__(self, *, of_rank: bool = False) -> None:
        self.signal: int | None = None
        self._of_rank = of_rank
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        is_listening = self._before or self.signal is not None
        if not is_listening and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if self._of_rank and is_main and kind is not None and issubclass(kind, Exception):
            self._before = dict.fromkeys(_SIGNALS, signal.SIG_IGN)
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
