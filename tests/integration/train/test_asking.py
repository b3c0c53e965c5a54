"""``anychip eval`` and ``anychip sample`` of runs that ``anychip train`` has left, on any ranks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from anychip.cli.group import run
from tests.integration.train.forked import Server
from tests.integration.train.processes import TINY

SETTINGS = ("train", *TINY, "--backend", "cpu", "--steps", "4", "--data", "text.txt")
HELD_OUT = ("eval.fraction=0.2", "eval.every=2", "eval.keep_best=true")


def write_texts(folder: Path) -> None:
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 20)
    (folder / "other.txt").write_text("or to take arms against a sea of troubles")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that commands run in, with two texts."""
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has held out nothing."""
    folder = tmp_path_factory.mktemp("trained")
    write_texts(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run([*SETTINGS, "--out", "out"]) == 0
    return folder / "out"


@pytest.fixture
def finished(here: Path, trained: Path) -> Path:
    """The directory that commands run in, with that run in ``out``."""
    shutil.copytree(trained, here / "out")
    return here


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """What a command that ends well prints as JSON."""
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def evaluations(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(out, "eval.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("arrangement", "rel"), [
    (("optimizer.stage=3",), 0.0), (("parallel.pipeline=2", "data.accumulation=2"), 1e-6),
], ids=["stage3", "pipeline"])  # fmt: skip
def test_run_of_two_ranks_is_asked_on_one_and_on_two(
    here: Path, ranks: Server, capsys: pytest.CaptureFixture[str], arrangement: tuple[str, ...],
    rel: float,
) -> None:  # fmt: skip
    words = (*SETTINGS, *HELD_OUT, *arrangement, "--out", "out")
    first, other = ranks.run(*words, world_size=2, cwd=here)
    assert (first.code, first.err, other.code, other.err) == (0, "", 0, "")
    *_, row = rows = evaluations("out")
    assert [each["step"] for each in rows] == [2, 4]
    assert "step 4/4  held-out loss" in first.out
    assert f"; held out {row['loss']:.4f}, at best {row['loss']:.4f} at step 4; in" in first.out
    found = answer(capsys, "eval", "out", "--best")
    assert found.pop("loss") == pytest.approx(row["loss"], rel=rel, abs=0)
    about = {"schema": 1, "checkpoint": "out/best", "backend": "cpu", "step": 4, "targets": 167}
    assert {key: found[key] for key in about} == about
    again, silent = ranks.run("eval", "out", "--json", "--backend", "cpu", world_size=2, cwd=here)
    assert (again.code, again.err, silent.code, silent.out) == (0, "", 0, "")
    assert json.loads(again.out)["loss"] == pytest.approx(row["loss"], rel=rel, abs=0)


def test_training_tells_the_last_and_the_best_evaluation_and_why_it_ended(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    still = ("optimizer.lr=0", "eval.every=1", "eval.patience=2", "eval.files=['other.txt']")
    told = answer(capsys, *SETTINGS, *still, "--out", "out")
    first, *_, last = rows = evaluations("out")
    assert (len(rows), told["steps"]) == (3, 3)
    assert told["held_out"] == {"last": last, "best": first}
    assert run(["train", "--resume", "--out", "out"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "ended after step 3: the last 2 evaluations have found no lower held-out loss "
        "(eval.patience)"
    )
    assert evaluations("out") == rows


def test_run_is_asked_about_files_that_it_has_not_held_out(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").unlink()  # only what is asked is read
    found = answer(capsys, "eval", "out", "--data", "other.txt", "other.txt")
    assert (found["checkpoint"], found["step"], found["targets"]) == ("out", 4, 82)
    assert run(["eval", "out", "--data", "other.txt"]) == 0
    assert capsys.readouterr().out.endswith("% of 40 targets\n")


@pytest.mark.grid
def test_ranks_are_started_by_a_command(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = [answer(capfd, "eval", "out", "--data", "other.txt", "--nproc", n) for n in "12"]
    assert found[0] == found[1]
    assert run(["eval", "out", "--data", "absent.txt", "--nproc", "2"]) == 2
    assert "absent.txt: No such file or directory" in capfd.readouterr().err


def test_sample_is_that_of_the_run_and_each_prompt_has_its_own(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").unlink()
    (own,) = answer(capsys, "sample", "out")["samples"]
    assert own == {"prompt": "\n", "text": Path("out/sample.txt").read_text()}
    words = ("sample", "out", "--max-tokens", "12", "--seed", "3")
    both = answer(capsys, *words, "to be", "or")
    assert (both["schema"], both["checkpoint"], both["step"]) == (1, "out", 4)
    alone = [answer(capsys, *words, prompt)["samples"][0] for prompt in ("to be", "or")]
    assert both["samples"] == alone
    assert alone[0] != answer(capsys, *words[:-1], "4", "to be")["samples"][0]
    greedy = [
        answer(capsys, *words[:-1], seed, "to", *likeliest)["samples"]
        for seed, likeliest in (("3", ("--temperature", "0")), ("4", ("--top-p", "1e-9")),
                                ("5", ("--temperature", "1e-300")))
    ]  # fmt: skip
    assert greedy[0] == greedy[1] == greedy[2]
    assert run([*words, "to be"]) == 0
    assert capsys.readouterr().out.startswith("to be")


@pytest.mark.parametrize(("words", "message"), [
    ("eval", "Missing argument 'RUN'"),
    ("eval absent", "there is no run of anychip train in absent"),
    ("eval out", "out has held nothing out; name text files after --data"),
    ("eval out other.txt", "'other.txt': a text to be asked about goes after --data"),
    ("eval out --data absent.txt", "absent.txt: No such file or directory"),
    ("eval out --data one.txt", "the held-out data is too short: at least 2 tokens expected"),
    ("eval out --best --data other.txt", "out has no best checkpoint"),
    ("eval out --nproc 0 --data other.txt", "'--nproc': 0 is not in the range x>=1"),
    ("eval out --backend cpuu --data other.txt", "did you mean 'cpu'?"),
    ("eval empty --data other.txt", "there is no checkpoint in empty"),
    ("sample absent", "there is no run of anychip train in absent"),
    ("sample out --best", "out has no best checkpoint"),
    ("sample out --max-tokens 0", "'--max-tokens': 0 is not in the range x>=1"),
    ("sample out --temperature -1", "'--temperature': -1.0 is not in the range x>=0.0"),
    ("sample out --temperature nan", "'--temperature': a finite number expected, got nan"),
    ("sample out --temperature hot", "'--temperature': 'hot' is not a valid float"),
    ("sample out --top-p 0", "'--top-p': 0.0 is not in the range 0.0<x<=1.0"),
    ("sample out --top-p 1.5", "'--top-p': 1.5 is not in the range 0.0<x<=1.0"),
    ("sample out --seed -1", "'--seed': -1 is not in the range x>=0"),
    ("sample out EMPTY", "a prompt with at least one token expected, got ''"),
])  # fmt: skip
def test_wrong_use_is_one_message(
    finished: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    Path("one.txt").write_text("a")
    Path("empty").mkdir()
    Path("empty/config.toml").write_bytes(Path("out/config.toml").read_bytes())
    assert run(["" if word == "EMPTY" else word for word in words.split()]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("Traceback")) == ("", 0)
    assert message in told.err
