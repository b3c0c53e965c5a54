"""What a run leaves behind: metrics.jsonl while it goes, and a few files at its end."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from anychip.train import files, schema


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One update of the parameters.

    Attributes:
        step: updates done with this one; the first row has 1.
        loss: mean over the step's tokens, before the update.
        lr: learning rate of the update.
        grad_norm: before clipping; None when the update was skipped.
        tokens_per_s: of this step alone, over all ranks.
        loss_scale: by which the loss was multiplied; 1.0 without loss scaling.
        skipped: the update was left out because a gradient was not finite.
        allocated_nbytes, peak_nbytes: of this rank's device, when the update was queued; the most
            since the process began.
        mfu: operations of the model over those of all devices at their rates in that time.
        data_s, forward_s, backward_s, exchange_s, update_s: seconds of this rank; the parts are
            those of :mod:`anychip.train.watching`.

    What was measured does not make two rows differ, and is None, and not in the file, where the
    backend cannot say it.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    loss_scale: float = 1.0
    skipped: bool = False
    allocated_nbytes: int | None = field(default=None, compare=False)
    peak_nbytes: int | None = field(default=None, compare=False)
    mfu: float | None = field(default=None, compare=False)
    data_s: float | None = field(default=None, compare=False)
    forward_s: float | None = field(default=None, compare=False)
    backward_s: float | None = field(default=None, compare=False)
    exchange_s: float | None = field(default=None, compare=False)
    update_s: float | None = field(default=None, compare=False)


MEASURED = tuple(each.name for each in fields(StepRecord) if not each.compare)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What a model knows of the held-out data.

    Attributes:
        step: updates done.
        loss: mean cross entropy over all targets, in nats.
        perplexity: its exponential.
        accuracy: the part of the targets that the model takes for the likeliest.
        targets: how many there are.
    """

    step: int
    loss: float
    perplexity: float
    accuracy: float
    targets: int


def best_of(rows: Sequence[Evaluation]) -> Evaluation:
    """The first of those with the lowest loss."""
    return min(rows, key=lambda row: row.loss)


_FORMS: dict[type[Any], dict[str, Any]] = {
    StepRecord: {
        **{"step": schema.COUNT, "skipped": bool, "grad_norm": schema.OPTION},
        **dict.fromkeys(("loss", "lr", "tokens_per_s", "loss_scale"), float),
        **{f"{n}?": schema.COUNT if n.endswith("_nbytes") else float for n in MEASURED},
    },
    Evaluation: {
        **dict.fromkeys(("step", "targets"), schema.COUNT),
        **dict.fromkeys(("loss", "perplexity", "accuracy"), float),
    },
}

AnyRow = TypeVar("AnyRow", StepRecord, Evaluation)


class Rows(Generic[AnyRow]):
    """A file of rows, each on it as soon as it is there.

    Args:
        path: the file; rows of an earlier part of the run are taken over.
        kind: of the rows.
        last_step: rows after it are dropped: the run goes on from there and writes them again.
        writes: False on ranks that only keep the rows.

    Raises:
        OSError: naming the file, also when a row cannot be written.
    """

    def __init__(
        self, path: Path, kind: type[AnyRow], *, last_step: int, writes: bool = True
    ) -> None:
        self.path, self.writes = path, writes
        self.rows: list[AnyRow] = [r for r in read_rows(path, kind) if r.step <= last_step]
        if not writes:
            return
        files.write(path, "".join(_line(row) for row in self.rows))

    def append(self, row: AnyRow) -> None:
        """Adds a row."""
        self.rows.append(row)
        if not self.writes:
            return
        try:
            with files.open_to_append(self.path) as file:
                file.write(_line(row))
        except OSError as error:
            text = f"the row of step {row.step} was not written: {error.strerror}"
            raise files.NotWrittenError(error.errno, text, str(self.path)) from error


class Metrics(Rows[StepRecord]):
    """``metrics.jsonl``: a row per step."""

    def __init__(self, path: Path, *, last_step: int, writes: bool = True) -> None:
        super().__init__(path, StepRecord, last_step=last_step, writes=writes)


def read_metrics(path: Path) -> list[StepRecord]:
    """The rows of ``metrics.jsonl``, as :func:`read_rows`."""
    return read_rows(path, StepRecord)


def read_rows(path: Path, kind: type[AnyRow]) -> list[AnyRow]:
    """The rows of a file up to the first that is not whole; none when there is no file."""
    rows: list[AnyRow] = []
    names = [f.name for f in fields(kind)]
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            values = json.loads(line)
            schema.check(values, _FORMS[kind], "row")
        except (ValueError, RecursionError):
            break  # the process ended in the middle of this row
        rows.append(kind(**{name: values[name] for name in names if name in values}))
    return rows


def plot_loss(
    path: Path, rows: Sequence[StepRecord], evaluations: Sequence[Evaluation] = ()
) -> None:
    """Draws the loss over the steps, and what was held out, with the learning rate."""
    # Figure without pyplot: no window system is looked for, no state is left behind.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    steps = [row.step for row in rows]
    axes.plot(steps, [row.loss for row in rows], linewidth=0.6, alpha=0.5, label="loss")
    axes.plot(steps, smooth([row.loss for row in rows]), color="C0", label="loss, smoothed")
    if evaluations:
        places, losses = zip(*((row.step, row.loss) for row in evaluations), strict=True)
        axes.plot(places, losses, color="C2", marker=".", label="held-out loss")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    rate = axes.twinx()
    rate.plot(steps, [row.lr for row in rows], color="C1", linewidth=0.8, label="learning rate")
    rate.set(ylabel="learning rate")
    # Of both axes, within the upper one, on what is drawn below it.
    rate.legend(handles=[*axes.lines, *rate.lines], loc="upper right", framealpha=0.9)
    image = io.BytesIO()
    figure.savefig(image)
    files.write(path, image.getvalue())


def smooth(values: Sequence[float], *, decay: float = 0.9) -> list[float]:
    """Exponential moving averages, corrected for their start as in Adam."""
    smoothed, average = [], 0.0
    for count, value in enumerate(values, 1):
        average = decay * average + (1.0 - decay) * value
        smoothed.append(average / (1.0 - decay**count))
    return smoothed


def _line(row: StepRecord | Evaluation) -> str:
    values = asdict(row)
    absent = [name for name in MEASURED if name in values and values[name] is None]
    return json.dumps({name: values[name] for name in values if name not in absent}) + "\n"
