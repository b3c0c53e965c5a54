"""What does a Python process do that finds torch imported? For tests that start many of them.

``run`` is ``subprocess.run([sys.executable, ...])`` but for the seconds that importing torch takes:
one process has done that, and forks. The fork gets its own environment variables, directory, import
path and files, knows no module of ours, and ends as an interpreter does. Not for tests about what
is imported when, or about extensions that torch loads by itself.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_IMPORTED = ("torch", "click", "rich.progress", "matplotlib.figure", "pluggy")
"""What commands of ours import of others."""


def run(
    *args: str, env: Mapping[str, str] | None = None, cwd: Path | None = None,
    timeout: float = 200.0,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Runs ``python ARGS`` to its end; ``args`` begin with -c, -m, or the name of a script.

    Raises:
        subprocess.TimeoutExpired: it was killed after ``timeout`` seconds.
    """
    server = _server(os.getpid(), threading.get_ident())
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("out", "err")]
        given = [args, dict(env or os.environ), str(cwd or Path.cwd()), *map(str, files)]
        try:
            server.stdin.write(json.dumps([timeout, *given]) + "\n")
            server.stdin.flush()
            code, is_late = json.loads(server.stdout.readline())
        except BaseException:  # what it says next would be taken for another's answer
            server.kill()
            _server.cache_clear()
            raise
        out, err = (file.read_text() for file in files)
    if is_late:
        raise subprocess.TimeoutExpired(args, timeout, out, err)
    return subprocess.CompletedProcess(args, code, out, err)


@functools.cache
def _server(process: int, thread: int) -> subprocess.Popen[str]:
    """One for each thread of a process of tests; it ends when that closes its stdin."""
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}, text=True,
    )  # fmt: skip
    atexit.register(_close, server)
    return server


def _close(server: subprocess.Popen[str]) -> None:
    with server:  # closes stdin, and waits
        pass


def _serve() -> list[str] | None:
    """Forks for each line of stdin. Returns in the fork, with what it is to run; None at the end.

    Imports what many of them need: nothing of ours.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an extension of torch prints is no answer
    for name in _IMPORTED:
        importlib.import_module(name)
    del sys.path[0]
    gc.freeze()  # or the forks would copy it all
    while line := sys.stdin.readline():
        timeout, args, env, cwd, *files = json.loads(line)
        pid = os.fork()
        if pid == 0:
            answers.close()
            _become(args, env, cwd, files)
            return list(args)
        print(json.dumps(_wait(pid, time.monotonic() + timeout)), file=answers, flush=True)
    return None


def _wait(pid: int, deadline: float) -> tuple[int, bool]:
    """The exit code of a fork, and whether it was killed for being late."""
    is_late = False
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if not is_late and time.monotonic() > deadline:
            is_late = True
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(ended[1]), is_late


def _become(args: list[str], env: Mapping[str, str], cwd: str, files: list[str]) -> None:
    """Takes over everything that an interpreter has from whoever starts it."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    first = {"-c": "", "-m": cwd}.get(args[0], str(Path(args[0]).parent))
    sys.path[:0] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.orig_argv = [sys.executable, *args]
    sys.argv = list(args) if first == str(Path(args[0]).parent) else args[1:]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()


def _main(args: list[str]) -> None:
    """Runs what the fork is for, and ends it; a second of taking torch down is saved."""
    code: Any = 0
    try:
        _execute(args)
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(int(code or 0) if not isinstance(code, str) else 1)


def _execute(args: list[str]) -> None:
    if args[0] == "-m":
        runpy._run_module_as_main(args[1])  # type: ignore[attr-defined]
    elif args[0] == "-c":
        sys.argv = ["-c", *args[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(args[1], "<string>", "exec"), main.__dict__)
    else:
        runpy.run_path(args[0], run_name="__main__")


if __name__ == "__main__":
    forked = _serve()
    if forked is not None:
        _main(forked)
