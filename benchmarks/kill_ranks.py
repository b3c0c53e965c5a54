"""Does a job that something happens to end at once, as documented, and go on with the same bits?

What happens to a run of ``anychip train`` at a random moment, every third time while ranks write a
checkpoint, in a thread or not: a rank is killed, stopped, or asked to end; the disk is full; the
directory becomes, or is, read-only; another run wants the same directory; the environment has a
stray variable. Each process must end with the code and the message of docs/distributed.md. What is
left is checked without anychip's help: each file of the checkpoint against its sha256. Then
``--resume`` goes on, and metrics, model, optimizer and sample must equal, bit for bit, those of a
run that nothing happened to. Prints every trial and a table per kind: losses (not whole or not so),
orphans (processes that had not ended) and wrong endings; exits with 1 when there is one.

    python benchmarks/kill_ranks.py [--trials 200] [--kinds SIGKILL,SIGSTOP] [--layouts 6]
        [--saving 1] [--json]

Ranks are real processes, joined as torchrun joins them, and forked from one that has imported all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import resource
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

STEPS, EVERY = 30, 5
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


_SHAPES = (
    Layout("2 replicas, ZeRO-2", 2, ("optimizer.stage=2",)),
    Layout("2 stages, 1F1B", 2, ("parallel.pipeline=2",)),
    Layout("2 replicas of 2 stages", 4, ("parallel.pipeline=2", "optimizer.stage=1")),
)
LAYOUTS = (
    *_SHAPES,
    *(
        Layout(f"{name}, asynchronous", ranks, (*settings, "checkpoint.asynchronous=true"))
        for name, ranks, settings in _SHAPES
    ),
)


SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT")
KINDS = (*SIGNALS, "full disk", "read-only", "two writers", "stray environment")
MORE = ("SIGKILL", "SIGTERM", "SIGINT", "full disk", "two writers", "SIGKILL", "SIGSTOP", "SIGKILL")
"""What is done in turn, in equal parts with KINDS."""

STRAYS: tuple[dict[str, str], ...] = (
    {"RANK": "7"},
    {"RANK": "0", "WORLD_SIZE": "2"},
    {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
    {"WORLD_SIZE": "many"},
    {"ANYCHIP_LAUNCHED": ""},
)
"""Of which none makes a rank of a job, and none opens the directory of a finished run."""


class Result(NamedTuple):
    """What is compared of a run that is done."""

    rows: list[dict[str, Any]]
    tensors: list[str]
    sample: str


class Trial(NamedTuple):
    """One thing that happened; ``problems`` is empty when all was as it should be."""

    kind: str
    layout: str
    rank: int
    step: int
    saved_step: int
    was_saving: bool
    seconds: float
    is_lost: bool
    orphans: int
    is_ending_wrong: bool
    problems: list[str]


class Struck(NamedTuple):
    """A job just after something happened to it.

    Attributes:
        rank: to which it happened.
        at: when, in seconds of the machine's monotonic clock.
        step: updates done by then.
    """

    job: forked.Job
    rank: int
    at: float
    step: int
    was_saving: bool


class Fate(NamedTuple):
    """How the processes ended; ``wrong`` says what was not as documented."""

    seconds: float
    orphans: int
    wrong: list[str]


def read_result(out: Path) -> Result:
    """Names of a checkpoint's files of tensors are hashes of their content."""
    folder = out / "checkpoint"
    files = [path.name for path in folder.glob("tensors-*.safetensors")]
    return Result(rows(out), sorted(files), (out / "sample.txt").read_text())


def run_to_end(args: list[str], layout: Layout, cwd: Path) -> str:
    """Trains; what went wrong, or nothing."""
    job = forked.start(["train", *args], layout.world_size, cwd=cwd)
    job.wait()
    ended = job.end()
    failed = [(rank, end) for rank, end in enumerate(ended) if end.code]
    return "; ".join(f"rank {rank} ended with {end.code}: {end.err[-300:]}" for rank, end in failed)


def saved_step(out: Path) -> int:
    """Of the checkpoint, all of whose bytes are checked; 0 when there is none yet.

    Raises:
        ValueError: a file is not what was written.
    """
    manifest = out / "checkpoint" / "manifest.json"
    if not manifest.exists():
        return 0
    described = json.loads(manifest.read_text())
    names = [*described["files"], described["progress"]["name"]]
    contents = {name: (manifest.parent / name).read_bytes() for name in names}
    whole = {"file": described["progress"]["name"], "offset": 0, **described["progress"]}
    boxes = [box for tensor in described["tensors"].values() for box in tensor["boxes"]]
    for entry in [whole, *boxes]:
        content = contents[entry["file"]][entry["offset"] :][: entry["nbytes"]]
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise ValueError(f"{entry['file']} is not what was written")
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


