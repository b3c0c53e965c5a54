"""Ranks of a job as processes, for questions about a backend's collectives.

One fresh interpreter per rank makes the backend anew and its communicator with it, and answers
question after question (:mod:`.rank_questions`, :mod:`.rank_failures`) until it is told to end. The
processes start with the first question, or are started before it, and end with the :class:`Ranks`;
when one dies or hangs, all are ended, and the next question finds new ones.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import weakref
from dataclasses import dataclass
from typing import Any

from anychip import registry
from anychip.comm.joining import loopback_store, one_machine
from anychip.conformance.asking import activate
from anychip.conformance.children import STARTUP_S, Child, lines_of
from anychip.contract import Backend


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
    if found is not kind:
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
    """The processes of one job.

    Args:
        backend: what each rank makes anew.
        world_size: number of ranks.
    """

    def __init__(self, backend: Backend, world_size: int) -> None:
        self.backend, self.world_size = backend, world_size
        self._members: list[Child] = []
        self._store: Any = None
        self._joined = False
        # Processes end with the object, or with the interpreter, whichever is first.
        weakref.finalize(self, _end, self._members)

    def ask(self, question: str, *, limit_s: float = 60.0, **arguments: Any) -> list[Answer]:
        """Asks all ranks at once; their answers in rank order.

        Args:
            question: a function of :mod:`.rank_questions` or :mod:`.rank_failures`.
            limit_s: seconds until a rank that has not answered is ended; its answer says so.
        """
        if not self._joined:
            self._join()
        answers = self._ask({"question": question, "arguments": arguments}, limit_s)
        if self._members and any(answer.kind for answer in answers):
            # Whoever did not notice has the old communicator; all have to make a new one.
            self._ask({"backend": None}, limit_s)
        return answers

    def start(self) -> None:
        """Starts the processes, which import torch while the caller does something else."""
        if not self._members:
            variables = {**os.environ, **one_machine()}
            for _ in range(self.world_size):
                self._members.append(Child.start("anychip.conformance.rank_worker", variables))
                self._members[-1].tell({"path": sys.path})

    def become(self, backend: Backend) -> None:
        """Goes on with another backend in processes that run already; a start is spared."""
        self.backend = backend
        if self._joined:
            self._ask({"backend": reference_to(backend)}, STARTUP_S)

    def _ask(self, message: dict[str, Any], limit_s: float) -> list[Answer]:
        for member in self._members:
            member.tell(message)
        answers = [Answer(kind="died")] * self.world_size
        for rank, line in lines_of(self._members, limit_s):
            answers[rank] = _read(line)
        for rank, member in enumerate(self._members):
            if answers[rank].kind == "died":
                answers[rank] = Answer(kind="died", error=member.how_it_ended(limit_s))
        if any(answer.kind == "died" for answer in answers):
            self.close()
        return answers

    def close(self) -> None:
        """Ends all processes."""
        _end(self._members)
        self._store = None
        self._joined = False

    def _join(self) -> None:
        found = reference_to(self.backend)
        self._store = loopback_store()
        self.start()
        for rank, member in enumerate(self._members):
            job = {"rank": rank, "world_size": self.world_size, "port": self._store.port}
            member.tell({"backend": found, **job})
        ready = dict(lines_of(self._members, STARTUP_S))
        answers = [_read(ready[r]) if r in ready else None for r in range(self.world_size)]
        for rank, (member, answer) in enumerate(zip(self._members, answers, strict=True)):
            if answer is None or answer.kind:
                why = member.how_it_ended(STARTUP_S) if answer is None else answer.error
                self.close()
                raise RuntimeError(f"rank {rank} of {self.world_size} did not start: {why}")
        self._joined = True


def _read(line: str) -> Answer:
    fields = json.loads(line)
    return Answer(**{**fields, "ranks": tuple(fields.get("ranks", ()))})


def _end(members: list[Child]) -> None:
    while members:
        members.pop().end()
