"""Which cases come to a mistake: one pass over the suite with all mistakes watched and none made.

A mistake that no case comes to needs no process to show that it survives, and of the others only
those cases need to be asked that come to them.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.mutants.pool import Pool
from tests.mutants.subjects import Backend
from tests.mutants.trial import LIMIT_S, Question
from tests.red_team.conditions import Call
from tests.red_team.mistake import Mistake
from tests.red_team.seam import SPECS, Seam, Target

Reach = Mapping[str, tuple[str, ...]]
"""By id of a mistake: the cases at level quick in which some call meets all its conditions."""


@dataclass(kw_only=True)
class Watched:
    """The right backend, and what of an operator's mistakes its calls would have come to.

    Attributes:
        mistakes: of one operator of one backend.
        case: the one that is asked.
        cases: those that came to a mistake, by its id.
    """

    mistakes: tuple[Mistake, ...]
    case: str = ""
    cases: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def __call__(self) -> Any:
        seam = Seam(self.mistakes[0].backend)
        seam.on_call = self._look
        return seam.backend

    def before(self, case: str) -> None:
        """The next calls are of this case."""
        self.case = case

    def why(self) -> str:
        """What was seen, as JSON: the reason of an answer is a text."""
        return json.dumps(self.cases)

    def _look(self, target: Target, call: Call) -> None:
        for mistake in self.mistakes:
            if mistake.target == target:
                call.history = mistake.history
                if mistake.applies(call) and self.case not in self.cases[mistake.id]:
                    self.cases[mistake.id].append(self.case)
                call.enter()


def reach(pool: Pool, mistakes: Iterable[Mistake]) -> Reach:
    """Which cases come to each mistake that is in a row of an operator; of others nothing is said.

    Raises:
        RuntimeError: a case fails, or ends its process, though nothing is wrong.
    """
    groups: dict[tuple[Backend, str], list[Mistake]] = defaultdict(list)
    found: dict[str, tuple[str, ...]] = {}
    for mistake in mistakes:
        if mistake.target[0] in SPECS:
            groups[mistake.backend, mistake.target[0]].append(mistake)
            found[mistake.id] = ()
    questions = [
        (where, Question(backend=where[0], operators=where[1:], limit_s=LIMIT_S["full"],
                         wrong=Watched(mistakes=tuple(each))))
        for where, each in groups.items()
    ]  # fmt: skip
    for where, answer, _ in pool.ask(questions):
        if answer.outcome != "survived":
            raise RuntimeError(f"{where}: {answer.case} fails without a mistake: {answer.reason}")
        found |= {id: tuple(cases) for id, cases in json.loads(answer.reason).items()}
    return found
