"""Ranks of one job that meet again, without new processes: fewer after a loss, or more.

Each time that they do is a generation; what the launcher has started is number 0. Who belongs to
the next one is written in one place of the job's store, the roster, which is open until one of the
generation before closes it: when ``at_most`` have come, or when at least ``at_least`` have and
nobody has for ``settle_s``. Whoever comes later, because it was slow or is new, comes to the roster
after that, and waits there until those who run now decide to meet it: :func:`num_waiting`. So there
is one job at any time, whatever the network does, as long as there is one store.

Ranks are numbered in the order of the generation before; those that were not in it come last.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from anychip.contract.errors import CommunicationError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Who is waited for; the same on all ranks that meet.

    Attributes:
        at_least: processes without which there is no new generation.
        at_most: processes with which there is one at once; more are left for the next.
        settle_s: seconds without anybody new after which those that have come are enough.
    """

    at_least: int
    at_most: int
    settle_s: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= self.at_least <= self.at_most:
            raise ValueError(
                f"meeting: at_least from 1 to at_most expected, got {self.at_least} and "
                f"{self.at_most}"
            )
        if not self.settle_s >= 0:
            raise ValueError(f"meeting: settle_s of at least 0 expected, got {self.settle_s}")


class Roster(NamedTuple):
    """Who is in a generation.

    Attributes:
        members: name of each process, and its rank in the generation before, or None.
    """

    is_closed: bool = False
    members: tuple[tuple[str, int | None], ...] = ()

    @property
    def ranks(self) -> list[str]:
        """Names in the order of the new ranks."""
        placed = enumerate(self.members)
        order = sorted(placed, key=lambda at: (at[1][1] is None, at[1][1] or 0, at[0]))
        return [name for _, (name, _) in order]


class Seat(NamedTuple):
    """This process's place in a generation, which is numbered from 1."""

    generation: int
    rank: int
    world_size: int


def come(store: Store, former_rank: int | None, meeting: Meeting, timeout_s: float) -> Seat:
    """Waits until there is a generation that this process is in.

    Args:
        store: of the launcher.
        former_rank: in generation 0; None: this process was not in it. Of later ones the store says
            who was.
        timeout_s: seconds after which this process gives up, and is no longer counted.

    Raises:
        CommunicationError: nobody closed the roster in time, or the store is gone.
    """
    mine, where = name_of_process(), f"meeting of {meeting.at_least} to {meeting.at_most} ranks"
    found = Roster()
    try:
        while mine not in found.ranks:
            generation, former = _next(store, mine, former_rank)
            found = _change(store, generation, partial(_with, mine=mine, former=former))
            if not found.is_closed:
                found = _wait(store, generation, mine, former, meeting, timeout_s)
            if not found.is_closed:
                break
    except RuntimeError as error:
        raise CommunicationError(where, "the store cannot be reached any more") from error
    if not found.is_closed:
        text = f"{len(found.members) + 1} came to generation {generation} within {timeout_s:g} s"
        if former is None:
            text += "; this process was not in the one before, whose ranks decide when to meet"
        raise CommunicationError(where, text)
    return Seat(generation, found.ranks.index(mine), len(found.ranks))


def num_waiting(store: Store, generation: int) -> int:
    """Processes that have come for the generation after this one. Any rank may ask."""
    return len(_read(store, generation + 1).members)


@cache
def _name(process: int) -> str:
    return f"{socket.gethostname()} {process} {secrets.token_hex(8)}"


def name_of_process() -> str:
    """A name that no other process has or had, a fork of this one neither."""
    return _name(os.getpid())


def _next(store: Store, mine: str, former_rank: int | None) -> tuple[int, int | None]:
    """The first generation that is open, and this process's rank in the one before."""
    former, generation = former_rank, 1
    while (roster := _read(store, generation)).is_closed:
        former = roster.ranks.index(mine) if mine in roster.ranks else None
        generation += 1
    return generation, former


def _wait(
    store: Store, generation: int, mine: str, former: int | None, meeting: Meeting, timeout_s: float
) -> Roster:
    """The roster, closed with this process in it; open without it when the time is over."""
    begun = changed = time.monotonic()
    seen: Roster = Roster()
    while True:
        found, now = _read(store, generation), time.monotonic()
        if found.is_closed:
            return found
        if found != seen:
            seen, changed = found, now
        count, settled = len(found.members), now - changed > meeting.settle_s
        if former is not None and (
            count >= meeting.at_most or (count >= meeting.at_least and settled)
        ):
            found = _change(store, generation, partial(_closed, seen=found, most=meeting.at_most))
            if found.is_closed:
                return found
        if now - begun > timeout_s:
            return _change(store, generation, partial(_without, mine=mine))
        time.sleep(_LOOK_S)


def _with(roster: Roster, mine: str, former: int | None) -> Roster:
    return roster._replace(members=(*roster.members, (mine, former)))


def _without(roster: Roster, mine: str) -> Roster:
    return roster._replace(members=tuple(m for m in roster.members if m[0] != mine))


def _closed(roster: Roster, seen: Roster, most: int) -> Roster:
    """Closed, with the first ones only, unless somebody has come or gone meanwhile."""
    if roster != seen:
        return roster
    taken = roster.ranks[:most]
    return Roster(True, tuple(member for member in roster.members if member[0] in taken))


def _key(generation: int) -> str:
    return f"anychip/roster/{generation}"


def _said(store: Store, generation: int) -> str:
    key = _key(generation)
    return store.get(key).decode() if store.check([key]) else ""


def _read(store: Store, generation: int) -> Roster:
    return _parsed(_said(store, generation))


def _change(store: Store, generation: int, step: Callable[[Roster], Roster]) -> Roster:
    """Writes a roster anew, unless it is closed; returns what is there then."""
    said = _said(store, generation)
    while True:
        before = _parsed(said)
        after = before if before.is_closed else step(before)
        text = json.dumps(after)
        if after == before:
            return before
        found = store.compare_set(_key(generation), said, text).decode()
        if found == text:
            return after
        said = found


def _parsed(text: str) -> Roster:
    if not text:
        return Roster()
    is_closed, members = json.loads(text)
    return Roster(is_closed, tuple((name, rank) for name, rank in members))
