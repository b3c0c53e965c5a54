"""Does a job that loses a rank end at once, leave a whole checkpoint, and go on with the same bits?

A rank of ``anychip train`` is killed (SIGKILL) or stopped (SIGSTOP) at a random moment, every third
time while rank 0 writes a checkpoint. The others must end with a message that names it, and exit
code 1. What is left is checked without anychip's help: each file of the checkpoint against its
sha256. Then ``--resume`` goes on, and metrics, model, optimizer and sample must equal, bit for bit,
those of a run that nothing happened to. Prints a table; exits with 1 when one of these fails.

    python benchmarks/kill_ranks.py [--times 50] [--stops 10] [--layouts 3] [--seed 0]

Ranks are real processes, joined as torchrun joins them, and forked from one that has imported all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.integration.train import forked  # noqa: E402 - found by the line above
from tests.integration.train.processes import num_rows, rows  # noqa: E402

STEPS, EVERY = 60, 5
SETTINGS = (
    *("run.sample_tokens=5", "run.timeout_s=60", "model.context=16", "model.layers=2"),
    *("model.heads=2", "model.width=32", "model.dropout=0.1", "data.batch_size=2"),
    *("data.accumulation=2", "--backend", "cpu", "--steps", str(STEPS)),
    f"checkpoint.every={EVERY}",
)
HEARTBEAT_S = 3.0
SLACK_S = 10.0
"""For what is not waiting: to say goodbye and to end takes a busy machine a while."""


class Layout(NamedTuple):
    """Ranks, and how they share the work."""

    name: str
    world_size: int
    settings: tuple[str, ...]


LAYOUTS = (
    Layout("2 replicas, ZeRO-2", 2, ("optimizer.stage=2",)),
    Layout("2 stages, 1F1B", 2, ("parallel.pipeline=2",)),
    Layout("2 replicas of 2 stages", 4, ("parallel.pipeline=2", "optimizer.stage=1")),
)


class Result(NamedTuple):
    """What is compared of a run that is done."""

    rows: list[dict[str, Any]]
    tensors: list[str]
    sample: str


class Trial(NamedTuple):
    """One rank lost; ``problem`` is empty when all was as it should be."""

    layout: Layout
    what: str
    rank: int
    step: int
    saved_step: int
    was_saving: bool
    seconds: float
    is_whole: bool
    is_equal: bool
    problem: str


def read_result(out: Path) -> Result:
    """Names of a checkpoint's files of tensors are hashes of their content."""
    folder = out / "checkpoint"
    files = [p.name for part in ("model", "optimizer") for p in folder.glob(f"{part}-*.pt")]
    return Result(rows(out), sorted(files), (out / "sample.txt").read_text())


def run_to_end(args: list[str], layout: Layout, cwd: Path) -> str:
    """Trains; what went wrong, or nothing."""
    job = forked.start(["train", *args], layout.world_size, cwd=cwd)
    job.wait()
    ended = job.end()
    failed = [(rank, end) for rank, end in enumerate(ended) if end.code]
    return "; ".join(f"rank {rank} ended with {end.code}: {end.err[-300:]}" for rank, end in failed)


def saved_step(out: Path) -> int:
    """Of the checkpoint, all of whose files are checked; 0 when there is none yet.

    Raises:
        ValueError: a file is not what was written.
    """
    manifest = out / "checkpoint" / "manifest.json"
    if not manifest.exists():
        return 0
    described = json.loads(manifest.read_text())
    for entry in described["files"].values():
        content = (manifest.parent / entry["name"]).read_bytes()
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise ValueError(f"{entry['name']} is not what was written")
    return int(described["step"])


def wait_for_moment(job: forked.Job, out: Path, *, delay_s: float, saving: bool) -> bool:
    """Returns at the moment to strike: some time after the first step, or while a file is written.

    Returns:
        Some rank still runs.
    """
    while num_rows(out) < 1:
        if job.poll():
            return False
        time.sleep(0.001)
    time.sleep(delay_s)
    while saving and not any((out / "checkpoint").glob("*.partial")):
        if job.poll():
            return False
        time.sleep(0.0002)
    return not job.poll()


def lose_rank(
    layout: Layout, number: int, folder: Path, chance: random.Random, seconds: float
) -> tuple[forked.Job, int, float, int, bool]:
    """Starts a run and takes a rank from it; again, when the run was over before.

    Returns:
        The job, the rank, when, the steps done, and whether a checkpoint was being written.
    """
    out, saving = folder / "out", chance.random() < 1 / 3
    heartbeat = [f"run.heartbeat_s={HEARTBEAT_S}"] * (number == signal.SIGSTOP)
    args = [*SETTINGS, *layout.settings, *heartbeat, "--out", "out"]
    while True:
        rank = chance.randrange(layout.world_size)
        job = forked.start(["train", *args], layout.world_size, cwd=folder)
        part = 0.6 if saving else 1.0
        if wait_for_moment(job, out, delay_s=chance.random() * seconds * part, saving=saving):
            at = time.monotonic()
            os.kill(job.pids[rank], number)
            was_saving = any((out / "checkpoint").glob("*.partial"))
            return job, rank, at, num_rows(out), was_saving
        job.end()
        shutil.rmtree(out)


