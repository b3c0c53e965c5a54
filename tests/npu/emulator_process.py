"""Programs on the emulated CANN, each in a process of its own with its settings and faults.

Settings are read once in a process, and faults end it, so that every program needs a new one.
Importing torch_npu takes seconds: a server process has done it, and forks for each program.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

Program = Callable[..., None]

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch_npu", "anychip_npu.operators", "anychip.ops"])


class Ended(NamedTuple):
    """How a process ended: its exit code, below 0 for a signal, and what it printed."""

    code: int | None
    out: str
    err: str

    def checked(self) -> Ended:
        """Itself, when the program came to its end.

        Raises:
            AssertionError: it did not; with the end of what it printed.
        """
        assert self.code == 0, f"exit code {self.code}: {self.out[-1000:]}{self.err[-4000:]}"
        return self


def run(program: Program, *arguments: Any, timeout_s: float = 60, **settings: object) -> Ended:
    """Runs ``program(*arguments)`` with ANYCHIP_CANN_<name> = value for each of the settings."""
    (ended,) = run_ranks(program, 1, *arguments, timeout_s=timeout_s, **settings)
    return ended


def run_ranks(
    program: Program, ranks: int, *arguments: Any, timeout_s: float = 90, **settings: object
) -> list[Ended]:
    """Runs it in several processes, which get what torch's init_process_group looks for.

    A process that is still there after ``timeout_s`` is killed: its code is None.
    """
    variables = {f"ANYCHIP_CANN_{name}": str(value) for name, value in settings.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = {"INIT_METHOD": f"file://{folder / 'store'}", "WORLD_SIZE": str(ranks)}
        processes = []
        for rank in range(ranks):
            environment = {**variables, **store, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            given = (program, arguments, environment, folder / str(rank))
            process = _SERVER.Process(target=_run_here, args=given)
            process.start()
            processes.append(process)
        codes = _codes(processes, time.monotonic() + timeout_s)
        texts = [[_text(folder / f"{r}.{end}") for end in ("out", "err")] for r in range(ranks)]
    return [Ended(code, out, err) for code, (out, err) in zip(codes, texts, strict=True)]


def _codes(processes: Sequence[BaseProcess], end_s: float) -> list[int | None]:
    codes = []
    for process in processes:
        process.join(max(0.1, end_s - time.monotonic()))
        codes.append(process.exitcode)
        if process.exitcode is None:
            process.kill()
            process.join()
    return codes


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _run_here(
    program: Program, arguments: Sequence[Any], environment: Mapping[str, str], path: Path
) -> None:
    """In the forked process: what is printed goes to files, C++'s too."""
    for descriptor, end in ((1, "out"), (2, "err")):
        file = os.open(f"{path}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    # Buffered, they would be lost when the program kills itself.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    # The server has the variables of the test that was its first.
    os.environ.pop("ASCEND_LAUNCH_BLOCKING", None)
    os.environ.update(environment)
    program(*arguments)
