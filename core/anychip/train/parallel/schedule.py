"""In which order does each rank of a pipeline work? A schedule says it, as data.

A schedule is one row of actions per rank. An action is a stage, what it does and a microbatch; its
text, like ``0F3`` or ``1SEND_B2``, and the CSV form with one row per rank are those of
torch.distributed.pipelining. Nothing here computes: :mod:`~anychip.train.parallel.simulator` says
how long a schedule takes, :mod:`~anychip.train.parallel.pipeline` does what it says.

Sources: GPipe, Huang et al. 2019, arXiv:1811.06965, figure 2; 1F1B, Narayanan et al. 2019,
"PipeDream", section 3.2, in the synchronous form of Narayanan et al. 2021, arXiv:2104.04473,
section 2.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from anychip.contract import AnychipError

ActionKind = Literal["F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
"""Forward and backward, and the messages: outputs to the next stage, gradients to the one before.

``0SEND_F3`` gives stage 0's output for microbatch 3 to stage 1, which has ``1RECV_F3``;
``1SEND_B3`` gives back the gradient of it, for ``0RECV_B3``.
"""

COMPUTE: tuple[ActionKind, ...] = ("F", "B")
_TEXT = re.compile(rf"(\d+)({'|'.join(get_args(ActionKind))})(\d+)")


class ScheduleError(AnychipError, ValueError):
    """A schedule that cannot be carried out, or text that is none; names the first broken rule."""


class Action(NamedTuple):
    """One thing that a rank does."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def is_compute(self) -> bool:
        """F or B, not a message."""
        return self.kind in COMPUTE

    def counterpart(self) -> Action:
        """The other end of a message: the receive of a send, the send of a receive."""
        way, _, direction = self.kind.partition("_")
        step = 1 if (way == "SEND") == (direction == "F") else -1
        other: ActionKind = f"{'RECV' if way == 'SEND' else 'SEND'}_{direction}"  # type: ignore[assignment]
        return Action(self.stage + step, other, self.microbatch)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One row of actions per rank, each row in the order in which the rank starts them.

    A row with no message leaves them to :func:`add_communication`.
    """

    rows: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        """The CSV form: one line per rank."""
        return "\n".join(",".join(map(str, row)) for row in self.rows) + "\n"

    @property
    def num_stages(self) -> int:
        """One more than the highest stage that computes."""
        return 1 + max((a.stage for row in self.rows for a in row if a.kind in COMPUTE), default=-1)

    @property
    def num_microbatches(self) -> int:
        """One more than the highest microbatch."""
        return 1 + max((a.microbatch for row in self.rows for a in row), default=-1)

    @property
    def has_communication(self) -> bool:
        """Messages are written in it."""
        return any(action.kind not in COMPUTE for row in self.rows for action in row)

    def only(self, *kinds: ActionKind) -> Schedule:
        """The same schedule without actions of other kinds."""
        return Schedule(tuple(tuple(a for a in row if a.kind in kinds) for row in self.rows))


def parse(text: str) -> Schedule:
    """A schedule from its CSV form; empty cells, which stand for waiting, are left out.

    Raises:
        ScheduleError: a cell is no action; the message names row and column.
    """
    rows = []
    for number, line in enumerate(text.splitlines()):
        row = []
        for column, cell in enumerate(line.split(",")):
            word = cell.strip()
            found = _TEXT.fullmatch(word)
            if found:
                kind: ActionKind = found[2]  # type: ignore[assignment]
                row.append(Action(int(found[1]), kind, int(found[3])))
            elif word:
                raise ScheduleError(
                    f"row {number}, column {column}: an action like 0F3 or 1SEND_B2 expected, got "
                    f"{word!r}"
                )
        rows.append(tuple(row))
    return Schedule(tuple(rows))


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, microbatches in order; one stage per rank.

    Every stage keeps the activations of all microbatches.
    """
    _check_sizes(stages, microbatches)
    order = range(microbatches)
    return Schedule(
        tuple(
            tuple(Action(stage, kind, i) for kind in COMPUTE for i in order)
            for stage in range(stages)
        )
    )


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B: as many forwards as it takes to fill the pipeline, then one forward, one backward.

    Stage s keeps the activations of at most ``min(microbatches, stages - s)`` microbatches.
    """
    _check_sizes(stages, microbatches)
    rows = []
    for stage in range(stages):
        warmup = min(microbatches, stages - stage - 1)
        row = [Action(stage, "F", i) for i in range(warmup)]
        for i in range(microbatches - warmup):
            row += [Action(stage, "F", warmup + i), Action(stage, "B", i)]
        row += [Action(stage, "B", i) for i in range(microbatches - warmup, microbatches)]
        rows.append(tuple(row))
    return Schedule(tuple(rows))


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {"1f1b": one_f_one_b, "gpipe": gpipe}
"""By name; each is given the numbers of stages and of microbatches."""


def _check_sizes(stages: int, microbatches: int) -> None:
    if stages < 1 or microbatches < 1:
        raise ValueError(
            f"a pipeline needs at least 1 stage and 1 microbatch, got {stages} stages and "
            f"{microbatches} microbatches"
        )


def add_communication(schedule: Schedule, *, ahead: int = 0) -> Schedule:
    """The schedule with its messages: a send right after what it sends, a receive before its use.

    Between stages on one rank there is no message.

    Args:
        ahead: how many computations before the one that needs it a receive is posted, besides the
            one right before it; never before the forward whose gradient it is. 0 is right
            for every transport: :func:`exchanges` joins a receive with the send before it. With 1 a
            message can arrive while its receiver still computes; a transport that runs calls one
            after the other, in the order of posting, can then deadlock
            (:func:`~anychip.train.parallel.validation.validate` with ``in_order`` finds out).

    Raises:
        ScheduleError: messages are in it already.
    """
    if schedule.has_communication:
        raise ScheduleError("add_communication: the schedule has messages already")
    if ahead < 0:
        raise ValueError(f"ahead must be at least 0, got {ahead}")
    rows, num_stages = [], schedule.num_stages
    for row in schedule.rows:
        own = {action.stage for action in row}
        place = {action: i for i, action in enumerate(row)}
        before: list[list[Action]] = [[] for _ in range(len(row) + 1)]
        for i, action in enumerate(row):
            receive, send = received(action), sent(action)
            if _crosses(receive, own, num_stages):
                forward = Action(action.stage, "F", action.microbatch)
                earliest = place.get(forward, i) + 1 if action.kind == "B" else 0
                before[min(i, max(earliest, i - ahead))].append(receive)
            if _crosses(send, own, num_stages):
                # Sends come first: what is there must not wait for what is to come.
                before[i + 1].insert(0, send)
        with_messages = [a for i, action in enumerate(row) for a in (*before[i], action)]
        rows.append((*with_messages, *before[-1]))
    return Schedule(tuple(rows))


def _crosses(message: Action, own: set[int], num_stages: int) -> bool:
    """The other stage exists (the first receives no output, the last no gradient), elsewhere."""
    stage = message.counterpart().stage
    return 0 <= stage < num_stages and stage not in own


def received(action: Action) -> Action:
    """The receive that brings a computation its input, when that comes from another rank."""
    return Action(action.stage, "RECV_F" if action.kind == "F" else "RECV_B", action.microbatch)


def sent(action: Action) -> Action:
    """The send that hands on what a computation made, when another rank needs it."""
    return Action(action.stage, "SEND_F" if action.kind == "F" else "SEND_B", action.microbatch)


def exchanges(row: Sequence[Action]) -> list[Action | tuple[Action, ...]]:
    """A row as it is carried out: computations, and tuples of messages that are started together.

    Between two computations, the sends to a stage and the receive from it that the second
    computation needs are one exchange, whose parts cannot wait for each other. A receive for later
    is an exchange of its own, so that nothing waits for it too early.
    """
    found: list[Action | tuple[Action, ...]] = []
    run: list[Action] = []
    for action in row:
        if action.is_compute:
            found += [*_grouped(run, received(action)), action]
            run = []
        else:
            run.append(action)
    return found + _grouped(run, None)


def _grouped(run: Sequence[Action], needed: Action | None) -> list[tuple[Action, ...]]:
    together: dict[int, list[Action]] = {}
    alone = []
    for action in run:
        if action.kind.startswith("SEND") or action == needed:
            together.setdefault(action.counterpart().stage, []).append(action)
        else:
            alone.append((action,))
    return [*map(tuple, together.values()), *alone]
