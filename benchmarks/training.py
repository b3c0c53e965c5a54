"""Training on two ranks, one host thread each: ours, torch's and DeepSpeed's ways, in one run.

The measure is the throughput relative to two processes that train their halves of the batch and do
not communicate. Each candidate is a pair of processes that lives through all rounds and waits while
others run; a round gives each a turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, NamedTuple

from anychip.bench.ranks import RankError, Ranks, slowest
from anychip.bench.report import Report, Timing
from anychip.bench.timing import Samples
from anychip.contract import Backend
from benchmarks import peers
from benchmarks.trainees import ALONE, CANDIDATES, LATE_MS, Sizes

RANKS = 2
GOALS = {"data parallel": "not below DDP", "ZeRO-2": 0.93, "ZeRO-3": 0.95, "1F1B": 0.85}
"""Of ``x alone``; and of memory: not above DDP's."""
_MODULE = "benchmarks.turns"


class Turn(NamedTuple):
    """One candidate in one round; per step, seconds of the slowest rank, CPU seconds of all, and
    seconds that a rank slept because a call was late.
    """

    seconds: float
    cpu_seconds: float
    slept: float
    losses: list[float | None]
    peaks: list[int | None]


def run(
    backend: Backend,
    *,
    rounds: int,
    progress: Callable[[int], None],
    sizes: Sizes | None = None,
    steps: int = 1,
    names: tuple[str, ...] = (),
) -> Report:
    """Times all candidates in every round.

    Args:
        sizes: of the decoder and its batch; 7.4 M parameters when None.
        steps: of one turn.
        names: candidates besides the one without communication; all when empty.

    Raises:
        ValueError: fewer than 3 rounds, or a candidate that there is not.
        RankError: a rank of ours, or of the candidate without communication, failed.
    """
    if rounds < 3:
        raise ValueError(f"rounds must be at least 3, got {rounds}")
    sizes = sizes or Sizes()
    taken: dict[str, list[Turn]] = {}
    facts: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    with ExitStack() as stack:
        pairs: dict[str, Ranks] = {}
        for name in _wanted(names):
            try:
                pairs[name], facts[name] = _start(stack, backend, name, sizes)
            except RankError as error:
                if name in CANDIDATES:
                    raise
                notes.append(f"{name} is left out: {error}")
            progress(0)
        for number in range(rounds):
            for name, ranks in pairs.items():
                taken.setdefault(name, []).append(_turn(ranks, steps))
            progress(number + 1)
    return Report(
        subject="training",
        backend=backend.name,
        device=backend.identity(),
        threads=1,
        rows=[_row(name, taken, facts[name], sizes) for name in taken],
        notes=[_setting(sizes), *_NOTES, *notes],
    )


_NOTES = (
    "x alone: throughput over that of the first row, within a round; 1 is free communication",
    f"{LATE_MS} ms late: every call between ranks ends no sooner than that after it began; late "
    "ms: for which a rank had nothing to compute, of each step",
    "CPU ms: of both ranks, per step; peak MB: of the rank that needed more, the first included",
)


def _setting(sizes: Sizes) -> str:
    return (
        f"{RANKS} ranks with 1 host thread each; decoder of {sizes.layers} layers, width "
        f"{sizes.width}, vocabulary {sizes.vocab}; batch {sizes.batch} x {sizes.context} tokens in "
        f"all; pipelines: {sizes.microbatches} microbatches"
    )


def _wanted(names: tuple[str, ...]) -> list[str]:
    known = [*CANDIDATES, *peers.CANDIDATES]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no candidate {', '.join(unknown)}; there are {', '.join(known)}")
    return [name for name in known if not names or name in names or name == ALONE]


def _start(
    stack: ExitStack, backend: Backend, name: str, sizes: Sizes
) -> tuple[Ranks, dict[str, Any]]:
    why = peers.missing(name)
    if why is not None:
        raise RankError(why)
    ranks = stack.enter_context(Ranks(RANKS, backend.name, _MODULE))
    answers = ranks.call("start", candidate=name, sizes=asdict(sizes))
    first = _mean([answer.pop("loss") for answer in answers])
    facts = {key: ", ".join(str(answer[key]) for answer in answers) for key in answers[0]}
    return ranks, {"first loss": first, **facts}


def _turn(ranks: Ranks, steps: int) -> Turn:
    answers = ranks.call("turn", steps=steps)
    return Turn(
        slowest(answers, "seconds"),
        sum(answer["cpu_seconds"] for answer in answers),
        slowest(answers, "slept"),
        [answer["loss"] for answer in answers],
        [answer["peak"] for answer in answers],
    )


def _mean(losses: list[float | None]) -> float:
    """Over the ranks that know theirs."""
    return statistics.mean(loss for loss in losses if loss is not None)


def _row(name: str, taken: dict[str, list[Turn]], facts: dict[str, Any], sizes: Sizes) -> Timing:
    turns = taken[name]
    times = {n: Samples(name=n, seconds=tuple(t.seconds for t in taken[n])) for n in taken}
    mine = times[name]
    columns: dict[str, Any] = {
        "x alone": times[ALONE].ratio(mine),
        "goal": GOALS.get(name, ""),
        "tokens/s": sizes.batch * sizes.context / mine.median,
        "CPU ms": statistics.median(t.cpu_seconds for t in turns) * 1e3,
    }
    slept = statistics.median(t.slept for t in turns)
    if slept:
        columns["late ms"] = slept * 1e3
    peaks = [peak for peak in turns[-1].peaks if peak is not None]
    if peaks:
        columns["peak MB"] = max(peaks) / 1e6
    return Timing(
        name=name,
        microseconds=mine.median * 1e6,
        best_microseconds=mine.best * 1e6,
        facts={**columns, **facts, "last loss": _mean(turns[-1].losses)},
    )
