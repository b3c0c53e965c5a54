"""What a generated mistake is: a place, conditions on the call that comes there, and an effect."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from tests.mutants.subjects import Backend as Name
from tests.red_team.conditions import OF_OTHER_CALLS, Call, Condition, History
from tests.red_team.effects import BUFFER, STALE, Effect


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One wrong backend.

    Attributes:
        backend: which correct one it is made of.
        target: an operator and a direction; or a part of a backend and a method of it.
        conditions: all of which a call must meet.
        effect: what happens then.
        history: of the calls in this process.
    """

    backend: Name
    target: tuple[str, str]
    conditions: tuple[Condition, ...]
    effect: Effect
    history: History = field(default_factory=History, compare=False, repr=False)

    @property
    def identity(self) -> str:
        """What a list calls it."""
        return self.id

    @property
    def id(self) -> str:
        """A short hash of what it says."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:10]

    @property
    def needs_all_calls(self) -> bool:
        """Whether it depends on calls that do not meet its conditions."""
        return self.effect.name in (STALE, BUFFER) or any(
            c.measure in OF_OTHER_CALLS for c in self.conditions
        )

    def to_json(self) -> dict[str, Any]:
        """For the file of results."""
        return {"id": self.id, "text": str(self), "conditions": len(self.conditions)}

    def __str__(self) -> str:
        where = " and ".join(map(str, self.conditions))
        return f"{self.backend}, {' '.join(self.target)}: where {where}, {self.effect}"

    def applies(self, call: Call) -> bool:
        """Whether a call meets all conditions; remembers which ones it meets.

        Calls are counted that meet the other conditions: a third call of 300 rows comes again and
        again, a third call of a process that has 300 rows is one that nobody can ask for twice.
        """
        held = [c for c in self.conditions if not c.counts and c.holds(call)]
        is_such = len(held) == sum(not c.counts for c in self.conditions)
        held += [c for c in self.conditions if c.counts and c.holds(call)]
        self.history.count += is_such
        everything = [""] if len(held) == len(self.conditions) else []
        for name in [*map(str, held), *everything]:
            self.history.met[name] = self.history.met.get(name, 0) + 1
        return bool(everything)

    def before(self, case: str) -> None:
        """Nothing: what is wrong is so in every case."""

    def why(self) -> str:
        """Why nobody noticed, from the calls that came here."""
        met = self.history.met
        if "" in met:
            return f"{met['']} calls come to it, and nothing shows"
        never = [str(c) for c in self.conditions if str(c) not in met]
        return f"no call meets {' nor '.join(never)}" if never else "no call meets all at once"

    def __call__(self) -> Any:
        """The wrong backend, in the process that is to be asked."""
        from tests.red_team.methods import METHODS, with_wrong_method
        from tests.red_team.ranks import PART, with_wrong_ranks
        from tests.red_team.seam import Seam

        if self.target[0] == PART:
            return with_wrong_ranks(self)
        if self.target in METHODS:
            return with_wrong_method(self)
        return Seam(self.backend, self).backend
