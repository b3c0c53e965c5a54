"""Something happens to one rank of a job at a random moment, among random calls of all kinds."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from anychip.contract import Communicator
    from tests.integration.collectives.processes import Outcome, Server

HEARTBEAT_S = 1.5
SLACK_S = 10.0
"""For what is not waiting: to say goodbye and to end takes a busy machine a while."""
ROUNDS = 24
"""Of random calls, in a job; they take half a second to a second."""
KINDS = ("killed", "stopped", "late", "slow")
"""SIGKILL; SIGSTOP for good; SIGSTOP, and SIGCONT within the limit; asleep now and then."""
_DTYPES = ("float32", "float64", "bfloat16", "float16", "int8", "int64")


class Trial(NamedTuple):
    """What became of a job.

    Attributes:
        seconds: from the strike to the end of the last of the other ranks.
        came_too_late: all calls had been made.
        ending: what is wrong with how ranks ended, or nothing.
        results: calls whose results were not numpy's.
        left: segments that are still there.
    """

    kind: str
    world_size: int
    seconds: float
    came_too_late: bool
    ending: str
    results: list[str]
    left: list[str]

    @property
    def is_right(self) -> bool:
        return not (self.ending or self.results or self.left)


def random_calls(comm: Communicator, seed: int, folder: str, slow: int | None = None) -> list[str]:
    """Calls of all kinds, in the job and in groups of it; the names of results that are wrong.

    Args:
        seed: the same on all ranks, so that all make the same calls.
        folder: where each rank says who it is.
        slow: a rank that sleeps now and then.
    """
    from tests.integration.collectives import cases

    Path(folder, f"{comm.rank}.written").write_text(str(os.getpid()))
    Path(folder, f"{comm.rank}.written").rename(Path(folder, f"{comm.rank}.pid"))
    draw, wrong = random.Random(seed), []
    ranks = list(range(comm.world_size))
    whole_only = comm.world_size < 4
    halves = comm if whole_only else comm.split([ranks[::2], ranks[1::2]], name="halves")
    for _ in range(ROUNDS):
        group = draw.choice([comm, comm, halves])
        numel, dtype = int(2 ** draw.uniform(0, 18)), draw.choice(_DTYPES)
        kind, call = draw.choice(["sum", "max", "min"]), draw.choice(["reduce", "move", "many"])
        if draw.random() < 0.2 and comm.rank == slow:
            time.sleep(0.1)
        if call == "reduce":
            wrong += cases.reductions(group, [numel], [dtype], [kind])
        elif call == "move":
            wrong += cases.moves(group, [numel >> 3], [dtype])
        else:
            wrong += cases.under_way(group, numel)
    comm.barrier()  # who has the job's store may not end before the others have done
    return wrong


def attempt(server: Server, seed: int) -> Trial:
    """Runs a job, to one of whose ranks something happens that follows from the seed."""
    draw = random.Random(seed)
    kind, world_size = KINDS[seed % len(KINDS)], draw.choice([2, 3, 4])
    rank, delay_s, pause_s = draw.randrange(world_size), draw.uniform(0, 0.6), draw.uniform(0, 0.7)
    with tempfile.TemporaryDirectory() as folder:
        struck: list[float] = []
        file = Path(folder, f"{rank}.pid")
        striker = threading.Thread(target=_strike, args=(kind, file, delay_s, pause_s, struck))
        striker.start()
        outcomes = server.run(
            "striking.random_calls", world_size, seed=seed, folder=folder,
            slow=rank if kind == "slow" else None,
            job={"heartbeat_s": HEARTBEAT_S, "check": draw.choice(["step", "always", "off"])},
        )  # fmt: skip
        striker.join()
        pids = [int(path.read_text()) for path in Path(folder).glob("*.pid")]
    others = [outcome for number, outcome in enumerate(outcomes) if number != rank]
    results = [name for outcome in outcomes for name in outcome.value or []]
    done = all(outcome.value is not None for outcome in others)
    seconds = max(outcome.ended_at for outcome in others) - (struck[0] if struck else 0.0)
    ending = ""
    if kind in ("late", "slow"):
        ending = "; ".join(outcome.error for outcome in outcomes if outcome.value is None)
    elif not done:
        ending = "; ".join(_wrong_ending(kind, rank, outcome, struck[0]) for outcome in others)
    left = _segments([server.process.pid, *pids])
    return Trial(kind, world_size, seconds, done, ending.strip("; "), results, left)


def _strike(kind: str, file: Path, delay_s: float, pause_s: float, struck: list[float]) -> None:
    """Waits for the rank that writes the file, and a while; then lets it happen to it."""
    deadline = time.monotonic() + 30.0
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.0005)
    time.sleep(delay_s)
    struck.append(time.monotonic())
    if kind == "slow":
        return
    pid = int(file.read_text())
    try:
        os.kill(pid, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        if kind == "late":
            time.sleep(pause_s)
            os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass  # it was done before


def _wrong_ending(kind: str, rank: int, outcome: Outcome, at: float) -> str:
    """What is wrong with the end of a rank that lost another."""
    said = "is lost: its process was killed" if kind == "killed" else "has not been heard of"
    limit_s = SLACK_S + (HEARTBEAT_S if kind == "stopped" else 0.0)
    if outcome.value is not None:
        return ""  # its last call needed the lost rank no more
    if outcome.kind != "CommunicationError" or f"rank {rank} {said}" not in outcome.error:
        return f"ended with {outcome.status}, {outcome.kind}: {outcome.error[-300:]}"
    return f"ended after {outcome.failed_at - at:.1f} s" * (outcome.failed_at - at > limit_s)


def _segments(pids: list[int]) -> list[str]:
    """Memory of jobs that one of these processes has open or mapped."""
    found = set()
    for pid in pids:
        try:
            targets = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
            targets += Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue  # it has ended
        found |= {f"process {pid}: {target}" for target in targets if "memfd:anychip" in target}
    return sorted(found)
