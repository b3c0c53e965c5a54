"""Asks many questions, each in a process, a few at a time."""

import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from multiprocessing.context import ForkServerContext
from typing import Any, TypeVar

from tests.mutants.subjects import Backend, Subjects, subjects
from tests.mutants.trial import PRELOADED, Answer, Outcome, Question, main

SILENCE_S = 400.0
"""How long a process may say nothing, and at level full three times that. Cases have limits of
processor time of their own, so this is for one that waits for what never comes."""
Key = TypeVar("Key")


class Pool:
    """Processes forked off a clean one, which has imported some modules before."""

    def __init__(
        self, jobs: int, preloaded: Sequence[str] = PRELOADED, silence_s: float = SILENCE_S
    ) -> None:
        self.context: ForkServerContext = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(list(preloaded))
        self.jobs, self.silence_s = jobs, silence_s

    def subjects(self, backend: Backend) -> Subjects:
        """What of a backend is mutated."""
        ours, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_send_subjects, args=(backend, theirs), daemon=True)
        process.start()
        theirs.close()
        found: Subjects = ours.recv()
        process.join()
        return found

    def ask(self, questions: Sequence[tuple[Key, Question]]) -> Iterator[tuple[Key, Answer, float]]:
        """Answers as they come, with the seconds that each took."""
        with ThreadPoolExecutor(self.jobs) as threads:
            waiting: dict[Future[tuple[Answer, float]], Key] = {
                threads.submit(self._ask, question): key for key, question in questions
            }
            try:
                for future in as_completed(waiting):
                    yield waiting[future], *future.result()
            finally:
                for future in waiting:
                    future.cancel()

    def _ask(self, question: Question) -> tuple[Answer, float]:
        start = time.perf_counter()
        ours, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(target=main, args=(question, theirs), daemon=True)
        process.start()
        theirs.close()
        case, asked, answer = "", 0, None
        while answer is None:
            if not ours.poll(self.silence_s * (3 if question.level == "full" else 1)):
                answer = Answer(outcome="hang", case=case, reason="silence", asked=asked)
                break
            try:
                message = ours.recv()
            except EOFError:
                process.join()
                answer = _ended(process.exitcode or 0, case, asked)
                break
            if isinstance(message, Answer):
                answer = message
            else:
                case, asked = message, asked + 1
        process.kill()
        process.join()
        ours.close()
        return answer, time.perf_counter() - start


def _ended(code: int, case: str, asked: int) -> Answer:
    """What it means that a process is gone without an answer."""
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    is_hang = -code in (signal.SIGPROF, signal.SIGXCPU)
    outcome: Outcome = "hang" if is_hang else "crash" if case else "import"
    return Answer(outcome=outcome, case=case, reason=name, asked=asked)


def _send_subjects(backend: Backend, pipe: Any) -> None:
    pipe.send(subjects(backend))
