"""What do plugins answer that nobody named? Asked in child processes, all at once.

A plugin that crashes, exits, hangs, prints without end or leaves threads and processes behind ends
its own child and becomes one line of the table. The child's side is :mod:`.probe_child`.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from anychip.children import ended
from anychip.contract import Finding, Probe
from anychip.registry import environment
from anychip.registry.discovery import Plugin
from anychip.registry.loading import one_line

MAX_STDERR = 4096
"""Bytes kept of what a child writes to stderr: enough for its last line."""

_POLL_S = 0.02
_START_CHILD = (
    "import json, sys; request = json.loads(sys.argv[1]); sys.path[:] = request['path']; "
    "from anychip.registry.probe_child import main; main(request)"
)


class Answer(NamedTuple):
    """What a child said of its plugin.

    Attributes:
        probe: the answer to "can you run here?", or what became of the child.
        findings: the backend's diagnosis, if it was asked for.
        faults: what is wrong with its tables and its kernel packs', likewise.
        traceback: of the exception that is the probe's reason, if there was one.
    """

    probe: Probe
    findings: tuple[Finding, ...] = ()
    faults: tuple[str, ...] = ()
    traceback: str | None = None


def probe_all(plugins: Sequence[Plugin], *, examine: str | None = None) -> list[Answer]:
    """Probes each plugin in a process of its own, at the same time, and returns the answers.

    Args:
        examine: asks for a diagnosis too: the ``module:function`` that finds faults in tables.

    Raises:
        AmbiguousBackendError, ContractError: this process may not start probes.
    """
    environment.require_probing_allowed()
    limit_s = environment.probe_timeout_s()
    with tempfile.TemporaryDirectory(prefix="anychip-probe-") as directory:
        children: list[_Child] = []
        try:
            for number, plugin in enumerate(plugins):
                children.append(_Child(plugin, Path(directory) / f"{number}.json", examine))
            _wait(children, limit_s)
        finally:  # also on Ctrl-C: the children are in sessions of their own and do not see it
            for child in children:
                child.end()
        return [child.answer(limit_s) for child in children]


class _Child:
    """One probe: a process in a group of its own, a file for its answer, the end of its stderr."""

    def __init__(self, plugin: Plugin, answer_file: Path, examine: str | None) -> None:
        self.answer_file = answer_file
        self.stderr_tail = b""
        request = {
            "name": plugin.name, "module": plugin.module, "distribution": plugin.distribution,
            "version": plugin.version, "problem": plugin.problem, "examine": examine,
            "answer_file": str(answer_file), "path": sys.path,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START_CHILD, json.dumps(request)], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={**os.environ, environment.INSIDE_PROBE: "1"}, start_new_session=True,
        )  # fmt: skip
        assert self.process.stderr is not None
        self.stderr = self.process.stderr
        self.timed_out = False

    def is_running(self) -> bool:
        return self.process.poll() is None

    def read_stderr(self) -> bool:
        """Reads what is there; False at the end of the stream."""
        chunk = os.read(self.stderr.fileno(), 1 << 16)
        self.stderr_tail = (self.stderr_tail + chunk)[-MAX_STDERR:]
        return bool(chunk)

    def end(self) -> None:
        """Kills the whole group, which also holds what the plugin started, and reaps the child."""
        self.timed_out = self.is_running()
        with suppress(ProcessLookupError, PermissionError):  # nobody is left in the group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.stderr.close()

    def answer(self, limit_s: float) -> Answer:
        """The child's answer; without one, how it ended. Called after ``end``."""
        if self.answer_file.exists():
            message = json.loads(self.answer_file.read_text(encoding="utf-8"))
            return Answer(
                Probe.from_json(message["probe"]),
                tuple(Finding(*finding) for finding in message["findings"]),
                tuple(message["faults"]),
                message["traceback"],
            )
        reason = f"its process {ended(self.process.returncode)} without an answer"
        if self.timed_out:
            reason = f"no answer within {limit_s:g} s"
        return Answer(Probe.broken(reason + self._last_words()))

    def _last_words(self) -> str:
        lines = self.stderr_tail.decode(errors="replace").strip().splitlines()
        last = one_line(lines[-1]) if lines else ""
        return f"; its last line on stderr: {last}" if last else ""


def _wait(children: Sequence[_Child], limit_s: float) -> None:
    """Returns when every child has ended or the time is up. Drains stderr, so that none blocks."""
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.stderr, selectors.EVENT_READ, child)
        while time.monotonic() < deadline and any(child.is_running() for child in children):
            for key, _ in selector.select(timeout=_POLL_S):
                if not key.data.read_stderr():
                    selector.unregister(key.fileobj)
        for key, _ in selector.select(timeout=0):  # what was written just before the end
            key.data.read_stderr()
