"""Do all ranks make the same call? Asked before anything is sent, by one look into a store.

Of the ranks that make call number n of a group, the first writes down what it calls; the others
find that and compare. Nobody waits for another rank: the price is one round trip to the store.
Each rank also notes its own call, without waiting, so that a message can say who did what, and
who has not come. Slots are used again, so that a long run leaves no more keys than a short one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SLOTS = 64
"""Calls that a rank can be ahead of another before they are not compared any more."""
_GRACE_S = 1.0
"""How long the others of a call that went wrong are given to come, so that the odd one shows."""


class Failure(NamedTuple):
    """Why a job cannot go on: the ranks at fault, counted in the world, and what they did."""

    ranks: tuple[int, ...]
    reason: str


class Ledger:
    """The calls of one group, as one of its ranks makes and sees them.

    Args:
        store: shared by the ranks of the group.
        rank: of this one in the group.
        ranks: the members' ranks in the world; messages name these.
        compare: False: calls are noted, and not compared.
    """

    def __init__(self, store: Store, rank: int, ranks: tuple[int, ...], *, compare: bool) -> None:
        self._store, self._rank, self._ranks, self._compare = store, rank, ranks, compare
        self._agreed: dict[tuple[str, int], str] = {}
        self._count: dict[str, int] = {}

    def enter(self, call: str) -> tuple[int, Failure | None]:
        """Notes the next call of the whole group; its number, and who calls something else."""
        number = self._next("")
        self._store.set(f"{self._rank}/{number % SLOTS}", f"{number} {call}")
        if self._matches("", number, call):
            return number, None
        return number, self._disagreement(number)

    def message(self, source: int, destination: int, tag: int, what: str) -> str | None:
        """Notes the next message of a pair; what the other end takes it for, if that differs."""
        pair = f"{source}>{destination}/{tag}/"
        number = self._next(pair)
        if self._matches(pair, number, what):
            return None
        return self._agreed[pair, number % SLOTS].partition(" ")[2]

    def missing(self, number: int) -> tuple[int, ...]:
        """Ranks, counted in the world, that have not made call ``number`` yet."""
        return tuple(
            world for rank, world in enumerate(self._ranks) if self._call_of(rank, number) is None
        )

    def last_call(self, rank: int) -> str:
        """What a rank, counted in the world, did last in this group, for messages."""
        found = [self._slot(self._ranks.index(rank), slot) for slot in range(SLOTS)]
        numbers = [entry for entry in found if entry is not None]
        if not numbers:
            return "it has made no call in this group"
        number, call = max(numbers)
        return f"its last call in this group is #{number}, {call}"

    def _next(self, key: str) -> int:
        self._count[key] = self._count.get(key, 0) + 1
        return self._count[key]

    def _matches(self, key: str, number: int, call: str) -> bool:
        if not self._compare:
            return True
        slot = (key, number % SLOTS)
        mine = f"{number} {call}"
        # What this slot held before was agreed upon: only the first to come finds it still there.
        before = self._agreed.get(slot, "")
        found = self._store.compare_set(f"call/{key}{slot[1]}", before, mine).decode()
        ahead = int(found.partition(" ")[0]) > number
        # The others are ahead by more than all slots: there is no telling, now or next time.
        self._agreed[slot] = "" if ahead else found
        return ahead or found == mine

    def _disagreement(self, number: int) -> Failure:
        deadline = time.monotonic() + _GRACE_S
        while self.missing(number) and time.monotonic() < deadline:
            time.sleep(0.01)
        calls = {rank: self._call_of(rank, number) for rank in range(len(self._ranks))}
        made = {self._ranks[rank]: call for rank, call in calls.items() if call is not None}
        return disagreement(number, made)

    def _call_of(self, rank: int, number: int) -> str | None:
        found = self._slot(rank, number % SLOTS)
        return None if found is None or found[0] < number else found[1]

    def _slot(self, rank: int, slot: int) -> tuple[int, str] | None:
        key = f"{rank}/{slot}"
        if not self._store.check([key]):
            return None
        number, _, call = self._store.get(key).decode().partition(" ")
        return int(number), call


def disagreement(number: int, calls: Mapping[int, str]) -> Failure:
    """What to say of ranks that call different things; see :func:`compared`."""
    odd, told = compared(calls)
    return Failure(odd, f"the ranks disagree in call #{number}: {told}")


def compared(texts: Mapping[int, str]) -> tuple[tuple[int, ...], str]:
    """Who says something else than most, and who says what; when half say each, the first is right.

    Args:
        texts: rank in the world to what it says.
    """
    said = list(texts.values())
    usual = max(said, key=lambda text: (said.count(text), -said.index(text)))
    who = {text: [rank for rank in texts if texts[rank] == text] for text in said}
    told = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in who.items())
    return tuple(rank for rank in texts if texts[rank] != usual), told


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
