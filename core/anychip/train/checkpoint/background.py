"""How is a checkpoint written while training goes on?

The step waits for a copy of the rank's own boxes in host memory, and a thread writes that: what the
steps after it change is another memory. The thread makes no collective call. Rank 0's publishes the
manifest when the files of all ranks are there; whether that went well the ranks tell each other
before the next save, and at the end.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anychip import runtime
from anychip.contract import HOST
from anychip.train.checkpoint.parts import Piece
from anychip.train.checkpoint.publishing import Saving
from anychip.train.checkpoint.writing import serialized

if TYPE_CHECKING:
    from types import TracebackType


class Saver:
    """Writes checkpoints in a thread, one at a time: ``save(..., saver=saver)``.

    Beside what it saves, a rank holds one copy of it on the host, page-locked where the device has
    that, which is used again by the next save. A context: it closes at the end, and with an
    exception gives up what is not written.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._running: _Running | None = None

    @property
    def nbytes(self) -> int:
        """Of host memory."""
        return 0 if self._memory is None else self._memory.nbytes

    def copy(self, saving: Saving) -> None:
        """Takes what is to be written from where training changes it.

        Raises:
            OSError: the host has not so much memory.
        """
        saving.progress = serialized(saving.progress)
        # The largest numbers first: each then begins at a multiple of its size.
        ordered = sorted(saving.pieces, key=lambda piece: -piece.part.dtype.itemsize)
        devices = {piece.part.values.device for piece in ordered}
        memory, place, copied = self._memory_for(ordered, devices), 0, []
        for piece in ordered:
            values = memory[place : place + piece.nbytes].view(piece.part.dtype)
            values.copy_(piece.elements(), non_blocking=True)
            copied.append(Piece(replace(piece.part, values=values), piece.box, 0))
            place += piece.nbytes
        for device in devices:
            if device.type != HOST:
                runtime.owner(device.type).synchronize(device.index)
        saving.pieces = copied

    def _memory_for(self, pieces: Sequence[Piece], devices: set[torch.device]) -> Tensor:
        nbytes = sum(piece.nbytes for piece in pieces)
        if self._memory is None or self._memory.nbytes < nbytes:
            self._memory = None  # not both at a time
            chips = [runtime.owner(device.type) for device in devices if device.type != HOST]
            try:
                if chips and "pinned_memory" in chips[0].capabilities:
                    self._memory = chips[0].memory.pinned(nbytes)
                else:
                    self._memory = torch.empty(nbytes, dtype=torch.uint8, device=HOST)
            except (RuntimeError, MemoryError) as error:
                text = f"the host has no {nbytes} bytes for a copy of what is saved"
                raise OSError(errno.ENOMEM, f"{text}; save without a saver") from error
        return self._memory

    def start(self, saving: Saving) -> None:
        """Begins to write, and returns."""
        self._running = _Running(saving)

    def close(self) -> None:
        """Waits until the last checkpoint is there. With several ranks a collective call.

        Raises:
            OSError, CheckpointError: it could not be written, on some rank; the one before it still
                is there.
        """
        running, self._running = self._running, None
        if running is not None:
            with running as saving:
                saving.finish(running.written.result, running.published.result)

    def give_up(self) -> None:
        """Ends without the last checkpoint, if it is not written yet. No collective call."""
        running, self._running = self._running, None
        if running is not None:
            running.__exit__()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.give_up()


class _Running:
    """A thread that writes; the context ends it. No daemon: a process waits for it at its end."""

    def __init__(self, saving: Saving) -> None:
        self.saving = saving
        self.written: Future[None] = Future()
        self.published: Future[None] = Future()
        name = f"{threading.current_thread().name}: checkpoint"
        self._thread = threading.Thread(target=self._work, name=name)
        self._thread.start()

    def _work(self) -> None:
        _settle(self.written, self.saving.write)
        if self.written.exception() is None:
            _settle(self.published, self.saving.publish)

    def __enter__(self) -> Saving:
        return self.saving

    def __exit__(self, *exception: object) -> None:
        self.saving.given_up.set()
        self._thread.join()
        self.saving.close()


def _settle(future: Future[Any], action: Callable[[], Any]) -> None:
    try:
        future.set_result(action())
    except BaseException as error:  # whoever asks for the result gets it
        future.set_exception(error)
