"""Who watches a run is told each row that is written, as it is, on one rank, and can end nothing.

The three libraries are not installed here: in their place are modules that note what is called.
"""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import anychip
from anychip.cli.group import group
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.train import asking, config, data, evaluation, loop, report, trackers
from anychip.train.report import StepRecord
from tests.unit.train.small_runs import build, nothing, tiny

TINY = tiny(
    *("run.steps=6", "model.layers=1", "model.context=8", "checkpoint.every=2"),
    *("eval.fraction=0.01", "eval.batches=1", "eval.every=2"),
)
Said = list[tuple[int, str, float]]


def trained(out: Path, *names: str, stops_at: int | None = None) -> loop.Run:
    """A run that goes on if there is a checkpoint, to its end or with an error behind a step."""

    def show(row: StepRecord) -> None:
        if row.step == stops_at:
            raise ZeroDivisionError

    out.mkdir(exist_ok=True)
    run = build(*TINY, f"run.trackers={json.dumps(names)}")
    if (out / "checkpoint").exists():
        loop.restore(run, out)
    if stops_at is None:
        loop.train(run, out, nothing)
    else:
        with pytest.raises(ZeroDivisionError):
            loop.train(run, out, show)
    return run


def written(out: Path, first: int = 1) -> Said:
    """What the files of a run have from a step on, in the order in which it was written."""
    found: Said = []
    asked = {row.step: asdict(row) for row in evaluation.rows_of(out)}
    for row in report.read_metrics(out / "metrics.jsonl"):
        if row.step >= first:
            names = ("loss", "lr", "grad_norm", "tokens_per_s", "loss_scale")
            values = {name: getattr(row, name) for name in (*names, *report.MEASURED)}
            found += [(row.step, n, value) for n, value in values.items() if value is not None]
            names = ("loss", "perplexity", "accuracy") if row.step in asked else ()
            found += [(row.step, f"held_out/{name}", asked[row.step][name]) for name in names]
    return found


class Library:
    """In place of a module, and of what its calls return: notes calls by their path."""

    def __init__(self, answers: Mapping[str, Any], calls: list[Any], path: str = "") -> None:
        self.answers, self.calls, self.path = answers, calls, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self.path}.{name}".lstrip(".")
        return self.answers.get(path, Library(self.answers, self.calls, path))

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls.append((self.path, args, options))
        path = f"{self.path}()"
        return self.answers.get(path, Library(self.answers, self.calls, path))

    def of(self, path: str) -> list[Any]:
        """Arguments of the calls at a path: those by position, or by name if there are such."""
        return [options or args for name, args, options in self.calls if name == path]


