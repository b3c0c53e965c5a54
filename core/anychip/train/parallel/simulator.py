"""How long does a schedule take, who waits how long, and how many microbatches are in flight?

Each rank carries out its row in order, the parts of a pair one after the other; a computation
starts when the one before it has ended and its input is there. Messages take time, and nothing else
of a rank. All arithmetic is sums and maxima of the given costs: with integers or fractions the
results are exact.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from anychip.train.parallel.actions import COMPUTE, Action, ActionKind, ComputeKind, Schedule
from anychip.train.parallel.validation import check_actions, validate

Time = int | float | Fraction
"""In any unit; exact when all costs are integers or fractions."""

MAX_COLUMNS = 240
_HELD: Mapping[ActionKind, int] = {"F": 1, "I": 0, "W": -1, "B": -1}
"""Activations of how many more microbatches a stage keeps from then on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What the actions of a schedule take.

    Attributes:
        forward, backward: of one microbatch, per stage; or one number for all stages.
        weights: of the backward, what the gradients of the weights take, where it is split in I and
            W; None: half of it.
        message: from the end of a computation to the arrival of what it made on another rank.
    """

    forward: Time | Sequence[Time] = 1
    backward: Time | Sequence[Time] = 2
    weights: Time | Sequence[Time] | None = None
    message: Time = 0

    def of(self, action: Action) -> Time:
        """Of a computation."""
        return self.per_stage(action.kind, action.stage + 1)[action.stage]

    def per_stage(self, kind: ActionKind, num_stages: int) -> Sequence[Time]:
        """Of each stage's F, I, W or B."""
        if kind == "F":
            return _per_stage(self.forward, num_stages)
        whole = _per_stage(self.backward, num_stages)
        if kind == "B":
            return whole
        if self.weights is None:
            return [c / 2 if isinstance(c, float) else Fraction(c) / 2 for c in whole]
        weights = _per_stage(self.weights, num_stages)
        if kind == "W":
            return weights
        return [cost - later for cost, later in zip(whole, weights, strict=True)]


def _per_stage(cost: Time | Sequence[Time], num_stages: int) -> Sequence[Time]:
    return cost if isinstance(cost, Sequence) else (cost,) * num_stages


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes:
    """What the actions of a schedule take and free; each per stage, or one number for all stages.

    Attributes:
        saved: from the F of a microbatch to its B, or I.
        kept: from the I to its W; None: what was saved.
        weights: from UNSHARD to RESHARD.
    """

    saved: int | Sequence[int] = 0
    kept: int | Sequence[int] | None = None
    weights: int | Sequence[int] = 0

    def change(self, action: Action) -> int:
        """By how much more is in use after an action."""
        saved, weights = _at(self.saved, action), _at(self.weights, action)
        kept = saved if self.kept is None else _at(self.kept, action)
        changes = {"F": saved, "B": -saved, "I": kept - saved, "W": -kept}
        return {**changes, "UNSHARD": weights, "RESHARD": -weights}.get(action.kind, 0)


def _at(nbytes: int | Sequence[int], action: Action) -> int:
    return nbytes[action.stage] if isinstance(nbytes, Sequence) else nbytes


