"""Can a schedule be carried out? Rules that name the action that breaks them, and where it is.

Actions first (each there once, on one rank, backward after forward), then messages (each send has
its receive, on the right rank, at the right time), then the whole: no rank waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from anychip.train.parallel.schedule import (
    COMPUTE,
    Action,
    Schedule,
    ScheduleError,
    exchanges,
    received,
    sent,
)


def validate(schedule: Schedule, *, in_order: bool = False) -> None:
    """Checks a schedule, with or without messages.

    Args:
        in_order: the transport carries out a rank's exchanges one after the other, in the order in
            which they were started, as device-side transports do. Without it, messages are matched
            as they come.

    Raises:
        ScheduleError: names the first broken rule.
    """
    owners = check_actions(schedule)
    messages = schedule.has_communication
    if messages:
        for rank, row in enumerate(schedule.rows):
            _check_messages(rank, row, owners)
    _Run(schedule, owners, in_order, messages).check()


def check_actions(schedule: Schedule) -> dict[int, int]:
    """The first rules alone: which computations there are, and their order on a rank.

    Returns:
        Stage to the rank that computes it.

    Raises:
        ScheduleError: names the first broken rule.
    """
    owners = _owners(schedule)
    num_microbatches = schedule.num_microbatches
    for rank, row in enumerate(schedule.rows):
        _check_row(rank, row, num_microbatches)
    return owners


def _owners(schedule: Schedule) -> dict[int, int]:
    """Stage to the rank that computes it."""
    if not schedule.num_stages or not schedule.num_microbatches:
        raise ScheduleError("a schedule has at least one computation, this one has none")
    owners: dict[int, int] = {}
    num_stages = schedule.num_stages
    for rank, row in enumerate(schedule.rows):
        for action in row:
            stage, kind, microbatch = action
            if stage < 0 or microbatch < 0:
                raise ScheduleError(f"rank {rank}: {action} has a negative number")
            if kind in COMPUTE and owners.setdefault(stage, rank) != rank:
                raise ScheduleError(
                    f"stage {stage} is on one rank, and has actions on rank {owners[stage]} and "
                    f"({action}) on rank {rank}"
                )
    for stage in range(num_stages):
        if stage not in owners:
            raise ScheduleError(
                f"no rank computes stage {stage} of {num_stages}; stages are counted from "
                "0 without a gap"
            )
    return owners


def _check_row(rank: int, row: tuple[Action, ...], num_microbatches: int) -> None:
    place: dict[Action, int] = {}
    for i, action in enumerate(row):
        if action in place:
            raise ScheduleError(f"rank {rank}: {action} is there twice")
        place[action] = i
    for stage in sorted({action.stage for action in row if action.is_compute}):
        for i in range(num_microbatches):
            forward, backward = Action(stage, "F", i), Action(stage, "B", i)
            for action in (forward, backward):
                if action not in place:
                    raise ScheduleError(f"rank {rank}: {action} is missing")
            if place[backward] < place[forward]:
                raise ScheduleError(f"rank {rank}: {backward} comes before {forward}")


def _check_messages(rank: int, row: tuple[Action, ...], owners: dict[int, int]) -> None:
    place = {action: i for i, action in enumerate(row)}
    expected = set()
    for compute, message, first in _wanted(row, owners):
        expected.add(message)
        if message not in place:
            raise ScheduleError(f"rank {rank}: {message} is missing, next to {compute}")
        if (place[message] < place[compute]) != first:
            order = "after" if first else "before"
            raise ScheduleError(f"rank {rank}: {message} comes {order} {compute}")
    for action in row:
        if action.is_compute or action in expected:
            continue
        if owners.get(action.stage) != rank:
            raise ScheduleError(f"rank {rank}: {action}, and stage {action.stage} is not here")
        raise ScheduleError(f"rank {rank}: no other rank has {action.counterpart()} for {action}")


def _wanted(
    row: tuple[Action, ...], owners: dict[int, int]
) -> Iterator[tuple[Action, Action, bool]]:
    """(computation, its message, the message comes first) for all that cross ranks."""
    for action in row:
        if not action.is_compute:
            continue
        for message, first in ((received(action), True), (sent(action), False)):
            peer = owners.get(message.counterpart().stage)
            if peer is not None and peer != owners[action.stage]:
                yield action, message, first


@dataclass(slots=True)
class _Run:
    """A schedule carried out without times: every rank goes on until it has to wait."""

    schedule: Schedule
    owners: dict[int, int]
    in_order: bool
    messages: bool
    done: set[Action] = field(default_factory=set)
    started: set[Action] = field(default_factory=set)
    queues: list[list[set[Action]]] = field(default_factory=list)

    def check(self) -> None:
        rows = [exchanges(row) for row in self.schedule.rows]
        place = [0] * len(rows)
        self.queues = [[] for _ in rows]
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while place[rank] < len(row) and self._start(rank, row[place[rank]]):
                    place[rank] += 1
                    moved = True
        waiting = [
            f"rank {rank} waits at {row[place[rank]]} for {self._missing(row[place[rank]])}"
            for rank, row in enumerate(rows)
            if place[rank] < len(row)
        ]
        if waiting:
            raise ScheduleError("deadlock: " + "; ".join(waiting))

    def _start(self, rank: int, step: Action | tuple[Action, ...]) -> bool:
        if isinstance(step, Action):
            if self._missing(step) is not None:
                return False
            self.done.add(step)
            return True
        self.queues[rank].append(set(step))
        if self.in_order:
            self._move(rank)
        else:
            for message in step:
                self.started.add(message)
                if message.counterpart() in self.started:
                    self.done |= {message, message.counterpart()}
        return True

    def _move(self, rank: int) -> None:
        """Carries out what the heads of the queues allow, beginning with one rank's."""
        look = [rank]
        while look:
            rank = look.pop()
            if not self.queues[rank]:
                continue
            for message in list(self.queues[rank][0]):
                other = message.counterpart()
                peer = self.owners[other.stage]
                if self.queues[peer] and other in self.queues[peer][0]:
                    self.done |= {message, other}
                    for one, mine in ((rank, message), (peer, other)):
                        self.queues[one][0].discard(mine)
                    look += [peer]
            if not self.queues[rank][0]:
                self.queues[rank].pop(0)
                look.append(rank)

    def _missing(self, step: Action | tuple[Action, ...]) -> Action | None:
        """What a computation waits for: a message, or a computation of this rank."""
        if not isinstance(step, Action):
            return None
        message = received(step)
        if message.counterpart().stage not in self.owners:
            return None
        near = self.owners[message.counterpart().stage] == self.owners[step.stage]
        if near or not self.messages:
            message = Action(message.counterpart().stage, step.kind, step.microbatch)
        return None if message in self.done else message
