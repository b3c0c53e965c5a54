"""Runs cases in child processes: a segmentation fault or a hang is one failed case, not the end.

One child runs case after case and reports each over a pipe of its own, so that a backend may print
what it likes. When it dies or takes too long, the case at hand has failed, and a new child goes on
with the next. A child is a fresh interpreter (never a fork) in a process group of its own.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Any

from anychip import registry
from anychip.conformance.case import Case
from anychip.conformance.chapters import CHAPTERS
from anychip.conformance.planning import SuitePlan
from anychip.conformance.report import Result
from anychip.dispatch import selection
from anychip.dispatch.tally import unserved

STARTUP_S = 120.0
"""A child may take so long to import torch and the plugin, before its first case."""
TAIL = 400
"""Characters of a dead child's stderr that its case's reason shows."""


class Served:
    """Provenance of several processes, added up."""

    def __init__(self) -> None:
        self.calls: dict[str, Counter[tuple[tuple[str, Any], ...]]] = {}

    def add(self, found: Mapping[str, Any]) -> None:
        """One more provenance's JSON."""
        for part in ("operators", "refused", "torch"):
            known = self.calls.setdefault(part, Counter())
            for row in found.get(part, ()):
                key = tuple((name, value) for name, value in row.items() if name != "calls")
                known[key] += row["calls"]

    def add_idle(self, plan: SuitePlan) -> None:
        """Every row that may have served nothing; of a partial run those of what was called."""
        whole = not plan.select and plan.chapters == tuple(CHAPTERS)
        called = {
            (dict(key)["operator"], dict(key)["direction"]) for key in self.calls["operators"]
        }
        idle = [
            asdict(unserved(row, provider))
            for provider in selection.providers_for(plan.backend.device_type)
            for row in provider.table
            if whole or (row.operator, row.direction) in called
        ]
        self.add({"operators": idle, "refused": ()})

    def to_json(self) -> dict[str, Any]:
        """As ``Provenance.to_json``; rows that served no call have 0 of them."""
        parts = {
            part: [{**dict(key), "calls": calls} for key, calls in known.items()]
            for part, known in self.calls.items()
        }
        parts["operators"].sort(
            key=lambda r: (r["operator"], r["direction"] != "forward", r["kind"])
        )
        return {"schema": 1, **parts}


def run_isolated(
    plan: SuitePlan, cases: Sequence[Case], limit_s: float, served: Served
) -> Iterator[Result]:
    """Results of some of a plan's cases, in order.

    Args:
        served: is told what served the operators of each case.

    Raises:
        ValueError: the backend was made by hand, and a child could not find it by its name.
    """
    backend = plan.backend
    if registry.provenance_of(backend)[1] == "not installed":
        raise ValueError(
            f"--isolate starts child processes that look for {backend.name!r} among the installed "
            "plugins; this one was handed over as an object"
        )
    remaining = [case.id for case in cases]
    while remaining:
        child = Child.start(plan, remaining)
        try:
            for result in child.results(limit_s, served):
                remaining.remove(result.case)
                yield result
        finally:
            child.end()


@dataclass
class Child:
    """One child process and what it was given."""

    process: subprocess.Popen[bytes]
    pipe: int
    errors: IO[bytes]
    ids: Sequence[str]
    limit_s: float = STARTUP_S

    @classmethod
    def start(cls, plan: SuitePlan, ids: Sequence[str]) -> Child:
        """Starts a child on the given cases."""
        read, write = os.pipe()
        errors = tempfile.TemporaryFile()
        process = subprocess.Popen(
            [sys.executable, "-m", "anychip.conformance.worker", str(write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=(write,),
            start_new_session=True,
        )
        os.close(write)
        assert process.stdin is not None
        name = registry.name_of(plan.backend)
        request = {"backend": name, "level": plan.level, "seed": plan.seed, "cases": list(ids)}
        with suppress(BrokenPipeError):  # it is dead already; `results` says so
            process.stdin.write(json.dumps(request).encode())
            process.stdin.close()
        return cls(process, read, errors, list(ids))

    def results(self, limit_s: float, served: Served) -> Iterator[Result]:
        """What the child reports; at its death a failed result for the case at hand, and no more.

        Raises:
            RuntimeError: it died before its first case, so that no other child would do better.
        """
        done = 0
        for message in self._messages():
            if message is None:
                reason = self._how_it_ended()
                if self.limit_s == STARTUP_S:
                    raise RuntimeError(f"the process that asks the cases did not start: {reason}")
                yield Result(case=self.ids[done], outcome="failed", reason=reason, crashed=True)
                return
            if "ready" in message:
                self.limit_s = limit_s
                continue
            done += 1
            served.add(message["served"])
            yield Result.from_json(message["result"])
            if done == len(self.ids):
                return

    def _messages(self) -> Iterator[dict[str, Any] | None]:
        """Lines of the pipe; None once when there will be no more, or not in time."""
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipe, selectors.EVENT_READ)
            until = time.monotonic() + self.limit_s
            while selector.select(max(0.0, until - time.monotonic())):
                chunk = os.read(self.pipe, 1 << 16)
                if not chunk:
                    break
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    yield json.loads(line)
                if lines:
                    until = time.monotonic() + self.limit_s
        yield None

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = self.process.returncode
        if code is None:
            reason = f"no answer within {self.limit_s:g} s; the process was ended"
        elif code < 0:
            reason = f"the process died with {signal.Signals(-code).name}"
        else:
            reason = f"the process ended with exit code {code} in the middle of the case"
        last = self._last_words()
        return f"{reason}\nits last words: {last}" if last else reason

    def _last_words(self) -> str:
        self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, self.errors.tell() - TAIL))
        return " ".join(self.errors.read().decode(errors="replace").split())

    def end(self) -> None:
        """Ends the child and everything that it started, and waits for it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.pipe)
        self.errors.close()
