"""What does a rank of a pipeline do, action by action? The rows that all of it works on.

An action is a stage, what is done and a microbatch; its text, like ``0F3`` or ``1SEND_B2``, and the
CSV form with one row per rank are those of torch.distributed.pipelining, so that a schedule can be
written there and run here. :mod:`~anychip.train.parallel.schedule` makes rows,
:mod:`~anychip.train.parallel.lowering` adds messages to them,
:mod:`~anychip.train.parallel.validation` checks, :mod:`~anychip.train.parallel.simulator` times and
:mod:`~anychip.train.parallel.pipeline` executes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from anychip.contract import AnychipError

ComputeKind = Literal["F", "I", "W", "B"]
"""Forward; the gradient of the input, that of the weights, and B, both in one."""
MessageKind = Literal["SEND_F", "RECV_F", "SEND_B", "RECV_B"]
"""Outputs to the next stage, gradients to the one before.

``0SEND_F3`` gives stage 0's output for microbatch 3 to stage 1, which has ``1RECV_F3``;
``1SEND_B3`` gives back the gradient of it, for ``0RECV_B3``.
"""
WeightsKind = Literal["UNSHARD", "RESHARD", "REDUCE_GRAD"]
"""Of a whole stage: its weights come and go, its gradients are reduced over replicas."""
ActionKind = ComputeKind | MessageKind | WeightsKind | Literal["OVERLAP_F_B"]
"""``(0F1;3B0)OVERLAP_F_B`` is a forward and a backward that a device may run at the same time."""

COMPUTE: tuple[ComputeKind, ...] = get_args(ComputeKind)
_MESSAGES: tuple[MessageKind, ...] = get_args(MessageKind)
_WEIGHTS: tuple[WeightsKind, ...] = get_args(WeightsKind)
HANDS_ON: tuple[ComputeKind, ...] = ("F", "I", "B")
"""What takes something of a neighbouring stage, and makes something for the other one."""
PAIR: Literal["OVERLAP_F_B"] = "OVERLAP_F_B"
_TEXT = re.compile(
    rf"(\d+)(?:({'|'.join((*COMPUTE, *_MESSAGES))})(\d+)|({'|'.join(_WEIGHTS)}))", re.ASCII
)
_PAIR_TEXT = re.compile(rf"\(([^;()]+);([^;()]+)\){PAIR}")


class ScheduleError(AnychipError, ValueError):
    """A schedule that cannot be carried out, or text that is none; names the first broken rule."""


class Action(NamedTuple):
    """One thing that a rank does.

    Attributes:
        stage: -1 of a pair, as in torch.
        microbatch: -1 where a whole stage is meant, and of a pair.
        parts: of a pair: the forward, then the backward.
    """

    stage: int
    kind: ActionKind
    microbatch: int = -1
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.microbatch < 0 else self.microbatch}"

    @property
    def is_compute(self) -> bool:
        """F, I, W or B."""
        return self.kind in COMPUTE

    @property
    def is_of_weights(self) -> bool:
        """Of a whole stage: its weights come or go, or its gradients are reduced."""
        return self.kind in _WEIGHTS

    @property
    def is_message(self) -> bool:
        """A send or a receive."""
        return self.kind in _MESSAGES

    def counterpart(self) -> Action:
        """The other end of a message: the receive of a send, the send of a receive."""
        way, _, direction = self.kind.partition("_")
        step = 1 if (way == "SEND") == (direction == "F") else -1
        other: ActionKind = f"{'RECV' if way == 'SEND' else 'SEND'}_{direction}"  # type: ignore[assignment]
        return Action(self.stage + step, other, self.microbatch)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One row of actions per rank, each row in the order in which the rank starts them.

    A row with no message leaves them to
    :func:`~anychip.train.parallel.lowering.add_communication`.
    """

    rows: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        """The CSV form: one line per rank."""
        return "\n".join(",".join(map(str, row)) for row in self.rows) + "\n"

    @property
    def num_stages(self) -> int:
        """One more than the highest stage that computes."""
        return 1 + max((a.stage for row in self._flat() for a in row if a.is_compute), default=-1)

    @property
    def num_microbatches(self) -> int:
        """One more than the highest microbatch."""
        return 1 + max((a.microbatch for row in self._flat() for a in row), default=-1)

    @property
    def has_communication(self) -> bool:
        """Messages are written in it."""
        return any(action.is_message for row in self.rows for action in row)

    @property
    def has_split_backward(self) -> bool:
        """Some gradients of weights come later than those of the inputs."""
        return any(action.kind == "W" for row in self.rows for action in row)

    def only(self, *kinds: ActionKind) -> Schedule:
        """The same schedule without actions of other kinds; pairs become their parts."""
        return Schedule(tuple(tuple(a for a in row if a.kind in kinds) for row in self._flat()))

    def unpaired(self) -> Schedule:
        """The same schedule with the parts of pairs in their order, one after the other."""
        return Schedule(tuple(tuple(row) for row in self._flat()))

    def owners(self) -> dict[int, int]:
        """Stage to the rank that computes it; to the last one, if several do."""
        return {
            action.stage: rank
            for rank, row in enumerate(self._flat())
            for action in row
            if action.is_compute
        }

    def _flat(self) -> Iterator[list[Action]]:
        for row in self.rows:
            yield [part for action in row for part in (action.parts or (action,))]


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
            if not word:
                continue
            action = _pair(word) or _single(word)
            if action is None:
                raise ScheduleError(
                    f"row {number}, column {column}: an action like 0F3, 1SEND_B2, 0UNSHARD or "
                    f"(0F1;3B0){PAIR} expected, got {word!r}"
                )
            row.append(action)
        rows.append(tuple(row))
    return Schedule(tuple(rows))


def _single(word: str) -> Action | None:
    found = _TEXT.fullmatch(word)
    if found is None:
        return None
    kind: ActionKind = found[2] or found[4]  # type: ignore[assignment]
    return Action(int(found[1]), kind, int(found[3] or -1))


def _pair(word: str) -> Action | None:
    found = _PAIR_TEXT.fullmatch(word)
    if found is None:
        return None
    forward, backward = _single(found[1].strip()), _single(found[2].strip())
    if forward is None or backward is None or forward.kind != "F" or backward.kind not in "BI":
        return None
    return Action(-1, PAIR, -1, (forward, backward))