def strike(kind: str, pid: int, out: Path, chance: random.Random) -> None:
    """Lets it happen, to one process or to the directory."""
    if kind in SIGNALS:
        os.kill(pid, signal.Signals[kind])
    elif kind == "full disk":  # a limit of the kernel on the size of files stands for the disk
        full = chance.choice(((out / "metrics.jsonl").stat().st_size, 20_000))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (full, full))
    elif kind == "read-only":
        for folder in (out / "checkpoint", out):
            if folder.exists():
                folder.chmod(0o555)


def strike_at_a_moment(
    kind: str, layout: Layout, folder: Path, chance: random.Random, seconds: float, often: float
) -> Struck:
    """Starts a run and lets it happen; again, when the run was over before."""
    out, saving = folder / "out", chance.random() < often
    heartbeat = [f"run.heartbeat_s={HEARTBEAT_S}"] * (kind == "SIGSTOP")
    args = ["train", *SETTINGS, *layout.settings, *heartbeat, "--out", "out"]
    while True:
        rank = chance.randrange(layout.world_size) if kind in SIGNALS else 0
        job = forked.start(args, layout.world_size, cwd=folder, is_plain_user=True)
        part = 0.6 if saving else 1.0
        delay_s = chance.random() * seconds * part
        # A rank may be done before the others.
        if wait_for_moment(job, out, delay_s=delay_s, saving=saving) and rank not in job.codes:
            at, step = time.monotonic(), num_rows(out)
            strike(kind, job.pids[rank], out, chance)
            was_saving = any((out / "checkpoint").glob("*.partial"))
            return Struck(job, rank, at, step, was_saving)
        job.end()
        shutil.rmtree(out)


def documented(kind: str, rank: int, other: int) -> tuple[int, str]:
    """The exit code of a process, and what it says."""
    if kind in ("SIGTERM", "SIGINT"):
        said = (
            r"^anychip: interrupted after step \d+ of \d+; to go on: .*\n$" if other == 0 else "^$"
        )
        return 128 + signal.Signals[kind], said
    lost = "has not been heard of" if kind == "SIGSTOP" else "(is lost|ended)"
    ended = rf"anychip: .*rank {rank} {lost}"
    if kind in ("full disk", "read-only"):
        said = r"^anychip: .* was not written.*\n$"
        return 1, said if other == 0 else f"{said}|{ended}"  # of a checkpoint all say it
    return 1, ended


def judge_ending(kind: str, struck: Struck) -> Fate:
    """Of the others, or of all where nobody was taken away."""
    taken = struck.rank if kind in ("SIGKILL", "SIGSTOP") else None
    job, limit = struck.job, SLACK_S + (HEARTBEAT_S if kind == "SIGSTOP" else 0.0)
    job.wait(limit, but=taken)
    judged = [rank for rank in range(len(job.pids)) if rank != taken]
    late = [rank for rank in judged if rank not in job.codes]
    ended = job.end()
    wrong = [f"rank {rank} had not ended after {limit:g} s" for rank in late]
    for rank in set(judged) - set(late):
        code, said = documented(kind, struck.rank, rank)
        end = ended[rank]
        # What comes after the last moment at which it matters changes nothing.
        is_too_late = end.code == 0 and all(ended[other].code == 0 for other in judged)
        is_too_late |= struck.step == STEPS and end.code in (0, -signal.SIGTERM)
        if not is_too_late and (end.code != code or not re.search(said, end.err)):
            wrong.append(f"rank {rank} ended with {end.code}: {end.err[-300:]}")
    return Fate(max(ended[rank].at for rank in judged) - struck.at, len(late), wrong)


def refused(job: forked.Job, answer: str) -> Fate:
    """A run that should not have begun."""
    begun, in_time = time.monotonic(), job.wait(60.0)
    wrong = [
        f"exit code {end.code}: {end.err[-300:]}"
        for end in job.end()
        if end.code != 2 or not re.fullmatch(rf"anychip: .*({answer})[^\n]*\n.*", end.err)
    ]
    return Fate(time.monotonic() - begun, int(not in_time), wrong)


def compete(layout: Layout, folder: Path, chance: random.Random, seconds: float) -> Fate:
    """Another run in the same directory, later or at the same moment; the first is done."""
    args = ["train", *SETTINGS, *layout.settings, "--out", "out"]
    job = forked.start(args, layout.world_size, cwd=folder)
    if chance.random() < 0.5:
        wait_for_moment(job, folder / "out", delay_s=chance.random() * seconds, saving=False)
        args = ["train", "--resume", "--out", "out"]
    second = forked.start(args, layout.world_size if args[1] != "--resume" else 1, cwd=folder)
    job.wait()
    second.wait()
    codes = [{end.code for end in one.end()[:1]} for one in (job, second)]
    if args[1] == "--resume" and codes == [{0}, {0}]:
        return Fate(0.0, 0, [])  # it came when the first was done, and there was nothing to do
    wrong = [] if sorted(map(sorted, codes)) == [[0], [2]] else [f"exit codes of two: {codes}"]
    return Fate(0.0, 0, wrong)