LIBRARIES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "tensorboard": (["tensorboard", "torch.utils.tensorboard"], {}),
    "wandb": (["wandb"], {"setup().settings.mode": "offline", "init().id": "id"}),
    "mlflow": (["mlflow"], {"is_tracking_uri_set()": False, "start_run().info.run_id": "id"}),
}


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set for MLflow is taken back behind each test."""
    for variable in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(variable, "true")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Library]:
    def put(name: str, **answers: Any) -> Library:
        modules, known = LIBRARIES[name]
        library = Library({**known, **answers}, [])
        for module in modules:
            monkeypatch.setitem(sys.modules, module, library)
        return library

    return put


def told(name: str, library: Library) -> Said:
    if name == "tensorboard":
        return [(step, key, value) for key, value, step in library.of("SummaryWriter().add_scalar")]
    path = {"wandb": "init().log", "mlflow": "log_metrics"}[name]
    calls = [(args[0], options["step"]) for at, args, options in library.calls if at == path]
    return [(step, key, value) for values, step in calls for key, value in values.items()]


@pytest.mark.parametrize("name", LIBRARIES)
def test_library_is_told_what_is_written_and_goes_on_where_the_run_does(
    tmp_path: Path, stand_in: Callable[..., Library], name: str
) -> None:
    out, library = tmp_path / "mine", stand_in(name)
    trained(out, name, stops_at=3)
    want = written(out)
    assert [step for step, key, _ in want if key == "loss"] == [1, 2, 3]
    run = trained(out, name)
    want += written(out, first=3)
    assert want[-1][:2] == (6, "held_out/accuracy")
    assert told(name, library) == want
    assert run.trackers.status == {name: "ok"}
    if name == "tensorboard":
        opened = [(at, options) for path, at, options in library.calls if path == "SummaryWriter"]
        folder = (str(out / "tensorboard"),)
        assert opened == [(folder, {"purge_step": 1}), (folder, {"purge_step": 3})]
        assert len(library.of("SummaryWriter().close")) == 2
        assert "    model.width = 16\n" in library.of("SummaryWriter().add_text")[0][1]
        return
    assert json.loads((out / "trackers.json").read_text()) == {name: "id"}
    if name == "wandb":
        for call, known in zip(library.of("init"), [(None, None), ("id", "allow")], strict=True):
            assert (call["name"], call["dir"]) == ("mine", str(out))
            assert call["config"]["model.width"] == 16
            assert (call["id"], call["resume"]) == known
        assert library.of("init().finish") == [{"exit_code": 1}, {"exit_code": 0}]
        assert library.of("Settings") == [{"console": "off"}] * 2
    else:
        ids = [None, "id"]
        assert library.of("start_run") == [{"run_id": i, "run_name": "mine"} for i in ids]
        assert library.of("end_run") == [("FAILED",), ("FINISHED",)]
        assert library.of("set_tracking_uri") == [((out / "mlruns").as_uri(),), (None,)] * 2
        assert [params["model.width"] for (params,) in library.of("log_params")] == [16]


def test_settings_of_the_libraries_themselves_are_kept_and_nobody_is_asked_for_a_key(
    tmp_path: Path, stand_in: Callable[..., Library]
) -> None:
    mlflow = stand_in("mlflow", **{"is_tracking_uri_set()": True})
    wandb = stand_in("wandb", **{"setup().settings.mode": "online", "login()": False})
    status = trained(tmp_path, "mlflow", "wandb").trackers.status
    assert (status["mlflow"], mlflow.of("set_tracking_uri")) == ("ok", [])
    assert "no key; run `wandb login`" in status["wandb"]
    assert (wandb.of("login"), wandb.of("init")) == ([{"prompt": False}], [])


@pytest.mark.parametrize(("prepare", "text"), [
    (lambda out: (out / "wandb").symlink_to(out), "wandb is a link"),
    (lambda out: (out / "trackers.json").write_text("[]"), "trackers.json: "),
])  # fmt: skip
def test_run_follows_no_link_and_ends_by_no_file_of_its_ids(
    tmp_path: Path, stand_in: Callable[..., Library], prepare: Callable[[Path], None], text: str
) -> None:
    library = stand_in("wandb")
    trained(tmp_path, "wandb", stops_at=3)
    (tmp_path / "trackers.json").unlink()
    prepare(tmp_path)
    assert text in trained(tmp_path, "wandb").trackers.status["wandb"]
    assert len(library.of("init")) == 1


def test_new_run_in_a_directory_takes_up_no_ids_of_one_before(
    tmp_path: Path, stand_in: Callable[..., Library]
) -> None:
    (tmp_path / "trackers.json").write_text('{"wandb": "of another run"}')
    library = stand_in("wandb")
    trained(tmp_path, "wandb")
    assert library.of("init")[0]["id"] is None


OWN = """
from anychip.train.trackers import Tracker

SAID = []

class Mine(Tracker):
    fails = None
    def _note(self, name, *said):
        print("what is in the way of the result")
        SAID.append((type(self).__name__, name, *said))
        if self.fails == name:
            raise RuntimeError(f"no {name}\\ntoday")
    def begin(self, out, settings): self._note("begin", out, dict(settings))
    def log(self, step, values): self._note("log", step, dict(values))
    def end(self, failed): self._note("end", failed)

class Begin(Mine): fails = "begin"
class Log(Mine): fails = "log"
class End(Mine): fails = "end"

class Raising(Mine):
    def __init__(self): raise RuntimeError("not today")
"""
ENTRIES = """[anychip.trackers]
mine = own_trackers:Mine
begin = own_trackers:Begin
log = own_trackers:Log
end = own_trackers:End
raising = own_trackers:Raising
absent = own_trackers:Absent
other = builtins:dict
twice = own_trackers:Mine
"""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is told to the trackers of a distribution that is installed for the test."""
    site = tmp_path / "site"
    for name, entries in (("own", ENTRIES), ("more", "[anychip.trackers]\ntwice = elsewhere:T\n")):
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entries)
    (site / "own_trackers.py").write_text(OWN)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "own_trackers", raising=False)
    found: list[Any] = importlib.import_module("own_trackers").SAID
    return found


