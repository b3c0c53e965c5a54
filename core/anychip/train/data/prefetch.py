"""How is a batch ready when it is asked for? Threads make a bounded number of them ahead, at once.

One is enough for what is quicker than a step of training. What waits for a disk or a network longer
than that is waited for by several threads at the same time, and handed out in its order.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

PAUSE_S = 0.1
"""Between two questions whether what is waited for is there."""


class _Slot(Generic[T]):
    """Of an item that is being made: the item in a list, or what making it raised."""

    def __init__(self) -> None:
        self.item: list[T] = []
        self.error: BaseException | None = None


class _Shelf(Generic[T]):
    """What the threads and their consumer share.

    The threads hold this and not the Prefetcher, so that a Prefetcher nobody closed can be
    collected, which closes it.
    """

    def __init__(self, source: Iterator[Callable[[], T] | None], depth: int) -> None:
        self.source, self.depth = source, depth
        self.slots: deque[_Slot[T]] = deque()
        self.is_closed = False
        self.changed, self.turn = threading.Condition(), threading.Lock()

    def reserve(self) -> tuple[_Slot[T], Callable[[], T]] | None:
        """The next slot, when there is space for it, and what makes its item; None: no more."""
        with self.turn:  # slots have the order of the source
            with self.changed:
                self.changed.wait_for(lambda: self.is_closed or len(self.slots) < self.depth)
                if self.is_closed:
                    return None
                slot: _Slot[T] = _Slot()
                self.slots.append(slot)
            try:
                while (make := next(self.source)) is None:
                    with self.changed:
                        if self.changed.wait_for(lambda: self.is_closed, PAUSE_S):
                            return None
                return slot, make
            except BaseException as error:
                self.fail(slot, error)
                return None

    def fail(self, slot: _Slot[T], error: BaseException) -> None:
        """Nothing is made behind an error; what is made before it is still handed out."""
        with self.changed:
            slot.error, self.is_closed = error, True
            self.changed.notify_all()

    def is_ready(self) -> bool:
        if not self.slots:
            assert not self.is_closed, "take() after close()"
            return False
        return bool(self.slots[0].item) or self.slots[0].error is not None


class Prefetcher(Generic[T]):
    """Items of an endless iterator, in order, made in threads.

    Args:
        source: gives what makes an item when it is called; None: it is not there yet, and is asked
            again. One thread at a time asks it; several call at once. It must not hold the
            Prefetcher.
        depth: the most items that are made, or being made, and not taken, at least 1; and threads.
    """

    def __init__(self, source: Iterator[Callable[[], T] | None], *, depth: int) -> None:
        assert depth >= 1
        self._shelf: _Shelf[T] = _Shelf(source, depth)
        threads = [
            threading.Thread(
                target=_fill, args=(self._shelf,), name="anychip-prefetch", daemon=True
            )
            for _ in range(depth)
        ]
        for thread in threads:
            thread.start()
        self._close = weakref.finalize(self, _end, self._shelf, threads)

    def take(self) -> T:
        """The next item; waits for it.

        Raises:
            BaseException: what making it raised, with the traceback from the thread. The threads
                end then.
        """
        shelf = self._shelf
        with shelf.changed:
            shelf.changed.wait_for(shelf.is_ready)
            slot = shelf.slots[0]
            if slot.error is not None:
                raise slot.error
            shelf.slots.popleft()
            shelf.changed.notify_all()
            return slot.item[0]

    def close(self) -> None:
        """Drops what was made, and ends the threads; waits for them. A second call does nothing."""
        self._close()


def _fill(shelf: _Shelf[T]) -> None:
    while (reserved := shelf.reserve()) is not None:
        slot, make = reserved
        try:
            item = make()
        except BaseException as error:
            shelf.fail(slot, error)
            return
        with shelf.changed:
            slot.item.append(item)
            shelf.changed.notify_all()


def _end(shelf: _Shelf[T], threads: list[threading.Thread]) -> None:
    with shelf.changed:
        shelf.is_closed = True
        shelf.slots.clear()
        shelf.changed.notify_all()
    for thread in threads:
        if thread is not threading.current_thread():  # the collector may run in any thread
            thread.join()