def stray(folder: Path, chance: random.Random) -> Fate:
    """A run in the directory of a finished one, with a variable of no job."""
    before = {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()}
    job = forked.start(
        ["train", *SETTINGS, "--out", "out"], 1, cwd=folder, environment=chance.choice(STRAYS)
    )
    fate = refused(job, "neither alone nor a rank of a job|exists and is not empty")
    after = {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()}
    return fate if after == before else fate._replace(wrong=["it wrote", *fate.wrong])


def go_on(layout: Layout, folder: Path, wanted: Result) -> tuple[int, str]:
    """The step of the checkpoint, and what is not as if nothing had happened."""
    out = folder / "out"
    try:
        saved = saved_step(out)
        if not (out / "checkpoint" / "manifest.json").exists():
            # Nothing to go on with must be said, and beginning anew is what is left.
            job = forked.start(["train", "--resume", "--out", "out"], 1, cwd=folder)
            if wrong := refused(job, "no checkpoint in out|no run in out").wrong:
                return saved, f"resumed from nothing: {wrong}"
            shutil.rmtree(out, ignore_errors=True)
            args = [*SETTINGS, *layout.settings, "--out", "out"]
        else:
            args = ["--resume", "run.heartbeat_s=30", "--out", "out"]
        failed = run_to_end(args, layout, folder)
        is_equal = not failed and read_result(out) == wanted
        return saved, "" if is_equal else f"resumed from step {saved}: {failed or 'other results'}"
    except (OSError, ValueError, KeyError) as error:
        return -1, f"checkpoint: {error}"


def attempt(
    kind: str, layout: Layout, wanted: Result, seconds: float, chance: random.Random, often: float
) -> Trial:
    """One thing that happens to one run, and what becomes of it."""
    folder = Path(tempfile.mkdtemp(prefix="kill_ranks"))
    struck = Struck(forked.Job(folder), 0, 0.0, 0, False)
    if kind == "two writers":
        fate = compete(layout, folder, chance, seconds)
    elif kind == "stray environment":
        run_to_end([*SETTINGS, *layout.settings, "--out", "out"], layout, folder)
        fate = stray(folder, chance)
    elif kind == "read-only" and chance.random() < 0.3:
        folder.chmod(0o555)
        place = forked.start(
            ["train", *SETTINGS, "--out", "out"], 1, cwd=folder, is_plain_user=True
        )
        fate = refused(place, "Permission denied")
    else:
        struck = strike_at_a_moment(kind, layout, folder, chance, seconds, often)
        fate = judge_ending(kind, struck)
    for path in (folder, folder / "out", folder / "out" / "checkpoint"):
        if path.exists():
            path.chmod(0o755)
    saved, loss = go_on(layout, folder, wanted)
    problems = [*fate.wrong, *([loss] if loss else [])]
    if problems:
        problems.append(f"kept in {folder}")
    else:
        shutil.rmtree(folder)
    return Trial(
        *(kind, layout.name, struck.rank, struck.step, saved, struck.was_saving, fate.seconds),
        *(bool(loss), fate.orphans, bool(fate.wrong), problems),
    )


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


def table(trials: list[Trial]) -> list[str]:
    """A row per kind."""
    lines = [
        "| kind | trials | while saving | ended after: median, at most (s) | losses | orphans "
        "| wrong endings |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        found = [trial for trial in trials if trial.kind == kind]
        if found:
            times = [trial.seconds for trial in found]
            columns: list[Any] = [kind, len(found), sum(t.was_saving for t in found)]
            columns += [f"{statistics.median(times):.2f}, {max(times):.2f}"]
            columns += [sum(t.is_lost for t in found), sum(t.orphans for t in found)]
            columns += [sum(t.is_ending_wrong for t in found)]
            lines.append(f"| {' | '.join(map(str, columns))} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of which, with commas")
    parser.add_argument("--layouts", type=int, default=len(LAYOUTS), help="how many, in turn")
    parser.add_argument("--saving", type=float, default=1 / 3, help="how often while saving")
    parser.add_argument("--json", action="store_true", help="all trials as JSON, and nothing else")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    forked.prepare()
    chance, layouts = random.Random(options.seed), LAYOUTS[: options.layouts]
    kinds = [kind for kind in (*KINDS, *MORE) if kind in options.kinds.split(",")]
    wanted = {layout: undisturbed(layout) for layout in layouts}
    trials = []
    for index in range(options.trials):
        kind, layout = kinds[index % len(kinds)], layouts[index % len(layouts)]
        trials.append(trial := attempt(kind, layout, *wanted[layout], chance, options.saving))
        text = f"{index + 1}. {kind}, {layout.name}: rank {trial.rank} after step {trial.step}, "
        text += f"gone on from {trial.saved_step}; {'; '.join(trial.problems) or 'well'}"
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        print(json.dumps([trial._asdict() for trial in trials], indent=2))
    else:
        print("\n" + "\n".join(table(trials)))
    return int(any(trial.problems for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
