"""A thread that looks now and then at what a rank waits for: its own wait cannot be interrupted."""

import threading
from collections.abc import Callable


class Watch:
    """Calls ``look`` in every interval, until the job ends."""

    def __init__(self, look: Callable[[], None], interval_s: float) -> None:
        self._look, self._interval_s, self._ended = look, interval_s, threading.Event()
        self._thread = threading.Thread(target=self._run, name="anychip watch", daemon=True)
        self._thread.start()

    def abort(self) -> None:
        """It looks no more; from any thread, its own among them."""
        self._ended.set()

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._look()
