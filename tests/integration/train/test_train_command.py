"""``anychip train`` as a person types it: what it prints and leaves, and what it refuses."""

import json
import os
from pathlib import Path

import pytest

from anychip.cli.group import run
from anychip.train import lock
from tests.integration.train.processes import TINY, num_rows, rows, train

ROOT = Path(__file__).parents[3]
OUTPUTS = {
    "checkpoint", "config.toml", "loss.png", "metrics.jsonl", "provenance.json", "sample.txt",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a finished run in ``out``."""
    directory = tmp_path_factory.mktemp("finished")
    done = train(*TINY, "--backend", "cpu", "--steps", "6", "--out", "out", cwd=directory)
    assert done.returncode == 0, done.stderr
    return directory


def test_training_says_what_it_does_and_leaves_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 30)
    (tmp_path / "b.txt").write_text("that is the question\n")
    args = ("--backend", "cpu", "--steps", "12", "--out", "deep/out", "--data", "a.txt", "b.txt")
    done = train(*TINY, *args, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("backend cpu (argument: ")
    assert "GPT with" in lines[1]
    assert lines[2] == "592 bytes of a.txt, b.txt"  # one between the two
    assert any(line.startswith("step  1/12  loss 5.") for line in lines)
    assert any(line.split()[:3] == ["adamw", "forward", "24"] for line in lines)
    assert "in deep/out: metrics.jsonl, loss.png" in lines[-1]
    out = tmp_path / "deep/out"
    assert {path.name for path in out.iterdir()} == OUTPUTS
    assert [row["step"] for row in rows(out)] == list(range(1, 13))
    operators = json.loads((out / "provenance.json").read_text())["operators"]
    assert {row["provider"] for row in operators} == {"cpu"}


@pytest.mark.grid
def test_training_without_out_makes_a_directory_named_by_the_time(tmp_path: Path) -> None:
    done = train(*TINY, "--steps", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (out,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in out.iterdir()} == OUTPUTS


@pytest.mark.grid
def test_training_with_json_prints_one_object_on_stdout(tmp_path: Path) -> None:
    done = train(*TINY, "--backend", "cpu", "--steps", "3", "--out", "o", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    found = rows(tmp_path / "o")
    assert answer["schema"] == 1
    assert (answer["out"], answer["backend"], answer["steps"]) == ("o", "cpu", 3)
    assert (answer["first_loss"], answer["last_loss"]) == (found[0]["loss"], found[-1]["loss"])
    assert {row["operator"] for row in answer["operators"]} >= {"linear", "adamw"}


@pytest.mark.grid
def test_training_from_a_file_with_settings_over_it(tmp_path: Path) -> None:
    done = train(
        str(ROOT / "examples" / "llama.toml"), "model.layers=1", "run.steps=2",
        "run.sample_tokens=0", "--out", "out", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Llama with" in done.stdout
    assert "A sample:" not in done.stdout
    assert "layers = 1" in (tmp_path / "out/config.toml").read_text()


def test_finished_run_goes_on_for_more_steps(finished: Path) -> None:
    before = rows(finished / "out")
    done = train("--resume", "--out", "out", "--steps", "9", cwd=finished)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("backend cpu (config: ")
    assert rows(finished / "out")[:6] == before
    assert num_rows(finished / "out") == 9


@pytest.mark.grid
@pytest.mark.parametrize(("args", "code", "answer"), [
    (["--backend", "cpuu"], 2, "did you mean 'cpu'?"),
    (["--backend", "npu"], 3, "backend 'npu' cannot run here (unavailable)"),
    (["model.widht=3"], 2, "there is no setting 'model.widht'; did you mean 'model.width'?"),
    (["run.precision=fp61"], 2, "precision must be one of fp32, bf16, fp16, auto, got 'fp61'"),
    (["absent.toml"], 2, "absent.toml"),
    (["a.txt"], 2, "'a.txt' is neither CONFIG.toml nor key=value"),
    (["a.toml", "b.toml"], 2, "one CONFIG expected, got a.toml, b.toml"),
    (["run.steps=2", "--steps", "3"], 2, "run.steps is given twice"),
    (["--data", "absent.txt"], 2, "absent.txt"),
    (["--data", "empty.txt"], 2, "data file empty.txt is empty"),
    (["--data", "binary.txt"], 2, "data file binary.txt is binary: a zero byte at 1"),
    (["--data", "short.txt"], 2, "the data is too short: at least 17 bytes expected"),
    (["--data", "full"], 2, "data directory full"),
    (["--steps", "0"], 2, "'--steps': 0 is not in the range"),
    (["--nproc", "3", "parallel.pipeline=2"], 2, "do not multiply to the 3 ranks"),
    (["parallel.pipeline=2"], 2, "start it with --nproc 2"),
    (["--resume"], 2, "--resume needs --out"),
    (["--resume", "--out", "absent"], 2, "there is no run in absent"),
    (["--resume", "--out", "begun"], 2, "there is no checkpoint in begun to go on with"),
    (["--resume", "--out", "begun", "--nproc", "2"], 2, "train begun/config.toml --out ANOTHER"),
    (["--data", "pipe"], 2, "data file pipe is a pipe, a socket or a device; a file expected"),
    (["--data", ""], 2, "'--data': a path expected, got ''"),
    (["--out", ""], 2, "'--out': a path expected, got ''"),
    (["data.files=['']"], 2, "a data file is named '', which is no path"),
    (["--out", "full"], 2, "full exists and is not empty; nothing was written"),
    (["--out", "short.txt"], 2, "short.txt exists"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_wrong_use_is_one_message_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    args: list[str], code: int, answer: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "binary.txt").write_bytes(b"a\0b" * 50)
    (tmp_path / "short.txt").write_text("short")
    for name in ("full/mine", "begun/config.toml", "begun/checkpoint/model.0.partial"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    os.mkfifo(tmp_path / "pipe")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    keys = [arg.partition("=")[0] for arg in args]
    settings = [setting for setting in TINY if setting.partition("=")[0] not in keys]
    assert run(["train", *settings, *args]) == code
    shown = capsys.readouterr()
    assert shown.err.startswith("anychip: ")
    assert answer in shown.err
    assert "Traceback" not in shown.out + shown.err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


WORKER = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.grid
@pytest.mark.parametrize(("variables", "out", "answer"), [
    (WORKER, None, "several ranks need --out, one directory for all of them"),
    (WORKER | {"RANK": "4"}, None, "neither alone nor a rank of a job: RANK=4, WORLD_SIZE=4"),
    ({"RANK": "7"}, "full", "neither alone nor a rank of a job: RANK=7, WORLD_SIZE=(not set)"),
    ({"ANYCHIP_LAUNCHED": ""}, "full", "full exists and is not empty; nothing was written"),
], ids=["no out", "rank", "stray rank", "no launcher"])  # fmt: skip
def test_stray_variables_are_named_and_protect_no_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    variables: dict[str, str], out: str | None, answer: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "metrics.jsonl").write_text("mine")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run(["train", *TINY, "--steps", "1", *(["--out", out] if out else [])]) == 2
    assert answer in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "metrics.jsonl"]
    assert (tmp_path / "full" / "metrics.jsonl").read_text() == "mine"


@pytest.mark.grid
@pytest.mark.parametrize(("settings", "answer"), [
    (("model.width=32",), "it is of another model"),
    (("data.files=['a.txt']",), "does not fit the data"),
], ids=["model", "data"])  # fmt: skip
def test_resume_of_something_else_is_refused_and_changes_nothing(
    finished: Path, settings: tuple[str, ...], answer: str
) -> None:
    (finished / "a.txt").write_text("another text " * 30)
    out = finished / "out"
    before = {path: path.read_bytes() for path in out.rglob("*.*")}
    done = train("--resume", "--out", "out", "--steps", "20", *settings, cwd=finished)
    assert done.returncode == 2
    assert answer in done.stderr
    assert "Traceback" not in done.stderr
    assert {path: path.read_bytes() for path in out.rglob("*.*")} == before


@pytest.mark.parametrize(("args", "out"), [
    (["--resume", "--steps", "30"], "out"), ([], "fresh"), (["--resume", "--nproc", "2"], "out"),
], ids=["resume", "new", "launcher"])  # fmt: skip
def test_second_writer_is_told_who_writes_and_changes_nothing(
    finished: Path, capsys: pytest.CaptureFixture[str], args: list[str], out: str
) -> None:
    directory = finished / out
    directory.mkdir(exist_ok=True)
    settings = () if args else TINY
    with lock.hold(directory):
        before = {path: path.read_bytes() for path in directory.rglob("*.*")}
        assert run(["train", *settings, *args, "--backend", "cpu", "--out", str(directory)]) == 2
        assert {path: path.read_bytes() for path in directory.rglob("*.*")} == before
    said = capsys.readouterr().err
    assert said.startswith(f"anychip: {directory} is in use: process {os.getpid()} on ")
    assert said.count("\n") == 1


@pytest.mark.grid
def test_loss_that_is_not_finite_ends_with_the_step_and_the_way_back(tmp_path: Path) -> None:
    settings = ("optimizer.lr=1e30", "optimizer.max_norm=0", "schedule.warmup=0")
    done = train(*TINY, *settings, "checkpoint.every=1", "--out", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert "anychip: step " in done.stderr
    assert "the last good checkpoint is in out" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out/checkpoint/manifest.json").exists()
