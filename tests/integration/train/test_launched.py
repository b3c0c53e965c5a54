"""The launchers that people use: ``--nproc`` and torchrun give one run, and end as they should."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.collectives.processes import free_port
from tests.integration.train.forked import Server
from tests.integration.train.processes import command, num_rows, start, train, variables
from tests.integration.train.test_ranks import SETTINGS, ZERO, Trained, run

ENDLESS = (*SETTINGS[: SETTINGS.index("--steps")], "--steps", "100000", "checkpoint.every=20")


@pytest.fixture(scope="module")
def wanted(ranks: Server, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What two ranks give that were forked."""
    directory = tmp_path_factory.mktemp("forked")
    run(ranks, directory, *SETTINGS, *ZERO, world_size=2)
    return Trained(directory / "out")


@pytest.mark.grid
def test_nproc_gives_the_run_and_says_it_once(wanted: Trained, tmp_path: Path) -> None:
    done = train(*SETTINGS, *ZERO, "--nproc", "2", "--out", "out", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("2 ranks: 2 replicas, ZeRO stage 2") == 1
    Trained(tmp_path / "out").assert_same(wanted)
    logs = sorted(path.name for path in (tmp_path / "out/logs").iterdir())
    assert logs == ["rank1.err", "rank1.out"]


@pytest.mark.grid
def test_torchrun_gives_the_run(wanted: Trained, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = [*SETTINGS, *ZERO, "--out", "out"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "-m", "anychip", "train", *words], cwd=tmp_path,
        env=variables(), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    Trained(tmp_path / "out").assert_same(wanted)


@pytest.mark.grid
def test_ranks_of_any_launcher_are_a_job(wanted: Trained, tmp_path: Path) -> None:
    """As Kubernetes starts them: no variable of torchrun's."""
    words = command(*SETTINGS, *ZERO, "--backend", "cpu", "--out", "out")
    assert _as_ranks([words, words], tmp_path) == [("", 0)] * 2
    Trained(tmp_path / "out").assert_same(wanted)


def _as_ranks(commands: list[list[str]], cwd: Path) -> list[tuple[str, int]]:
    """What the ranks of a job, each with its command, write to stderr, and end with."""
    place = {"WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "localhost"}
    place |= {"MASTER_PORT": str(free_port()), "ANYCHIP_SECRET": "of sixteen letters"}
    started = [
        subprocess.Popen(
            words, cwd=cwd, env=variables(RANK=str(rank), **place), stderr=subprocess.PIPE,
            text=True,
        )
        for rank, words in enumerate(commands)
    ]  # fmt: skip
    return [(rank.communicate(timeout=200)[1], rank.returncode) for rank in started]


ASKED_AFTER_THE_MEETING = """
import os, signal, sys
from anychip.cli import main
from anychip.train import run

met = run._compare

def compare(*arguments):
    met(*arguments)
    os.kill(os.getpid(), signal.SIGTERM)

run._compare = compare
main()
"""


@pytest.mark.grid
def test_rank_that_is_asked_to_end_before_the_first_step_is_not_lost(tmp_path: Path) -> None:
    words = command(*ENDLESS, *ZERO, "--backend", "cpu", "--out", "out")
    asked = [sys.executable, "-c", ASKED_AFTER_THE_MEETING, *words[3:]]
    first, second = _as_ranks([words, asked], tmp_path)
    told = "interrupted after step 1 of 100000; to go on: anychip train --resume --out out"
    assert first == (f"anychip: {told}\n", 143)
    assert second == ("", 143)
    assert _saved_step(tmp_path / "out") == 1


@pytest.mark.grid
def test_refused_settings_are_one_message_and_the_directory_can_be_used_again(
    ranks: Server, tmp_path: Path
) -> None:
    """The ranks find out, after they have been started."""
    wrong = ("--data", "absent.txt", "--nproc", "2", "--out", "out")
    done = train(*SETTINGS, *wrong, cwd=tmp_path)
    assert done.returncode == 2
    assert "absent.txt: No such file or directory" in done.stderr
    run(ranks, tmp_path, *SETTINGS, world_size=2)


def _start(cwd: Path) -> tuple[subprocess.Popen[str], dict[int, int]]:
    """A run under the launcher that has done some steps; and its ranks' processes."""
    process = start(*ENDLESS, *ZERO, "--nproc", "2", "--out", "out", cwd=cwd)
    while num_rows(cwd / "out") < 25:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    found = {}
    for pid in map(
        int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ):
        settings = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(text[5:]): pid for text in settings if text.startswith(b"RANK=")}
    assert set(found) == {0, 1}
    return process, found


def _saved_step(out: Path) -> int:
    return int(json.loads((out / "checkpoint/manifest.json").read_text())["step"])


@pytest.mark.grid
@pytest.mark.parametrize(
    ("rank", "number"), [(None, signal.SIGINT), (1, signal.SIGTERM), (0, signal.SIGINT)]
)
def test_interrupted_launcher_or_rank_ends_all_with_one_message(
    tmp_path: Path, rank: int | None, number: signal.Signals
) -> None:
    process, pids = _start(tmp_path)
    os.kill(process.pid if rank is None else pids[rank], number)
    _, errors = process.communicate(timeout=100)
    last = num_rows(tmp_path / "out")
    assert errors == (
        f"anychip: interrupted after step {last} of 100000; to go on: "
        "anychip train --resume --out out\n"
    )
    assert process.returncode == 128 + number
    assert _saved_step(tmp_path / "out") == last
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


@pytest.mark.grid
def test_killed_rank_ends_the_launcher_which_names_it(tmp_path: Path) -> None:
    process, pids = _start(tmp_path)
    os.kill(pids[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=100)
    assert len(errors.splitlines()) == 2, errors
    first, second = errors.splitlines()
    assert first.startswith("anychip: data, rank 0 of 2: ")
    assert first.endswith(": rank 1 is lost: its process was killed or has crashed")
    assert second == "anychip: rank 1 was ended by SIGKILL, and the other ranks with it"
    assert process.returncode == 1
    assert _saved_step(tmp_path / "out") >= 20
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
