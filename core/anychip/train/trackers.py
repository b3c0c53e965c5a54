"""Who watches a run? Trackers: what is written of it goes to them too, by one small interface.

A tracker is an entry point of the group ``anychip.trackers``: its name is what ``run.trackers``
says, its value a class. Ours stand there like anybody's; their libraries are the extra
``trackers``. Only the rank that writes has them. For users and authors: docs/watching.md.
"""

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import tomlkit

from anychip.registry.loading import describe
from anychip.train import files, schema
from anychip.train.config import Config, ConfigError, dump
from anychip.train.data.extra import MissingExtraError, require
from anychip.train.report import MEASURED, Evaluation, StepRecord

GROUP = "anychip.trackers"
FILE = "trackers.json"
"""In the directory of a run: by which ids its trackers know it."""

_NAMES = {
    StepRecord: ("", ("loss", "lr", "grad_norm", "tokens_per_s", "loss_scale", *MEASURED)),
    Evaluation: ("held_out/", ("loss", "perplexity", "accuracy")),
}
"""What is said of a row, and what stands before it."""


class Tracker(ABC):
    """What is told of a run. Made without arguments, on one rank, before any data is read.

    An exception of ``__init__`` refuses the run; one of a method leaves the tracker out.
    """

    @abstractmethod
    def begin(self, out: Path, settings: Mapping[str, Any]) -> None:
        """A run begins, or goes on, in a directory; settings are like ``"model.width": 256``."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers after so many updates; an evaluation's come after those of its step.

        A run that goes on from a checkpoint says what came after that again.
        """

    @abstractmethod
    def end(self, failed: bool) -> None:
        """Nothing follows. ``failed``: by an error; an interrupted run has not failed."""


class Trackers:
    """Those of a run, by their names; none on a rank that does not write.

    Attributes:
        status: name to "ok", or to the sentence that says why it was left out; empty until it
            begins.
    """

    def __init__(self, trackers: Mapping[str, Tracker] | None = None) -> None:
        self.status: dict[str, str] = {}
        self._left = dict(trackers or {})

    @contextmanager
    def watching(self, out: Path, config: Config, step: int) -> Iterator[None]:
        """Context in which a run trains from a step on. They hear of an error, which goes on."""
        if self._left and not step:  # what ran before in the same directory is another run
            (out / FILE).unlink(missing_ok=True)
        tables = tomlkit.parse(dump(config)).unwrap().items()
        settings = {f"{name}.{key}": table[key] for name, table in tables for key in table}
        self.status = dict.fromkeys(self._left, "ok")
        self._tell(lambda tracker: tracker.begin(out, settings))
        failed = True
        try:
            yield
            failed = False
        finally:
            self._tell(lambda tracker: tracker.end(failed))

    def log(self, row: StepRecord | Evaluation) -> None:
        """Says a row that was written; a number that there is none of is left out."""
        before, names = _NAMES[type(row)]
        found = {f"{before}{name}": getattr(row, name) for name in names}
        values = {name: float(value) for name, value in found.items() if value is not None}
        self._tell(lambda tracker: tracker.log(row.step, values))

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._left.items()):
            try:
                with redirect_stdout(sys.stderr):  # stdout has the result, and nothing else
                    call(tracker)
            except (Exception, SystemExit) as error:
                del self._left[name]
                text = f"the tracker {name!r} has failed and is left out from here on"
                self.status[name] = f"{text}: {describe(error)}"
                print(f"anychip: {self.status[name]}", file=sys.stderr)


def find(names: Sequence[str]) -> dict[str, metadata.EntryPoint]:
    """The entry points of these names; imports none of them.

    Raises:
        ConfigError: there is none of a name, or there are several.
    """
    there, found = metadata.entry_points(group=GROUP), dict[str, metadata.EntryPoint]()
    for name in names:
        claims = {entry.value: entry for entry in there if entry.name == name}
        text = f"there is no tracker {name!r}; there are: {', '.join(sorted(there.names))}"
        if claims:
            text = f"{name!r} is {' and '.join(sorted(claims))}; uninstall all but one"
        if len(claims) != 1:
            raise ConfigError(f"run.trackers: {text}")
        (found[name],) = claims.values()
    return found


