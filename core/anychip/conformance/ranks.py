"""Ranks of jobs as processes, for questions about a backend's collectives.

One fresh interpreter per rank makes the backend anew and its communicator with it, and answers
question after question (:mod:`.rank_questions`, :mod:`.rank_rules`, :mod:`.rank_failures`) until it
is told to end. The first of the same processes are the job of each number of ranks that is asked.
They start with the first question, or are started before it, and end with the :class:`Ranks`; when
one dies or hangs, all are ended, and the next question finds new ones.
"""

import importlib
import json
import os
import sys
import weakref
from dataclasses import dataclass
from typing import Any

from anychip import registry
from anychip.children import STARTUP_S, Child, lines_of
from anychip.comm.joining import loopback_store, one_machine
from anychip.conformance.asking import activate
from anychip.contract import Backend

MOST = 4
"""Ranks of the largest job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a rank said to a question.

    Attributes:
        value: what the question's function returned.
        error: type and message of what it raised.
        kind: name of the error's type; ``died`` when the rank is gone.
        ranks: of a CommunicationError.
        seconds: how long it took.
    """

    value: Any = None
    error: str = ""
    kind: str = ""
    ranks: tuple[int, ...] = ()
    seconds: float = 0.0


def reference_to(backend: Backend) -> dict[str, str]:
    """How another process finds a backend: the plugin's name, or the class where it is imported.

    Raises:
        ValueError: it is neither installed nor of a class that can be imported.
    """
    if registry.provenance_of(backend)[1] != "not installed":
        return {"name": registry.name_of(backend)}
    kind = type(backend)
    found = getattr(importlib.import_module(kind.__module__), kind.__qualname__, None)
    if found is not kind or kind.__module__ == "__main__":
        raise ValueError(
            f"ranks are processes that make the backend {backend.name!r} anew: an installed plugin "
            f"or a class that can be imported expected, got {kind.__module__}.{kind.__qualname__}"
        )
    return {"module": kind.__module__, "class": kind.__qualname__}


def backend_of(reference: dict[str, str]) -> Backend:
    """The backend that :func:`reference_to` describes, serving its device type from now on."""
    if "name" in reference:
        return activate(reference["name"])
    made = getattr(importlib.import_module(reference["module"]), reference["class"])()
    return activate(made)


class Ranks:
    """The processes of one job after the other.

    Args:
        backend: what each rank makes anew.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._members: list[Child] = []
        self._store: Any = None
        self._jobs_made, self._world_size = 0, 0
        self._have_met = False
        # Processes end with the object, or with the interpreter, whichever is first.
        weakref.finalize(self, _end, self._members)

    def ask(
        self, question: str, *, world_size: int, limit_s: float = 60.0, **arguments: Any
    ) -> list[Answer]:
        """Asks all ranks of a job at once; their answers in rank order.

        Args:
            question: a function of :mod:`.rank_questions`, :mod:`.rank_rules` or
                :mod:`.rank_failures`.
            world_size: number of ranks, at most :data:`MOST`.
            limit_s: seconds until a rank that has not answered is ended; its answer says so.
        """
        if world_size != self._world_size:
            self._join(world_size)
        answers = self._ask({"question": question, "arguments": arguments}, world_size, limit_s)
        if any(answer.kind for answer in answers):
            # Whoever did not notice has the old communicator; all have to make a new one.
            self._world_size = 0
        return answers

    def start(self) -> None:
        """Starts the processes, which import torch while the caller does something else."""
        if not self._members:
            variables = {**os.environ, **one_machine()}
            for _ in range(MOST):
                self._members.append(Child.start("anychip.conformance.rank_worker", variables))
                self._members[-1].tell({"path": sys.path})

    def become(self, backend: Backend) -> None:
        """Goes on with another backend in processes that run already; a start is spared."""
        self.backend, self._world_size = backend, 0

    def _ask(self, message: dict[str, Any], world_size: int, limit_s: float) -> list[Answer]:
        members = self._members[:world_size]
        for member in members:
            member.tell(message)
        answers = [Answer(kind="died")] * world_size
        for rank, line in lines_of(members, limit_s):
            answers[rank] = _read(line)
        for rank, member in enumerate(members):
            if answers[rank].kind == "died":
                answers[rank] = Answer(kind="died", error=member.how_it_ended(limit_s))
        if any(answer.kind == "died" for answer in answers):
            self.close()
        return answers

    def close(self) -> None:
        """Ends all processes."""
        _end(self._members)
        self._store = None
        self._world_size, self._have_met = 0, False

    def _join(self, world_size: int) -> None:
        had_met = self._have_met
        problem = self._meet(world_size)
        if problem and had_met:  # a call that failed may have cost a process its device
            problem = self._meet(world_size)
        if problem:
            raise RuntimeError(problem)
        self._world_size, self._have_met = world_size, True

    def _meet(self, world_size: int) -> str:
        """Makes the first processes a job; if that fails ends all, and says why."""
        found = reference_to(self.backend)
        self._store = self._store or loopback_store()
        self.start()
        self._jobs_made += 1
        for rank, member in enumerate(self._members[:world_size]):
            place = {"rank": rank, "world_size": world_size, "port": self._store.port}
            member.tell({"backend": found, "number": self._jobs_made, **place})
        waiting = dict(enumerate(self._members[:world_size]))
        why = ""
        for rank, line in lines_of(self._members[:world_size], STARTUP_S):
            del waiting[rank]
            if why := _read(line).error:  # for this one the others wait in vain
                break
        else:
            rank = min(waiting, default=0)
            why = waiting[rank].how_it_ended(STARTUP_S) if waiting else ""
        if why:
            self.close()
        return why and f"rank {rank} of {world_size} did not start: {why}"


def _read(line: str) -> Answer:
    fields = json.loads(line)
    return Answer(**{**fields, "ranks": tuple(fields.get("ranks", ()))})


def _end(members: list[Child]) -> None:
    while members:
        members.pop().end()
