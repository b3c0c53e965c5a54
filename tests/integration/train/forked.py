"""Jobs of several processes, for tests: one process has imported everything, and forks the ranks
of each job, since to import takes longer than to train a tiny model.

``start(...)`` forks from this process; ``Server`` is for those who have threads and may not fork. A
rank finds what torchrun would tell it, and the job's store is in a process of its own, as with
torchrun. What a launcher does beyond that, ``test_launched.py`` tests with the real ones.
"""

import atexit
import ctypes
import json
import os
import runpy
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_LIMIT_S = 120.0


class Ended(NamedTuple):
    """A rank that has ended; ``at`` is in seconds of the machine's monotonic clock."""

    code: int
    out: str
    err: str
    at: float = 0.0


@dataclass
class Job:
    """Ranks that run; ``pids`` in their order."""

    folder: Path
    pids: list[int] = field(default_factory=list)
    store: int = 0
    codes: dict[int, tuple[int, float]] = field(default_factory=dict)

    def poll(self) -> bool:
        """Notes who has ended; True when all have."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.codes[rank] = (os.waitstatus_to_exitcode(status), time.monotonic())
        return len(self.codes) == len(self.pids)

    def wait(self, limit_s: float = _LIMIT_S, *, but: int | None = None) -> bool:
        """Waits for all ranks, ``but`` for one; False: some were there after the limit."""
        deadline = time.monotonic() + limit_s
        while not self.poll():
            left = {rank for rank in range(len(self.pids)) if rank not in self.codes}
            if left == {but}:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def end(self) -> list[Ended]:
        """Kills what is left, and says what became of each rank."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                os.kill(pid, signal.SIGKILL)
        self.wait()
        if self.store:
            os.kill(self.store, signal.SIGKILL)
            os.waitpid(self.store, 0)
        found = []
        for rank, (code, at) in sorted(self.codes.items()):
            out, err = (self.folder / f"rank{rank}.{end}" for end in ("out", "err"))
            found.append(Ended(code, out.read_text(), err.read_text(), at))
        return found


def prepare() -> None:
    """Imports what a rank needs; call it before :func:`start`, in a process without threads."""
    import matplotlib.figure  # noqa: F401 - the end of a run draws
    import torch.fx.experimental.symbolic_shapes  # noqa: F401 - torch, for tensors without data

    import anychip.cli.train_command
    import anychip.comm.library
    import anychip.comm.messages
    import anychip.train.display
    import anychip.train.loop  # noqa: F401 - and so for all of them


def start(
    args: Sequence[str], world_size: int, *, cwd: Path, is_plain_user: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Job:  # fmt: skip
    """Starts ``anychip ARGS``, or a script with arguments, as ranks or as a process alone.

    Args:
        is_plain_user: without root's right to write where nobody may.
        environment: variables beside those of this process and of the job.
    """
    job = Job(Path(tempfile.mkdtemp(dir=cwd)))
    port = 0
    if world_size > 1:
        job.store, port = _start_store()
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(world_size):
        for name in ("out", "err"):
            (job.folder / f"rank{rank}.{name}").touch()
        pid = os.fork()
        if pid == 0:
            os.environ |= environment or {}
            if is_plain_user:
                _give_up_rights()
            _rank(args, rank, world_size, port, cwd, job.folder)
        job.pids.append(pid)
    return job


def _give_up_rights() -> None:
    """CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH of this process, where it has them."""
    capabilities, header = (ctypes.c_uint32 * 6)(), struct.pack("Ii", 0x20080522, 0)
    libc = ctypes.CDLL(None)
    libc.capget(header, capabilities)
    capabilities[0] &= ~0b110
    assert libc.capset(header, capabilities) == 0


def _start_store() -> tuple[int, int]:
    """The process that has the store of a job, and its port."""
    receives, sends = os.pipe()
    pid = os.fork()
    if pid == 0:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(sends, str(store.port).encode())
        while True:
            signal.pause()
    os.close(sends)
    port = int(os.read(receives, 100))
    os.close(receives)
    return pid, port


def _rank(
    args: Sequence[str], rank: int, world_size: int, port: int, cwd: Path, folder: Path
) -> None:
    code = 70
    try:
        for number, name in ((1, "out"), (2, "err")):
            file = os.open(folder / f"rank{rank}.{name}", os.O_WRONLY)
            os.dup2(file, number)
        os.chdir(cwd)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if world_size > 1:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "ANYCHIP_SECRET": "of the forked ranks",
                "TORCHELASTIC_RUN_ID": "forked", "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
        code = _run(args)
        # What is above closes all by itself; half a second of taking torch down is saved.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(args: Sequence[str]) -> int:
    if args[0].endswith(".py"):
        sys.argv = list(args)
        try:
            runpy.run_path(args[0], run_name="__main__")
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    from anychip.cli.group import run

    return run(args)


class Server:
    """A process that forks for one that may not.

    ``environment``: in place of this process's. ``prefix``: a command that runs it, like unshare.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, *, prefix: Sequence[str] = ()
    ) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(Path(__file__))], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**(environment or os.environ), "OMP_NUM_THREADS": "1"},
            text=True,
        )  # fmt: skip

    def run(self, *args: str, world_size: int = 1, cwd: Path) -> list[Ended]:
        """Runs a job of :func:`start` to its end in a directory; what became of each rank."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([args, world_size, str(cwd)]) + "\n")
        self.process.stdin.flush()
        return [Ended(*found) for found in json.loads(self.process.stdout.readline())]

    def close(self) -> None:
        """Ends the server."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.terminate()  # it may still be importing torch
        self.process.wait()


def serve() -> None:
    """Runs the job of each line of stdin."""
    prepare()
    for line in sys.stdin:
        args, world_size, cwd = json.loads(line)
        job = start(args, world_size, cwd=Path(cwd))
        job.wait()
        print(json.dumps(job.end()), flush=True)


if __name__ == "__main__":
    serve()
