"""Processes that are measured in turns: each is told when to run, and waits in between.

``with Ranks(2, "cpu", "benchmarks.turns") as ranks: ranks.call("turn", steps=1)`` calls that
module's ``turn(place, steps=1)`` in both processes and returns what both answered. Arguments and
answers are JSON. The processes find each other by a store that this one keeps, as under torchrun;
each computes with one host thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import IO, Any

from anychip.comm.joining import loopback_store, one_machine
from anychip.contract import AnychipError

TIMEOUT_S = 300.0
"""Seconds that a rank waits for another one."""
_END_S = 20.0
_TAIL_LINES = 12


class RankError(AnychipError, RuntimeError):
    """A rank answered with an error, or ended."""


class Ranks:
    """Some processes on this machine, joined by torch's default process group.

    Args:
        world_size: processes.
        backend: name of the backend that each uses.
        module: whose functions :meth:`call` calls, with a
            :class:`~anychip.bench.rank.Place` first.
    """

    def __init__(self, world_size: int, backend: str, module: str) -> None:
        self.world_size = world_size
        self._store = loopback_store(timedelta(seconds=TIMEOUT_S))
        self._variables = {**os.environ, **one_machine()}
        self._errors = [tempfile.TemporaryFile() for _ in range(world_size)]
        self._processes = [
            self._start(rank, backend, module, errors) for rank, errors in enumerate(self._errors)
        ]
        try:
            self._answers()
        except RankError:
            self.close()
            raise

    def _start(
        self, rank: int, backend: str, module: str, errors: IO[bytes]
    ) -> subprocess.Popen[str]:
        told = {
            "rank": rank, "world_size": self.world_size, "port": self._store.port,
            "backend": backend, "module": module, "path": sys.path,
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "-m", "anychip.bench.rank", json.dumps(told)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=errors, env=self._variables, text=True,
        )  # fmt: skip

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def call(self, function: str, **arguments: Any) -> list[Any]:
        """Calls a function of the module on every rank at once; its values, in rank order.

        Raises:
            RankError: a rank raised, or ended; nothing can be called any more.
        """
        line = json.dumps([function, arguments]) + "\n"
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                raise RankError(self._ended(rank)) from None
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RankError(self._ended(rank))
            answers.append(json.loads(line))
        failed = [answer["error"] for answer in answers if "error" in answer]
        if failed:
            raise RankError(failed[0])
        return [answer["value"] for answer in answers]

    def _ended(self, rank: int) -> str:
        code = self._processes[rank].wait(_END_S)
        self._errors[rank].seek(0)
        lines = self._errors[rank].read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n  ".join([f"rank {rank} ended with exit code {code}", *lines])

    def close(self) -> None:
        """Ends the processes; one that does not answer is killed."""
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for errors in self._errors:
            errors.close()


def slowest(answers: Sequence[Mapping[str, Any]], key: str) -> float:
    """The largest value of the ranks."""
    return max(float(answer[key]) for answer in answers)
