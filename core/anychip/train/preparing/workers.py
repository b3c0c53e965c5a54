"""Who does the work? Processes, in order, as many documents at a time as they can take.

A process that is killed, as a system without memory does, is started again and given the same
documents once more; that is said and counted. When it ends over them twice, so does the work.
"""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from queue import SimpleQueue
from typing import TypeVar

import numpy as np

from anychip.children import ended
from anychip.contract import AnychipError
from anychip.train.preparing.work import Document, Done, Preparer, Request, read_frame, write_frame

G = TypeVar("G")
_AHEAD = 2
"""Groups of documents per process that are read, and whose tokens are not yet written."""


class WorkerError(AnychipError, RuntimeError):
    """A process ended, twice over the same documents, or could not do its work."""


class _Process:
    """A process that works; one thread at a time uses it."""

    def __init__(self, work: Preparer, note: Callable[[str], object]) -> None:
        self.work, self.note, self.restarts, self.is_closed = work, note, 0, False
        self.running: subprocess.Popen[bytes] | None = None

    def __call__(self, documents: Sequence[Document]) -> Done:
        try:
            return self._exchange(documents)
        except (EOFError, OSError):
            if self.is_closed:
                raise
            why = self.end()
        where = documents[0][0] if documents else "the end"
        self.restarts += 1
        self.note(f"a worker {why} over the documents from {where} on; it is started again")
        try:
            return self._exchange(documents)
        except (EOFError, OSError):
            raise WorkerError(
                f"a worker {self.end()}, twice over the documents from {where} on; what was done "
                "is kept: go on with --resume, and with fewer --workers if memory ran out"
            ) from None

    def _exchange(self, documents: Sequence[Document]) -> Done:
        if self.running is None:
            self.running = _start(self.work.request)
        assert self.running.stdin is not None
        assert self.running.stdout is not None
        write_frame(self.running.stdin, documents)
        about, tokens = read_frame(self.running.stdout)
        if "error" in about:
            if about["kind"] == "ValueError":
                raise ValueError(about["error"])
            raise WorkerError(f"a worker failed: {about['kind']}: {about['error']}")
        return Done(**about, tokens=np.frombuffer(tokens, self.work.dtype))

    def end(self) -> str:
        """Ends it, and says how it had ended."""
        if self.running is None:
            return "did not start"
        process, self.running = self.running, None
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # what was not yet sent has nobody to go to
                pipe.close()  # type: ignore[union-attr]
        try:
            code = process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        return ended(code)

    def close(self) -> None:
        """Ends it, also while a thread waits for it."""
        self.is_closed = True
        if (process := self.running) is not None:
            process.kill()
            process.wait()


def _start(request: Request) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", "from anychip.train.preparing import work; work.main()"]
    one = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **one},
        start_new_session=True,  # Ctrl-C is for the one that reads and writes
    )
    assert process.stdin is not None
    write_frame(process.stdin, asdict(request))
    return process


def in_order(
    groups: Iterable[G],
    documents_of: Callable[[G], Sequence[Document]],
    work: Preparer,
    *,
    num_workers: int,
    note: Callable[[str], object],
) -> Iterator[tuple[G, Done, int]]:
    """Each group of documents, what has become of it, and the restarts so far.

    Args:
        num_workers: processes; 0: none, it is done here.

    Raises:
        WorkerError: as the class says.
        ValueError: documents cannot be made into tokens.
    """
    if not num_workers:
        for group in groups:
            yield group, work(documents_of(group)), 0
        return
    processes = [_Process(work, note) for _ in range(num_workers)]
    free: SimpleQueue[_Process] = SimpleQueue()
    for process in processes:
        free.put(process)

    def do(documents: Sequence[Document]) -> Done:
        process = free.get()
        try:
            return process(documents)
        finally:
            free.put(process)

    pending = deque[tuple[G, Future[Done]]]()
    threads = ThreadPoolExecutor(num_workers, "anychip-prepare")
    try:
        for group in groups:
            pending.append((group, threads.submit(do, documents_of(group))))
            while len(pending) > _AHEAD * num_workers:
                yield (*_first(pending), sum(process.restarts for process in processes))
        while pending:
            yield (*_first(pending), sum(process.restarts for process in processes))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.close()
        threads.shutdown()
        for process in processes:
            process.end()


def _first(pending: deque[tuple[G, Future[Done]]]) -> tuple[G, Done]:
    group, future = pending.popleft()
    return group, future.result()