class Span(NamedTuple):
    """A computation and when it ran."""

    action: Action
    start: Time
    end: Time


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each rank did what; simulated, or measured by a pipeline. Times count from the start.

    Attributes:
        rows: per rank, in order of time.
    """

    rows: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> Time:
        """The end of the last computation."""
        return max(row[-1].end for row in self.rows if row)

    @property
    def idle(self) -> tuple[Time, ...]:
        """Per rank, the time within the makespan in which it computes nothing."""
        whole = self.makespan
        return tuple(whole - sum([end - start for _, start, end in row]) for row in self.rows)

    @property
    def bubble_ratio(self) -> Time:
        """The part of all ranks' time that is idle."""
        whole = len(self.rows) * self.makespan
        idle = sum(self.idle)
        if isinstance(idle, float) or isinstance(whole, float):
            return idle / whole
        return Fraction(idle, 1) / whole

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per rank, the most forwards whose backward has not ended: activations that are kept.

        Each is that of one stage. A split backward has ended when its W has.
        """
        peaks = []
        for row in self.rows:
            held = peak = 0
            for action, _, _ in row:
                held += _HELD[action.kind]
                if held > peak:
                    peak = held
            peaks.append(peak)
        return tuple(peaks)

    def memory(self, schedule: Schedule, nbytes: Bytes) -> tuple[tuple[tuple[Time, int], ...], ...]:
        """Per rank and action of the schedule a time, and the bytes in use from then on.

        Activations of an F count from its beginning, all else changes at an action's end. Weights
        come and go when the computation before has ended. Not in it: what messages are made of,
        gradients, and all that is there all the time.

        Args:
            schedule: that this is a timeline of.
        """
        found = []
        for row, spans in zip(schedule.unpaired().rows, self.rows, strict=True):
            left, steps, held = list(spans[::-1]), list[tuple[Time, int]](), 0
            clock: Time = 0
            for action in row:
                begin = clock
                if action.is_compute:
                    _, begin, clock = left.pop()
                held += nbytes.change(action)
                if not action.is_message:
                    steps.append((begin if action.kind == "F" else clock, held))
            found.append(tuple(steps))
        return tuple(found)

    def grid(self, columns: int | None = None) -> str:
        """Ranks by time as text: ``F3`` and ``B3`` are microbatch 3, a dot is a rank that waits.

        A computation longer than a column goes on with dashes. A rank with several stages shows
        them too: ``1F3``.

        Args:
            columns: to draw; None: one per common unit of all times where they are exact and fit
                in 240 columns, else 60. A computation shorter than a column may be hidden by the
                next.
        """
        unit = self._unit(columns)
        count = math.ceil(self.makespan / unit)
        lines = []
        for rank, row in enumerate(self.rows):
            several = len({span.action.stage for span in row}) > 1
            cells = ["."] * count
            for action, start, end in row:
                first = min(count - 1, round(start / unit))
                last = max(first + 1, min(count, round(end / unit)))
                stage = str(action.stage) if several else ""
                cells[first:last] = ["-"] * (last - first)
                cells[first] = f"{stage}{action.kind}{action.microbatch}"
            lines.append((rank, cells))
        width = max(len(cell) for _, cells in lines for cell in cells)
        digits = len(str(len(lines) - 1))
        text = [
            f"rank {rank:{digits}} | " + " ".join(cell.ljust(width, _fill(cell)) for cell in cells)
            for rank, cells in lines
        ]
        return "\n".join(line.rstrip() for line in text)

    def _unit(self, columns: int | None) -> Time:
        if columns is not None and columns < 1:
            raise ValueError(f"grid: at least 1 column expected, got {columns}")
        times = [time for row in self.rows for span in row for time in span[1:]]
        if columns is None and not any(isinstance(time, float) for time in times):
            exact = [Fraction(time) for time in times if time]
            below = math.lcm(*(time.denominator for time in exact))
            unit = Fraction(math.gcd(*(int(time * below) for time in exact)), below)
            if self.makespan / unit <= MAX_COLUMNS:
                return unit
        return self.makespan / (columns or 60)

    def __str__(self) -> str:
        """The grid, and below it what it shows in numbers."""
        idle = ", ".join(f"{float(time):.4g}" for time in self.idle)
        return (
            f"{self.grid()}\n"
            f"makespan {float(self.makespan):.4g}, idle per rank {idle}, bubble "
            f"{float(self.bubble_ratio):.1%}, at most "
            f"{', '.join(map(str, self.peak_in_flight))} microbatches in flight"
        )


def _fill(cell: str) -> str:
    return "-" if cell == "-" else " "


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Runs a schedule against costs instead of a clock.

    Args:
        schedule: with or without messages; where they stand makes no difference here.
        costs: forward 1, backward 2 and free messages when None.

    Raises:
        ScheduleError: see :func:`~anychip.train.parallel.validation.validate`.
        ValueError: costs of another number of stages, or below zero.
    """
    costs = costs or Costs()
    _check_costs(costs, schedule.num_stages)
    computations = schedule.only(*COMPUTE)
    owners = check_actions(computations)
    takes: dict[ComputeKind, Sequence[Time]] = {
        kind: costs.per_stage(kind, len(owners)) for kind in COMPUTE
    }
    spans = _run(computations.rows, owners, takes, costs.message)
    if any(len(row) < len(todo) for row, todo in zip(spans, computations.rows, strict=True)):
        validate(computations)  # says who waits for whom
        raise AssertionError("a rank waits, and the rules say that nobody does")
    return Timeline(tuple(map(tuple, spans)))


def _run(
    rows: Sequence[Sequence[Action]],
    owners: Mapping[int, int],
    takes: Mapping[ComputeKind, Sequence[Time]],
    message: Time,
) -> list[list[Span]]:
    """When each computation runs, until all are done or the ranks wait for each other."""
    # When the output of a stage, or the gradient of its input, is there; by direction.
    ends: dict[tuple[bool, int, int], Time] = {}
    spans: list[list[Span]] = [[] for _ in rows]
    # Ranks that wait for a computation go on when it has ended, so that each action is visited
    # once, and in an order in which its input is known.
    waiting: dict[tuple[bool, int, int], int] = {}
    ready, num_stages = list(range(len(rows))), len(owners)
    while ready:
        rank = ready.pop()
        row = spans[rank]
        clock = row[-1].end if row else 0
        for action in rows[rank][len(row) :]:
            stage, kind, microbatch, _ = action
            is_forward, start = kind == "F", clock
            # What a computation takes besides its own forward: the result of a neighbour.
            source = stage - 1 if is_forward else stage + 1
            if kind != "W" and 0 <= source < num_stages:
                before = (is_forward, source, microbatch)
                if before not in ends:
                    waiting[before] = rank
                    break
                arrival = ends[before]
                if message and owners[source] != rank:
                    arrival += message
                if arrival > start:
                    start = arrival
            clock = start + takes[kind][stage]  # type: ignore[index]
            row.append(Span(action, start, clock))
            if kind != "W":
                made = (is_forward, stage, microbatch)
                ends[made] = clock
                if made in waiting:
                    ready.append(waiting.pop(made))
    return spans


def _check_costs(costs: Costs, num_stages: int) -> None:
    named: Mapping[str, Time | Sequence[Time]] = {
        "forward": costs.forward,
        "backward": costs.backward,
        "weights": 0 if costs.weights is None else costs.weights,
        "message": costs.message,
    }
    for name, cost in named.items():
        values = cost if isinstance(cost, Sequence) else [cost]
        if isinstance(cost, Sequence) and len(cost) != num_stages:
            raise ValueError(f"{name} costs of {num_stages} stages expected, got {len(cost)}")
        if any(value < 0 for value in values):
            raise ValueError(f"{name} costs of at least 0 expected, got {cost}")
    if any(cost < 0 for cost in costs.per_stage("I", num_stages)):
        raise ValueError(f"weights costs of at most backward's expected, got {costs.weights}")
