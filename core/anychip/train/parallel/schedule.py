"""In which order does each rank of a pipeline work? The known schedules, made as data.

Nothing here computes: :mod:`~anychip.train.parallel.simulator` says how long a schedule takes,
:mod:`~anychip.train.parallel.pipeline` does what it says. In all of them each stage's microbatches
come in ascending order, forward and backward: so gradients have the bits of one rank that
accumulates.

With p ranks and v stages on each, a *loop* puts stage s on rank s mod p; a *V* puts stage s on rank
s and stage 2 p - 1 - s there too, so that the first rank has the loss as well.

Sources: GPipe, Huang et al. 2019, arXiv:1811.06965, figure 2; 1F1B, Narayanan et al. 2019,
"PipeDream", section 3.2, in the synchronous form of Narayanan et al. 2021, arXiv:2104.04473,
section 2.2, interleaved there too; looped BFS, Lamy-Poirier 2022, arXiv:2211.05953; the zero-bubble
ones, Qi et al. 2023, arXiv:2401.10241, ZB-H1 and section 6; DualPipeV, DeepSeek's DualPipe,
arXiv:2412.19437, cut in half. Each row is that of torch.distributed.pipelining, where that has it.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from anychip.train.parallel.actions import (
    PAIR,
    Action,
    ActionKind,
    ComputeKind,
    Schedule,
    ScheduleError,
    parse,
)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, microbatches in order; one stage per rank.

    Every stage keeps the activations of all microbatches.
    """
    return looped_bfs(ranks, microbatches, 1)


def looped_bfs(ranks: int, microbatches: int, virtual: int = 2) -> Schedule:
    """GPipe in a loop: all microbatches through a rank's first stage, then through its next one.

    torch runs the microbatches of a backward in descending order, which sums to other bits.
    """
    _check_sizes(ranks, microbatches, virtual)
    order, chunks = range(microbatches), range(virtual)
    return Schedule(
        tuple(
            tuple(
                Action(chunk * ranks + rank, kind, i)
                for kind, way in _both_ways(chunks)
                for chunk in way
                for i in order
            )
            for rank in range(ranks)
        )
    )


def _both_ways(chunks: range) -> tuple[tuple[ComputeKind, range], tuple[ComputeKind, range]]:
    return ("F", chunks), ("B", chunks[::-1])


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B: as many forwards as it takes to fill the pipeline, then one forward, one backward.

    One stage per rank; stage s keeps the activations of at most ``min(microbatches, ranks - s)``
    microbatches.
    """
    return _alternating(ranks, microbatches, 1, hops=1)


def interleaved(ranks: int, microbatches: int, virtual: int = 2) -> Schedule:
    """1F1B with several stages per rank in a loop: the idle time is divided by their number.

    Raises:
        ValueError: the microbatches do not make rounds of one length, of about one per rank.
    """
    return _alternating(ranks, microbatches, virtual, hops=2)


def zero_bubble(ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """Interleaved 1F1B with split backward: weights' gradients wait, and fill the end.

    With one stage per rank this is ZB1P (ZB-H1); rank r puts off r of them.

    Raises:
        ValueError: as :func:`interleaved`.
    """
    return _alternating(ranks, microbatches, virtual, hops=1, puts_off=True)


def _alternating(
    ranks: int, microbatches: int, virtual: int, *, hops: int, puts_off: bool = False
) -> Schedule:
    _check_sizes(ranks, microbatches, virtual)
    late = range(ranks) if puts_off else (None,) * ranks
    rows = (_alternate(ranks, microbatches, virtual, rank, hops=hops, late=late[rank])
            for rank in range(ranks))  # fmt: skip
    return Schedule(tuple(rows))


def _alternate(
    ranks: int, microbatches: int, virtual: int, rank: int, *, hops: int, late: int | None = None
) -> tuple[Action, ...]:
    """One rank: forwards that fill the pipeline, then one forward, one backward, then backwards.

    Args:
        hops: forwards that a rank does ahead of the next one.
        late: weights' gradients that are put off; None: B instead of I and W.
    """
    count, rounds = microbatches * virtual, max(1, microbatches // ranks)
    if virtual > 1 and microbatches % rounds:
        raise ValueError(
            f"an interleaved schedule takes its {microbatches} microbatches in {rounds} rounds, "
            f"which do not divide them; take a multiple of the {ranks} ranks"
        )
    # With one stage per rank a round is without meaning: all microbatches are one.
    length = microbatches // rounds if virtual > 1 else microbatches
    order = [
        (number // length % virtual, number // (length * virtual) * length + number % length)
        for number in range(count)
    ]
    forwards = [Action(chunk * ranks + rank, "F", i) for chunk, i in order]
    back: ActionKind = "B" if late is None else "I"
    backwards = [Action((virtual - 1 - chunk) * ranks + rank, back, i) for chunk, i in order]
    warmup = min((virtual - 1) * length + hops * (ranks - 1 - rank), count)
    row, waiting = forwards[:warmup], []
    for number, backward in enumerate(backwards):
        row += [*forwards[warmup + number : warmup + number + 1], backward]
        waiting += [] if late is None else [backward._replace(kind="W")]
        if late is not None and len(waiting) > late:
            row.append(waiting.pop(0))
    return (*row, *waiting)


class _Row:
    """A rank's row under way: the next microbatch of each stage and kind is counted."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.counts: Counter[tuple[int, ComputeKind]] = Counter()

    def next(self, stage: int, kind: ComputeKind) -> Action:
        """The next action of a kind; a B is the next I and the next W."""
        counted: ComputeKind = "I" if kind == "B" else kind
        action = Action(stage, kind, self.counts[stage, counted])
        self.counts[stage, counted] += 1
        if kind == "B":
            self.counts[stage, "W"] += 1
        return action

    def add(self, stage: int, kinds: str) -> None:
        """Appends the next action of each kind."""
        self.actions += [self.next(stage, kind) for kind in kinds]  # type: ignore[arg-type]

    def pair(self, forward: int, backward: int) -> None:
        """Appends a forward of one stage with a backward of another one."""
        parts = (self.next(forward, "F"), self.next(backward, "B"))
        self.actions.append(Action(-1, PAIR, -1, parts))


