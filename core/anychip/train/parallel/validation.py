"""Can a schedule be carried out? Rules that name the action that breaks them, and where it is.

Actions first (each there once, on one rank, backward after forward, and whole: B, or I and W), then
messages (each send has its receive, on the right rank, at the right time), then the whole: no rank
waits for ever. Of weights: a stage that is unsharded anywhere is whole whenever it is used, and its
gradients are reduced after the last of them is there.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from anychip.train.parallel.actions import (
    COMPUTE,
    HANDS_ON,
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
)
from anychip.train.parallel.lowering import received, sent


def validate(schedule: Schedule, *, in_order: bool = False) -> None:
    """Checks a schedule, with or without messages.

    Args:
        in_order: the transport carries out a rank's messages one after the other, in the order in
            which they were started, as device-side transports do. Without it, messages are matched
            as they come.

    Raises:
        ScheduleError: names the first broken rule.
    """
    schedule = schedule.unpaired()
    owners = check_actions(schedule)
    messages = schedule.has_communication
    if messages:
        for rank, row in enumerate(schedule.rows):
            _check_messages(rank, row, owners)
    for rank, row in enumerate(schedule.rows):
        _check_weights(rank, row, owners)
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
            stage, kind, microbatch, _ = action
            if stage < 0 or (microbatch < 0 and (action.is_compute or action.is_message)):
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
        if action in place and (action.is_compute or action.is_message):
            raise ScheduleError(f"rank {rank}: {action} is there twice")
        place[action] = i
    for stage in sorted({action.stage for action in row if action.is_compute}):
        for i in range(num_microbatches):
            _check_microbatch(rank, stage, i, place)


def _check_microbatch(rank: int, stage: int, i: int, place: dict[Action, int]) -> None:
    """F, then B, or I and then W."""
    whole, split = Action(stage, "B", i), (Action(stage, "I", i), Action(stage, "W", i))
    is_split = [action in place for action in split]
    if whole in place and any(is_split):
        other = split[is_split.index(True)]
        raise ScheduleError(f"rank {rank}: {whole} is there, and {other}, which is a part of it")
    order: list[ActionKind] = ["F", "I", "W"] if any(is_split) else ["F", "B"]
    actions = [Action(stage, kind, i) for kind in order]
    for action in actions:
        if action not in place:
            raise ScheduleError(f"rank {rank}: {action} is missing")
    for before, after in pairwise(actions):
        if place[after] < place[before]:
            raise ScheduleError(f"rank {rank}: {after} comes before {before}")


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
        if not action.is_message or action in expected:
            continue
        if owners.get(action.stage) != rank:
            raise ScheduleError(f"rank {rank}: {action}, and stage {action.stage} is not here")
        raise ScheduleError(f"rank {rank}: no other rank has {action.counterpart()} for {action}")


def _check_weights(rank: int, row: tuple[Action, ...], owners: dict[int, int]) -> None:
    cut = {action.stage for action in row if action.kind == "UNSHARD"}
    whole: set[int] = set()
    reduced: set[int] = set()
    for action in row:
        stage, kind, *_ = action
        if action.is_of_weights and owners.get(stage) != rank:
            raise ScheduleError(f"rank {rank}: {action}, and stage {stage} is not here")
        if kind in HANDS_ON and stage in cut - whole:
            raise ScheduleError(f"rank {rank}: {action} uses weights that are not whole then")
        if kind in ("W", "B") and stage in reduced:
            raise ScheduleError(f"rank {rank}: {action} comes after {stage}REDUCE_GRAD")
        if (kind == "UNSHARD" and stage in whole) or (kind == "RESHARD" and stage not in whole):
            state = "whole" if kind == "UNSHARD" else "not whole"
            raise ScheduleError(f"rank {rank}: {action}, and stage {stage} is {state} then")
        whole ^= {stage} if kind in ("UNSHARD", "RESHARD") else set()
        reduced |= {stage} if kind == "REDUCE_GRAD" else set()
    if whole:
        raise ScheduleError(f"rank {rank}: {min(whole)}RESHARD is missing at the end")


def _wanted(
    row: tuple[Action, ...], owners: dict[int, int]
) -> Iterator[tuple[Action, Action, bool]]:
    """(computation, its message, the message comes first) for all that cross ranks."""
    for action in row:
        if action.kind not in HANDS_ON:
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
    queues: list[deque[Action]] = field(default_factory=list)

    def check(self) -> None:
        rows = self.schedule.rows
        place = [0] * len(rows)
        self.queues = [deque() for _ in rows]
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

    def _start(self, rank: int, action: Action) -> bool:
        if not action.is_message:
            if self._missing(action) is not None:
                return False
            self.done.add(action)
        elif self.in_order:
            self.queues[rank].append(action)
            self._move(rank)
        else:
            self.started.add(action)
            if action.counterpart() in self.started:
                self.done |= {action, action.counterpart()}
        return True

    def _move(self, rank: int) -> None:
        """Carries out what the heads of the queues allow, beginning with one rank's."""
        look = [rank]
        while look:
            rank = look.pop()
            if not self.queues[rank]:
                continue
            message = self.queues[rank][0]
            other = message.counterpart()
            peer = self.owners[other.stage]
            if self.queues[peer] and self.queues[peer][0] == other:
                self.done |= {message, other}
                self.queues[rank].popleft()
                self.queues[peer].popleft()
                look += [rank, peer]

    def _missing(self, action: Action) -> Action | None:
        """What a computation waits for: a message, or a computation of this rank."""
        if action.kind not in HANDS_ON:
            return None
        message = received(action)
        source = self.owners.get(message.counterpart().stage)
        if source is None:
            return None
        if source != self.owners[message.stage] and self.messages:
            return None if message in self.done else message
        kinds: tuple[ActionKind, ...] = ("F",) if message.kind == "RECV_F" else ("B", "I")
        stage = message.counterpart().stage
        sources = [Action(stage, kind, message.microbatch) for kind in kinds]
        if any(found in self.done for found in sources):
            return None
        return sources[0] if sources[0] in self.schedule.rows[source] else sources[-1]