def make(names: Sequence[str]) -> Trackers:
    """The trackers of these names.

    Raises:
        ConfigError: as :func:`find`; or one cannot be made.
        MissingExtraError: the library of one is not installed.
    """
    made: dict[str, Tracker] = {}
    for name, entry in find(names).items():
        try:
            made[name] = entry.load()()
            if not isinstance(made[name], Tracker):
                raise TypeError(f"{__name__}.Tracker expected, got {type(made[name]).__name__}")
        except MissingExtraError:
            raise
        except (Exception, SystemExit) as error:
            text = f"run.trackers: {name!r} ({entry.value}) cannot be made: {describe(error)}"
            raise ConfigError(text) from error
    return Trackers(made)


class TensorBoard(Tracker):
    """Event files in ``tensorboard`` of the run's directory."""

    def __init__(self) -> None:
        _library("tensorboard")
        self._open = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = None

    def begin(self, out: Path, settings: Mapping[str, Any]) -> None:
        self._folder, self._settings = _folder(out, "tensorboard"), settings

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            # Whatever is there of this step and later ones, this run is about to say again.
            self._writer = self._open(str(self._folder), purge_step=step)
            text = "".join(f"    {key} = {value!r}\n" for key, value in self._settings.items())
            self._writer.add_text("settings", text, step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def end(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases(Tracker):
    """A run of Weights & Biases; its own variables say of which project, and whether offline."""

    def __init__(self) -> None:
        self._wandb = _library("wandb")

    def begin(self, out: Path, settings: Mapping[str, Any]) -> None:
        mode = self._wandb.setup().settings.mode
        # On a terminal init would ask for a key, and the run, and all ranks, would wait for it.
        if mode not in ("offline", "dryrun", "disabled") and not self._wandb.login(prompt=False):
            raise PermissionError("no key; run `wandb login`, or set WANDB_MODE=offline")
        known = _ids(out).get("wandb")
        self._run = self._wandb.init(
            dir=str(_folder(out, "wandb").parent),
            name=out.resolve().name,
            config=dict(settings),
            id=known,
            resume="allow" if known else None,
            # It would put itself between the run and its terminal, and send what is shown there.
            settings=self._wandb.Settings(console="off"),
        )
        _keep_id(out, "wandb", self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def end(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow(Tracker):
    """A run of MLflow: where MLFLOW_TRACKING_URI says, else in ``mlruns`` of the directory."""

    def __init__(self) -> None:
        # Read when it is imported. It would report its use to its makers over the network, and
        # refuse files, the one store that needs no server and no database.
        for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE"):
            os.environ.setdefault(name, "true")
        self._mlflow = _library("mlflow")

    def begin(self, out: Path, settings: Mapping[str, Any]) -> None:
        self._is_local = not self._mlflow.is_tracking_uri_set()
        if self._is_local:
            self._mlflow.set_tracking_uri(_folder(out, "mlruns").resolve().as_uri())
        known = _ids(out).get("mlflow")
        run = self._mlflow.start_run(run_id=known, run_name=out.resolve().name)
        if known is None:  # it takes each setting once
            _keep_id(out, "mlflow", run.info.run_id)
            self._mlflow.log_params(dict(settings))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def end(self, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")
        if self._is_local:
            self._mlflow.set_tracking_uri(None)


def _library(name: str) -> Any:
    return require(name, f"the tracker {name!r}", extra="trackers")


def _folder(out: Path, name: str) -> Path:
    """That of a library in the directory of a run, in which no link is followed."""
    if (out / name).is_symlink():
        raise OSError(f"{out / name} is a link, which is not followed")
    return out / name


def _ids(out: Path) -> dict[str, str]:
    if not (out / FILE).exists():
        return {}
    with files.open_to_read(out / FILE) as file:
        found = json.load(file)
    schema.check(found, {str: str}, FILE)
    return dict(found)


def _keep_id(out: Path, name: str, number: str) -> None:
    files.write(out / FILE, json.dumps({**_ids(out), name: number}, indent=2) + "\n")