def test_class_of_another_distribution_is_found_and_told_everything(
    tmp_path: Path, said: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    trained(out, "mine")
    (_, _, where, settings), *rows, end = said
    assert (where, end) == (out, ("Mine", "end", False))
    assert settings["run.trackers"] == ["mine"]
    assert settings["model.kind"] == "gpt"
    found = [(step, key, value) for *_, step, values in rows for key, value in values.items()]
    assert found == written(out)
    assert capsys.readouterr().out == ""
    num_said = len(said)
    assert trained(out, "mine").trackers.status == {}  # nothing was left to do
    assert len(said) == num_said
    assert asking.settings_of(out).run.trackers == ()


@pytest.mark.parametrize("name", ["begin", "log", "end"])
def test_tracker_that_raises_is_left_out_and_said_once_and_the_run_is_the_same(
    tmp_path: Path, said: list[Any], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    trained(tmp_path / "without")
    run = trained(tmp_path / "out", name, "mine")
    rows = [report.read_metrics(tmp_path / n / "metrics.jsonl") for n in ("without", "out")]
    assert [[replace(row, tokens_per_s=0.0) for row in part] for part in rows[1:]] == [
        [replace(row, tokens_per_s=0.0) for row in rows[0]]
    ]
    text = f"the tracker {name!r} has failed and is left out from here on: RuntimeError: no {name} "
    assert run.trackers.status == {name: f"{text}today", "mine": "ok"}
    assert capsys.readouterr().err.count(f"anychip: {text}today\n") == 1
    calls = [call for who, call, *_ in said if who == name.capitalize()]
    want = ["begin", *["log"] * 9, "end"]  # six steps and three evaluations
    assert calls == want[: want.index(name) + 1]
    assert [call for who, call, *_ in said if who == "Mine"] == want


@pytest.mark.parametrize(("name", "text"), [
    ("nobody", r"there is no tracker 'nobody'; there are: absent, .* mlflow, .*tensorboard"),
    ("twice", "'twice' is elsewhere:T and own_trackers:Mine; uninstall all but one"),
    ("absent", r"'absent' \(own_trackers:Absent\) cannot be made: AttributeError"),
    ("raising", r"'raising' \(own_trackers:Raising\) cannot be made: RuntimeError: not today"),
    ("other", r"'other' \(builtins:dict\) cannot be made: .*trackers.Tracker expected, got dict"),
])  # fmt: skip
def test_tracker_that_cannot_be_had_is_refused_before_anything_is_read(
    said: list[Any], name: str, text: str
) -> None:
    settings = config.load(None, [f'run.trackers=["{name}"]', 'data.files=["/not/there.txt"]'])
    with pytest.raises(config.ConfigError, match=rf"run\.trackers: {text}"):
        loop.build(settings, anychip.use("cpu"))
    assert said == []


@pytest.mark.parametrize("name", LIBRARIES)
def test_library_that_is_not_installed_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(data.MissingExtraError, match=rf"{name}.*pip install 'anychip\[trackers\]'"):
        build(*TINY, f"run.trackers={json.dumps([name])}")


def test_of_several_ranks_the_first_has_trackers(tmp_path: Path, said: list[Any]) -> None:
    def work(comm: Communicator) -> dict[str, str]:
        run = build(*TINY, 'run.trackers=["mine"]', comm=comm)
        loop.train(run, tmp_path, nothing)
        return run.trackers.status

    assert run_ranks(2, work) == [{"mine": "ok"}, {}]
    assert [call for _, call, *_ in said] == ["begin", *["log"] * 9, "end"]


def test_number_that_there_is_none_of_is_left_out(said: list[Any]) -> None:
    row = StepRecord(step=1, loss=2.0, lr=3.0, grad_norm=None, tokens_per_s=4.0, skipped=True)
    trackers.make(["mine"]).log(row)
    values = {"loss": 2.0, "lr": 3.0, "tokens_per_s": 4.0, "loss_scale": 1.0}
    assert said == [("Mine", "log", 1, values)]


def test_result_for_programs_says_of_each_tracker_how_it_went(
    tmp_path: Path, said: list[Any]
) -> None:
    words = ["train", "--json", "--backend", "cpu", "--out", str(tmp_path / "out"), *TINY]
    done = CliRunner().invoke(group, [*words, 'run.trackers=["mine", "log"]'])
    found = json.loads(done.stdout)["trackers"]
    assert (found["mine"], found["log"].split(":")[0]) == (
        "ok", "the tracker 'log' has failed and is left out from here on",
    )  # fmt: skip
