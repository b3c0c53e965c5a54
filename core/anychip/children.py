"""A child process that is told things on its stdin, and answers by lines of a pipe of its own.

So it may print what it likes. It is a fresh interpreter, never a fork, in a process group of its
own, and what it wrote to stderr last is shown when it dies.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from signal import SIGKILL, Signals
from typing import IO, Any

STARTUP_S = 120.0
"""A child may take so long to import torch and the plugin, before it is asked anything."""
TAIL = 400
"""Characters of a dead child's stderr that are shown."""


@dataclass
class Child:
    """One process, what it is told through, and what it answers through."""

    process: subprocess.Popen[str]
    pipe: int
    errors: IO[bytes]
    unread: bytes = b""

    @classmethod
    def start(cls, module: str, variables: Mapping[str, str] | None = None) -> Child:
        """Runs a module, whose argument is the file descriptor of the pipe."""
        read, write = os.pipe()
        errors = tempfile.TemporaryFile()
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=variables,
            pass_fds=(write,),
            start_new_session=True,
            text=True,
        )
        os.close(write)
        return cls(process, read, errors)

    def tell(self, message: Any) -> None:
        """A line of JSON."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead; the answer that does not come says so
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def take_line(self) -> str | None:
        """What was read and is a whole line."""
        line, end, rest = self.unread.partition(b"\n")
        if not end:
            return None
        self.unread = rest
        return line.decode()

    def how_it_ended(self, limit_s: float) -> str:
        """Why there is no answer."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = self.process.returncode
        if code is None:
            return f"no answer within {limit_s:g} s; the process was ended"
        self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, self.errors.tell() - TAIL))
        last = " ".join(self.errors.read().decode(errors="replace").split())
        return f"the process {ended(code)}" + (f"; its last words: {last}" if last else "")

    def end(self) -> None:
        """Ends the child and everything that it started, and waits for it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        os.close(self.pipe)
        self.errors.close()


def ended(code: int) -> str:
    """How a process did, by its exit code as ``subprocess`` has it."""
    try:
        return f"ended with exit code {code}" if code >= 0 else f"died with {Signals(-code).name}"
    except ValueError:
        return f"died with signal {-code}"  # a real-time one, which has no name


def lines_of(children: Sequence[Child], limit_s: float) -> Iterator[tuple[int, str]]:
    """One line of each as they come, with its number; fewer when one ends, or the time is over."""
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for number, child in enumerate(children):
            if (known := child.take_line()) is not None:
                yield number, known
            else:
                selector.register(child.pipe, selectors.EVENT_READ, number)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                child = children[key.data]
                chunk = os.read(child.pipe, 1 << 16)
                child.unread += chunk
                line = child.take_line()
                if line is not None or not chunk:
                    selector.unregister(child.pipe)
                if line is not None:
                    yield key.data, line