def zbv(ranks: int, microbatches: int) -> Schedule:
    """ZB-V: two stages per rank in a V, and split backward; no rank waits where F = I = W.

    What remains is that ranks begin one after the other.
    """
    _check_sizes(ranks, microbatches, 2)
    return Schedule(tuple(_zbv_row(ranks, microbatches, rank) for rank in range(ranks)))


def _zbv_row(ranks: int, microbatches: int, rank: int) -> tuple[Action, ...]:
    # The order is that of a full pipeline; of fewer microbatches the rest is left out.
    count = max(2 * ranks - 1, microbatches)
    down, up, row = rank, 2 * ranks - 1 - rank, _Row()
    row.add(down, "F" * (2 * (ranks - rank) - 1))
    for _ in range(rank):
        row.add(up, "F")
        row.add(down, "F")
    for _ in range(ranks - rank):
        row.add(up, "FIW")
    while row.counts[up, "F"] < row.counts[down, "F"] or row.counts[down, "F"] < count:
        row.add(down, "FIW" if row.counts[down, "F"] < count else "IW")
        row.add(up, "FIW")
    for _ in range(rank):
        row.add(down, "I")
        row.add(up, "I")
    for _ in range(ranks - rank):
        row.add(down, "IW")
    for stage in (up, down):
        row.add(stage, "W" * (count - row.counts[stage, "W"]))
    return tuple(a for a in row.actions if a.microbatch < microbatches)


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV: two stages per rank in a V; forwards go in pairs with backwards of the other way.

    Raises:
        ValueError: fewer microbatches than stages.
    """
    _check_sizes(ranks, microbatches, 2)
    if microbatches < 2 * ranks:
        raise ValueError(
            f"dualpipev needs as many microbatches as stages, {2 * ranks}, got {microbatches}"
        )
    return Schedule(tuple(_dualpipev_row(ranks, microbatches, rank) for rank in range(ranks)))


def _dualpipev_row(ranks: int, microbatches: int, rank: int) -> tuple[Action, ...]:
    down, up, row, after = rank, 2 * ranks - 1 - rank, _Row(), ranks - rank - 1
    waiting: list[Action] = []

    def back(stage: int, *, split: bool) -> None:
        row.add(stage, "I" if split else "B")
        if split:
            waiting.append(row.actions[-1]._replace(kind="W"))

    def weights() -> None:
        row.actions += [waiting.pop(0)] if waiting else []

    row.add(down, "F" * (2 * after))
    for _ in range(rank + 1):
        row.add(down, "F")
        row.add(up, "F")
    for _ in range(after):
        back(up, split=True)
        weights()
        row.add(up, "F")
    for number in range(microbatches - 2 * ranks + rank + 1):
        if number == 0 and rank == ranks - 1:
            # A pair would wait for what comes from its own first part.
            row.add(down, "F")
            row.add(up, "B")
        else:
            row.pair(down, up)
        row.pair(up, down)
    for _ in range(after):
        row.add(up, "B")
        row.pair(up, down)
    # The second half of what is left leaves the weights' gradients for the end.
    split_from = 2 * ((rank + 1) // 2) + (rank % 2 == 0)
    for number in range(2 * (rank + 1)):
        back(down if number % 2 else up, split=number >= split_from)
    for _ in range(after):
        weights()
        back(down, split=True)
    while waiting:
        weights()
    return tuple(row.actions)


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "zb1p": zero_bubble,
}
"""With one stage per rank, by name; each is given the numbers of ranks and of microbatches."""

LOOPS: Mapping[str, Callable[[int, int, int], Schedule]] = {
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "interleaved-zb": zero_bubble,
}
"""With several stages per rank in a loop; each is given their number, too."""

VS: Mapping[str, Callable[[int, int], Schedule]] = {"zbv": zbv, "dualpipev": dualpipev}
"""With two stages per rank in a V."""

NAMES: tuple[str, ...] = (*SCHEDULES, *LOOPS, *VS)
"""Of all schedules."""


def stages_per_rank(name: str, virtual: int = 0) -> int:
    """How many stages each rank has.

    Args:
        virtual: so many; 0: as few as the schedule has, and 1 of a file.

    Raises:
        ValueError: the schedule has another number, or there is no such schedule.
    """
    virtual = virtual or (2 if name in LOOPS or name in VS else 1)
    check_virtual(name, virtual)
    return virtual


def make_schedule(name: str, ranks: int, microbatches: int, *, virtual: int = 1) -> Schedule:
    """A schedule by its name, or from a CSV file.

    Args:
        name: one of :data:`NAMES`, or the path of a file that ends in ``.csv``.
        virtual: stages per rank.

    Raises:
        OSError: the file cannot be read.
        ScheduleError: the file is no schedule of so many ranks, stages and microbatches.
        ValueError: an unknown name, or sizes that the schedule does not have.
    """
    check_virtual(name, virtual)
    if name in SCHEDULES:
        return SCHEDULES[name](ranks, microbatches)
    if name in LOOPS:
        return LOOPS[name](ranks, microbatches, virtual)
    if name in VS:
        return VS[name](ranks, microbatches)
    schedule = parse(Path(name).read_text(encoding="ascii"))
    got = len(schedule.rows), schedule.num_stages, schedule.num_microbatches
    if got != (ranks, ranks * virtual, microbatches):
        raise ScheduleError(
            f"{name}: {ranks} ranks, {ranks * virtual} stages and {microbatches} microbatches "
            f"expected, got {got[0]}, {got[1]} and {got[2]}"
        )
    return schedule


def check_virtual(name: str, virtual: int) -> None:
    """Whether a schedule has so many stages per rank.

    Raises:
        ValueError: it has not, or there is no such schedule.
    """
    if name not in NAMES and not name.endswith(".csv"):
        raise ValueError(
            f"schedule must be one of {', '.join(NAMES)}, or a .csv file, got {name!r}"
        )
    wanted = 1 if name in SCHEDULES else 2 if name in VS else None
    if (wanted or virtual) != virtual or (name in LOOPS and virtual < 2):
        raise ValueError(
            f"schedule {name} has {wanted or 'at least 2'} stages per rank, got virtual = {virtual}"
        )


def _check_sizes(ranks: int, microbatches: int, virtual: int) -> None:
    if ranks < 1 or microbatches < 1 or virtual < 1:
        per_rank = f" with {virtual} stages each" if virtual != 1 else ""
        raise ValueError(
            f"a pipeline needs at least 1 stage and 1 microbatch, got {ranks} ranks{per_rank} and "
            f"{microbatches} microbatches"
        )