def judge_ending(
    job: forked.Job, rank: int, at: float, number: int, step: int
) -> tuple[float, str]:
    """Seconds until the last of the others had ended, and what was wrong with how they did."""
    limit = SLACK_S + (HEARTBEAT_S if number == signal.SIGSTOP else 0.0)
    in_time = job.wait(limit, but=rank)
    late = [] if in_time else [r for r in range(len(job.pids)) if r not in job.codes and r != rank]
    ended = job.end()
    said = "is lost" if number == signal.SIGKILL else "has not been heard of"
    problems = [f"rank {other} had not ended after {limit:g} s" for other in late]
    for other, end in enumerate(ended):
        # After the last step a rank may be done, and need nobody any more.
        if other == rank or other in late or (step == STEPS and end.code == 0):
            continue
        if end.code != 1 or not re.search(rf"anychip: .*rank {rank} {said}", end.err):
            problems.append(f"rank {other} ended with {end.code}: {end.err[-300:]}")
    seconds = max(end.at for other, end in enumerate(ended) if other != rank) - at
    return seconds, "; ".join(problems)


def attempt(
    layout: Layout, number: int, wanted: Result, seconds: float, chance: random.Random
) -> Trial:
    """Loses one rank of one run, and goes on."""
    folder = Path(tempfile.mkdtemp(prefix="kill_ranks"))
    out = folder / "out"
    job, rank, at, step, was_saving = lose_rank(layout, number, folder, chance, seconds)
    took, problem = judge_ending(job, rank, at, number, step)
    saved, is_whole, is_equal = -1, False, False
    try:
        saved, is_whole = saved_step(out), True
        failed = run_to_end(["--resume", "run.heartbeat_s=30", "--out", "out"], layout, folder)
        is_equal = not failed and read_result(out) == wanted
        problem += "" if is_equal else f"resumed from step {saved}: {failed or 'other results'}"
    except (OSError, ValueError, KeyError) as error:
        problem += f"checkpoint: {error}"
    if problem:
        problem += f" (kept in {folder})"
    else:
        shutil.rmtree(folder)
    what = signal.Signals(number).name
    return Trial(layout, what, rank, step, saved, was_saving, took, is_whole, is_equal, problem)


def undisturbed(layout: Layout) -> tuple[Result, float]:
    """What a run gives that nothing happens to, and the seconds from its first step to its end."""
    folder = Path(tempfile.mkdtemp(prefix="kill_ranks"))
    args = [*SETTINGS, *layout.settings, "--out", "out"]
    job = forked.start(["train", *args], layout.world_size, cwd=folder)
    wait_for_moment(job, folder / "out", delay_s=0.0, saving=False)
    begun = time.monotonic()
    job.wait()
    seconds, ended = time.monotonic() - begun, job.end()
    if any(end.code for end in ended):
        raise RuntimeError(f"{layout.name}: the undisturbed run failed: {ended}")
    result = read_result(folder / "out")
    shutil.rmtree(folder)
    return result, seconds


def summary(trials: list[Trial], name: str) -> str:
    """One line for all trials with one signal."""
    found = [trial for trial in trials if trial.what == name]
    if not found:
        return f"{name}: none"
    times = [trial.seconds for trial in found]
    count, saving = len(found), sum(trial.was_saving for trial in found)
    return (
        f"{name} {count} times, {saving} of them while a checkpoint was written: the others had "
        f"ended, naming the rank, after {statistics.median(times):.2f} s in the median and "
        f"{max(times):.2f} s at most; checkpoint whole {sum(t.is_whole for t in found)}/{count}; "
        f"resumed bit for bit {sum(t.is_equal for t in found)}/{count}; problems "
        f"{sum(bool(t.problem) for t in found)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=50, help="ranks to kill")
    parser.add_argument("--stops", type=int, default=10, help="ranks to stop")
    parser.add_argument("--layouts", type=int, default=len(LAYOUTS), help="how many, in turn")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    forked.prepare()
    chance, layouts = random.Random(options.seed), LAYOUTS[: options.layouts]
    wanted = {layout: undisturbed(layout) for layout in layouts}
    print("| # | layout | signal | rank | after step | saving | ended after (s) | resumed from |")
    print("|---|---|---|---|---|---|---|---|")
    trials = []
    for index in range(options.times + options.stops):
        number = signal.SIGKILL if index < options.times else signal.SIGSTOP
        layout = layouts[index % len(layouts)]
        trials.append(trial := attempt(layout, number, *wanted[layout], chance))
        saving = "yes" if trial.was_saving else ""
        columns = [index + 1, layout.name, trial.what, trial.rank, trial.step, saving]
        columns += [f"{trial.seconds:.2f}", trial.saved_step]
        print(f"| {' | '.join(map(str, columns))} |", flush=True)
        if trial.problem:
            print(f"\n{trial.problem}\n", flush=True)
    print()
    for name in ("SIGKILL", "SIGSTOP"):
        print(summary(trials, name))
    return int(any(trial.problem for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
