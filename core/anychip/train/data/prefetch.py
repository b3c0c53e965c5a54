"""How is a batch ready when it is asked for? A thread makes a bounded number of them ahead."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class _Shelf(Generic[T]):
    """What the thread and its consumer share.

    The thread holds this and not the Prefetcher, so that a Prefetcher nobody closed can be
    collected, which closes it.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.items: deque[T] = deque()
        self.error: BaseException | None = None
        self.is_closed = False
        self.changed = threading.Condition()

    def has_space(self) -> bool:
        """Waits until there is space for an item; False when none will be wanted any more."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_closed or len(self.items) < self.depth)
            return not self.is_closed

    def has_answer(self) -> bool:
        return bool(self.items) or self.error is not None or self.is_closed

    def put(self, item: T) -> None:
        with self.changed:
            self.items.append(item)
            self.changed.notify_all()


class Prefetcher(Generic[T]):
    """Items of an endless iterator, in order, made in a thread of its own.

    Args:
        source: only the thread uses it. It must not hold the Prefetcher.
        depth: the most items that are made and not taken, at least 1.
    """

    def __init__(self, source: Iterator[T], *, depth: int) -> None:
        assert depth >= 1
        self._shelf: _Shelf[T] = _Shelf(depth)
        thread = threading.Thread(
            target=_fill, args=(self._shelf, source), name="anychip-prefetch", daemon=True
        )
        thread.start()
        self._close = weakref.finalize(self, _end, self._shelf, thread)

    def take(self) -> T:
        """The next item; waits for it.

        Raises:
            BaseException: what making it raised, with the traceback from the thread. The thread has
                ended then.
        """
        shelf = self._shelf
        with shelf.changed:
            shelf.changed.wait_for(shelf.has_answer)
            if shelf.items:
                item = shelf.items.popleft()
                shelf.changed.notify_all()
                return item
            assert shelf.error is not None, "take() after close()"
            raise shelf.error

    def close(self) -> None:
        """Drops what was made, and ends the thread; waits for it. A second call does nothing."""
        self._close()


def _fill(shelf: _Shelf[T], source: Iterator[T]) -> None:
    try:
        while shelf.has_space():
            shelf.put(next(source))
    except BaseException as error:
        with shelf.changed:
            shelf.error = error
            shelf.changed.notify_all()


def _end(shelf: _Shelf[T], thread: threading.Thread) -> None:
    with shelf.changed:
        shelf.is_closed = True
        shelf.items.clear()
        shelf.changed.notify_all()
    if thread is not threading.current_thread():  # the collector may run in any thread
        thread.join()
