"""Processes that are measured in turns: each is told when to run, and waits in between.

``with Ranks(2, "cpu", "benchmarks.turns") as ranks: ranks.call("turn", steps=1)`` calls that
module's ``turn(place, steps=1)`` in both processes and returns what both answered. Arguments and
answers are JSON. The processes find each other by a store that this one keeps, as under torchrun;
each computes with one host thread.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from anychip.children import Child, lines_of
from anychip.comm.joining import loopback_store, one_machine
from anychip.contract import AnychipError

TIMEOUT_S = 300.0
"""Seconds that a rank waits for another one."""
CALL_S = 3600.0
"""A call may take so long."""


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
        told = {"world_size": world_size, "port": self._store.port, "path": sys.path}
        told |= {"backend": backend, "module": module}
        variables = {**os.environ, **one_machine()}
        self._members = [Child.start("anychip.bench.rank", variables) for _ in range(world_size)]
        try:
            self._ask([{**told, "rank": rank} for rank in range(world_size)])
        except RankError:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def call(self, function: str, **arguments: Any) -> list[Any]:
        """Calls a function of the module on every rank at once; its values, in rank order.

        Raises:
            RankError: a rank raised, or ended; nothing can be called any more.
        """
        return self._ask([[function, arguments]] * self.world_size)

    def _ask(self, messages: Sequence[Any]) -> list[Any]:
        for member, message in zip(self._members, messages, strict=True):
            member.tell(message)
        told = dict(lines_of(self._members, CALL_S))
        answers = {rank: json.loads(line) for rank, line in sorted(told.items())}
        for rank, member in enumerate(self._members):
            if rank not in answers:
                raise RankError(f"rank {rank}: {member.how_it_ended(CALL_S)}")
        for answer in answers.values():
            if "error" in answer:
                raise RankError(answer["error"])
        return [answer["value"] for answer in answers.values()]

    def close(self) -> None:
        """Ends the processes."""
        while self._members:
            self._members.pop().end()


def slowest(answers: Sequence[Mapping[str, Any]], key: str) -> float:
    """The largest value of the ranks."""
    return max(float(answer[key]) for answer in answers)
