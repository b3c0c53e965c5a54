"""How are tokens read while they are made? As far as a process beside has brought them to the disk.

Of all ranks and runs that read a directory the first one has started that process, with less right
to the cores than whoever trains; when it ends, another one does. What it has brought to the disk
stays as it is, whatever ends it. So the order of the windows is a function of numbers, as of data
that was prepared before; and what one has made tokens of, every rank, epoch and later run reads.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from anychip.children import ended
from anychip.train import data, lock
from anychip.train.data.prefetch import PAUSE_S
from anychip.train.data.prepared import DESCRIPTION, TokenFile
from anychip.train.data.rows import Extent
from anychip.train.preparing.pipeline import PROGRESS, Progress, prepare, progress_of
from anychip.train.preparing.work import Preparer, Request, answering, read_frame, write_frame
from anychip.train.preparing.workers import WorkerError

FIRST = 1 << 20
"""Tokens that a position in a stream has a digest of."""

NICENESS = 5

Show = Callable[[Path, Progress], object]
"""Is told how far a directory is."""


def say_nothing(out: Path, progress: Progress) -> None:
    """Is told, and does nothing."""


class Growing(TokenFile):
    """The tokens of a directory that is prepared meanwhile; sees to it that somebody does it.

    Args:
        skip_corrupt: as :func:`.prepare` has it.
        show: is told how far it is, as long as somebody waits.

    Raises:
        MissingExtraError, OSError, ValueError: the tokenizer or a filter cannot be made.
    """

    def __init__(
        self,
        request: Request,
        out: Path,
        *,
        num_workers: int,
        skip_corrupt: bool = False,
        show: Show = say_nothing,
    ) -> None:
        made = Preparer(request)
        out.mkdir(parents=True, exist_ok=True)
        super().__init__(out, made.dtype.name)
        self.is_marked, self.skip_corrupt, self.show = request.has_messages, skip_corrupt, show
        files = [(path.name, path.stat().st_size) for path in data.find_files(request.sources)]
        self._what = [request.field, request.filters, made.tokenizer.name, made.template, files]
        self._asked = {
            "request": asdict(request), "out": str(out), "num_workers": num_workers,
            "skip_corrupt": skip_corrupt,
        }  # fmt: skip
        self._asking, self._there = threading.Lock(), Extent(0, False)
        self._process: subprocess.Popen[bytes] | None = None
        self._killed_at = -1
        if not self.extent().is_whole and self._has_ended():
            self._see_to_it()

    def __len__(self) -> int:
        return self.extent().tokens

    def extent(self) -> Extent:
        """As the base class.

        Raises:
            PreparedError: a file is damaged, or what else ends preparing.
            WorkerError: what prepares was killed twice and came no further between.
        """
        with self._asking:
            if not self._there.is_whole:
                self._there = self._found()
            return self._there

    def _found(self) -> Extent:
        if (self.path / DESCRIPTION).exists():
            about = data.Prepared(self.path).about
            _refuse_damage(about["report"], self.skip_corrupt)
            return Extent(about["tokens"], True)
        has_ended = self._has_ended()  # before what it has done at the very end
        with suppress(FileNotFoundError):  # it is finished in this moment, or not begun
            about, _ = progress_of(self.path)
            _refuse_damage(about["report"], self.skip_corrupt)
            if about["tokens"] > self._there.tokens:
                return Extent(about["tokens"], False)
        if has_ended:  # what has ended it is told when all that there is was not enough
            self._see_to_it()
        return self._there

    def _has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _see_to_it(self) -> None:
        """Starts a process where nobody prepares the directory."""
        said = "" if self._process is None else self._why(self._process)
        self._process = None
        if (descriptor := lock.take(self.path)) is None:
            return
        try:
            if not (self.path / DESCRIPTION).exists():
                self._process = _start({**self._asked, "said": said}, descriptor)
                weakref.finalize(self, _end, self._process)
        finally:
            os.close(descriptor)

    def _why(self, process: subprocess.Popen[bytes]) -> str:
        """What is said of a process that has ended too early; raises what it has."""
        assert process.stdout is not None
        try:
            about, _ = read_frame(process.stdout)
        except EOFError:
            why = f"what prepares {self.path} {ended(process.returncode)}"
            if self._killed_at == self._there.tokens:
                raise WorkerError(f"{why}, twice at the same place") from None
            self._killed_at = self._there.tokens
            return f"{why}; it is started again"
        finally:
            _end(process)
        raise data.PreparedError(about["error"])

    @cached_property
    def digest(self) -> str:  # type: ignore[override]
        """Of names and sizes of the files, what makes tokens of them, and the first ones."""
        self.wait(FIRST)
        first = self.read(0, min(FIRST, self._there.tokens))
        return hashlib.sha256(json.dumps(self._what).encode() + first.tobytes()).hexdigest()[:16]

    def wait(self, tokens: int) -> None:
        """Until there are so many, or all; raises as :meth:`extent`."""
        while not self._there.is_whole and self._there.tokens < tokens:
            self.extent()
            with suppress(FileNotFoundError):
                about, _ = progress_of(self.path)
                counts = (about[name] for name in ("file", "num_files", "documents", "tokens"))
                self.show(self.path, Progress(*counts))
            time.sleep(PAUSE_S)


def _refuse_damage(report: Mapping[str, Any], skip_corrupt: bool) -> None:
    """Raises PreparedError: something was left out that another run had not asked to leave out."""
    if report["damaged"] and not skip_corrupt:
        raise data.PreparedError(
            f"{report['damaged'][0][-1]}; data.skip_corrupt=true goes on without the rest of it"
        )


def _start(asked: dict[str, Any], descriptor: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", "from anychip.train.preparing import growing; growing.main()"]
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(descriptor,),
        start_new_session=True,  # Ctrl-C is for the one that trains
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended, as is seen later
        write_frame(process.stdin, {**asked, "taken": descriptor})
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Has it save what it has done, and waits for that."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _interrupt_at_the_end() -> None:
    """When whoever has started this process ends, or wants it to."""
    while os.read(0, 1):  # with a lock of sys.stdin nobody could end this process meanwhile
        pass
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGINT)


def main() -> None:
    """The process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    asked, _ = read_frame(sys.stdin.buffer)
    threading.Thread(target=_interrupt_at_the_end, daemon=True).start()
    os.nice(NICENESS)
    with suppress(KeyboardInterrupt), answering() as answers:
        do(asked, answers)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # there is nothing left to end


def do(asked: dict[str, Any], answers: IO[bytes]) -> None:
    """Prepares what is asked for, and answers with what has ended it too early."""
    request, out, said = Request.of(asked.pop("request")), Path(asked.pop("out")), asked.pop("said")

    def note(text: str) -> None:
        print(f"anychip: {text}", file=sys.stderr, flush=True)

    if said:
        note(said)
    try:
        prepare(request, out, resume=(out / PROGRESS).exists(), note=note, **asked)
    except FileExistsError:
        text = f"{out} was begun, and has nothing to go on with; remove it to begin anew"
        write_frame(answers, {"error": text})
    except Exception as error:
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
        write_frame(answers, {"error": f"{kind}{error}"})
