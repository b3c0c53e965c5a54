"""One mutant against the suite, in a process of its own.

The process is forked off one that has torch and all else of others imported, and nothing of ours:
it imports our code anew, one file of it changed. What a change does to a process (a crash, a hang,
memory without end) ends that process alone.
"""

import importlib.abc
import importlib.machinery
import itertools
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal, Protocol

from tests.mutants.subjects import Backend

Level = Literal["quick", "full"]
Outcome = Literal["survived", "value", "exception", "import", "crash", "hang"]
PRELOADED = [
    "numpy", "torch", "torch._dynamo", "torch.distributed.tensor", "pluggy", "rich.console",
    "rich.progress", "tomlkit", "click", "tests.mutants.trial",
]  # fmt: skip
"""What every process has from its parent."""
CHAPTERS = ("device", "operators", "gradients", "random", "optimizer")
"""Those that come to operators."""
LIMIT_S: dict[Level, int] = {"quick": 40, "full": 900}
"""Processor time of one case: several times what the longest one takes."""
MEMORY = 12 << 30
"""Address space that a process may have beside what it starts with."""
RULES = {
    "adamw": ("adamw",), "sgd": ("sgd", "momentum", "nesterov"), "lion": ("lion",),
    "lamb": ("lamb",), "lamb_sums_of_squares": ("lamb",),
}  # fmt: skip
"""Operators to their subjects of the chapter `optimizer`."""
WAYS = {
    "l2_norm": "clip", "clip": "clip", "sums_of_squares": "clip", "unscale_and_check": "scaled",
}  # fmt: skip
"""Operators to the ways of that chapter in which every subject calls them."""
RANDOM = {
    "dropout", "bias_dropout_add", "dropout_add_rms_norm", "dropout_add_layer_norm",
    "attention_dropout", "quantize",
}  # fmt: skip


class Wrong(Protocol):
    """Makes a wrong backend."""

    def __call__(self) -> Any:
        """The backend, in the process that is to ask it."""
        ...

    def before(self, case: str) -> None:
        """Told of each case before it is asked."""
        ...

    def why(self) -> str:
        """Why no case that has been asked noticed."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a process is to find out.

    Attributes:
        backend: whose rows.
        operators: the operators whose cases are asked.
        level: quick; or full, which asks what quick leaves out, too.
        file, text: the changed file, and what it holds; None: nothing is changed.
        cases: ids, to ask these and no others.
        wrong: makes another backend in place of that of this name, and says why it survives.
        chapters: whose cases are asked, whatever operators they come to.
        limit_s: of processor time for each case; None: what is usual for the level.
    """

    backend: Backend
    operators: tuple[str, ...] = ()
    level: Level = "quick"
    file: str | None = None
    text: str | None = None
    cases: tuple[str, ...] | None = None
    wrong: Wrong | None = None
    chapters: tuple[str, ...] = ()
    limit_s: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What it has found out.

    Attributes:
        outcome: survived; or what killed: a wrong ``value``, any other ``exception`` in a case, one
            at ``import``, a ``crash``, a ``hang``.
        case: the first case that failed.
        reason: in words.
        asked: how many cases were run.
    """

    outcome: Outcome
    case: str = ""
    reason: str = ""
    asked: int = 0


def main(question: Question, pipe: Connection) -> None:
    """Sends the id of each case before it is asked; then the answer."""
    _limit()
    try:
        backend, cases = _prepare(question)
    except BaseException as error:
        pipe.send(Answer(outcome="import", reason=_last_line(error)))
        return
    from anychip.conformance import designs
    from anychip.conformance.asking import run_case

    designs.FAILURES = 1  # more are for what they have in common
    for asked, case in enumerate(cases):
        pipe.send(case.id)
        if question.wrong:
            question.wrong.before(case.id)
        signal.setitimer(signal.ITIMER_PROF, question.limit_s or LIMIT_S[question.level])
        result = run_case(case, backend, question.level)
        if not result.ok:
            is_exception = "\nraised at " in result.reason
            pipe.send(
                Answer(
                    outcome="exception" if is_exception else "value",
                    case=case.id,
                    reason=result.reason.splitlines()[0][:200] if result.reason else "",
                    asked=asked + 1,
                )
            )
            return
    why = question.wrong.why() if question.wrong else ""
    pipe.send(Answer(outcome="survived", asked=len(cases), reason=why))


def _limit() -> None:
    """One thread; bounded memory; no core files; nothing on the terminal."""
    import torch

    torch.set_num_threads(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def _prepare(question: Question) -> tuple[Any, list[Any]]:
    """Imports our code with the change; the backend, in service, and its cases."""
    if question.file is not None and question.text is not None:
        sys.meta_path.insert(0, _Changed(_module(question.file), question.text))
    from anychip.conformance.asking import activate
    from anychip.conformance.case import Context
    from anychip.conformance.chapters import all_cases

    backend = activate(question.wrong() if question.wrong else _right(question.backend))
    context = Context(backend, question.level)
    named = question.cases or ()
    every = all_cases(context, {*CHAPTERS, *question.chapters, *(c.split("/")[0] for c in named)})
    return backend, _in_turn(_asked(every, question))


def _right(backend: Backend) -> Any:
    """The backend of a name, or for the installed one its name."""
    if backend == "asynchronous":
        from tests.meta.asynchronous import AsynchronousBackend

        return AsynchronousBackend()
    if backend == "ranks":
        from tests.meta.wrong_collectives import RanksBackend

        return RanksBackend()
    if backend == "reference":
        from tests.mutants.references import References

        return References()
    return backend


def _asked(every: Iterator[Any], question: Question) -> Iterator[Any]:
    for case in every:
        if case.full and question.level == "quick":
            continue
        if question.cases is not None:
            if case.id in question.cases:
                yield case
        elif case.chapter in question.chapters or _serves(question.operators, case.id):
            yield case


def _in_turn(cases: Iterator[Any]) -> list[Any]:
    """What asks for first calls before all, as in the suite; then one case of each operator, dtype
    and chapter after the other, so that what kills comes early.
    """
    firsts, groups = list[Any](), dict[str, list[Any]]()
    for case in cases:
        group, _, name = case.id.rpartition("/")
        (firsts if "first-" in name else groups.setdefault(group, [])).append(case)
    turns = itertools.zip_longest(*groups.values())
    return [*firsts, *(case for turn in turns for case in turn if case is not None)]


def _serves(operators: Sequence[str], id: str) -> bool:
    """Whether a case may come to one of the operators."""
    chapter, subject, *rest = id.split("/")
    if chapter == "device":
        return subject == "rows"
    if chapter == "random":
        return bool(RANDOM.intersection(operators))
    if chapter == "optimizer":
        subjects = {name for operator in operators for name in RULES.get(operator, ())}
        return subject in subjects or any(WAYS.get(o) in rest for o in operators)
    return subject in operators


def _module(file: str) -> str:
    parts = Path(file).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "core" else parts[2:])


class _Changed(importlib.abc.MetaPathFinder):
    """Finds one module as ever, and gives it other code."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Text(fullname, spec.origin, self.text)
        return spec


class _Text(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self.changed = text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.changed, self.path, "exec", dont_inherit=True)


def _last_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
