"""Processes killed, interrupted or out of disk in mid-run, which go on with the same bits."""

import json
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.train.processes import TINY, command, num_rows, rows, start, train, variables

STEPS = 400
SETTINGS = (*TINY, "--backend", "cpu", "--steps", str(STEPS), "checkpoint.every=20")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    directory = tmp_path_factory.mktemp("straight")
    done = train(*SETTINGS, "--out", "out", cwd=directory)
    assert done.returncode == 0, done.stderr
    return directory / "out"


def _start_and_wait(cwd: Path, steps: int) -> subprocess.Popen[str]:
    """A run that has done at least some steps."""
    process = start(*SETTINGS, "--out", "out", cwd=cwd)
    while num_rows(cwd / "out") < steps:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)
    return process


def _checkpoint(out: Path) -> list[str]:
    """The names of a checkpoint's files of tensors, which are hashes of their content."""
    folder = out / "checkpoint"
    found = [path.name for path in folder.glob("tensors-*.safetensors")]
    assert found
    return found


@pytest.mark.grid
def test_run_killed_in_mid_run_and_resumed_equals_one_that_was_not(
    tmp_path: Path, straight: Path
) -> None:
    process = _start_and_wait(tmp_path, 45)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert 45 <= num_rows(tmp_path / "out") < STEPS
    done = train("--resume", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "out") == rows(straight)
    assert [row["step"] for row in rows(straight)] == list(range(1, STEPS + 1))
    assert _checkpoint(tmp_path / "out") == _checkpoint(straight)
    assert (tmp_path / "out/sample.txt").read_text() == (straight / "sample.txt").read_text()


@pytest.mark.grid
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl_c", "sigterm"]
)
def test_run_interrupted_keeps_its_last_step_and_says_how_to_go_on(
    tmp_path: Path, straight: Path, number: int, code: int
) -> None:
    process = _start_and_wait(tmp_path, 5)
    process.send_signal(number)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == code
    last = num_rows(tmp_path / "out")
    assert errors.splitlines()[-1] == (
        f"anychip: interrupted after step {last} of {STEPS}; to go on: "
        "anychip train --resume --out out"
    )
    done = train("--resume", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"going on after step {last}" in done.stdout
    assert rows(tmp_path / "out") == rows(straight)
    assert _checkpoint(tmp_path / "out") == _checkpoint(straight)


@pytest.mark.grid
def test_run_that_finds_the_disk_full_says_so_and_keeps_its_checkpoint(
    tmp_path: Path, straight: Path
) -> None:
    """A limit of the kernel on the size of files stands for the disk."""
    process = _start_and_wait(tmp_path, 5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=200)
    saved = json.loads((tmp_path / "out/checkpoint/manifest.json").read_text())
    (file,) = saved["files"].values()
    limit = file["nbytes"] - 1
    done = subprocess.run(
        command("--resume", "--out", "out"), cwd=tmp_path, env=variables(), capture_output=True,
        text=True, timeout=200,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 1
    assert "was not written; the one before is intact: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "out/checkpoint/manifest.json").read_text()) == saved
    done = train("--resume", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "out") == rows(straight)
