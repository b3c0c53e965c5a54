"""What a run leaves behind: metrics.jsonl while it goes, and a few files at its end."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

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
    """

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    loss_scale: float = 1.0
    skipped: bool = False


_ROW = {
    **{"step": schema.COUNT, "skipped": bool, "grad_norm": schema.OPTION},
    **dict.fromkeys(("loss", "lr", "tokens_per_s", "loss_scale"), float),
}


class Metrics:
    """``metrics.jsonl``: a row per step, on the file as soon as the step is done.

    Args:
        path: the file; rows of an earlier part of the run are taken over.
        last_step: rows after it are dropped: the run goes on from there and writes them again.
        writes: False on ranks that only keep the rows.

    Raises:
        OSError: naming the file, also when a row cannot be written.
    """

    def __init__(self, path: Path, *, last_step: int, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self.rows = [row for row in read_metrics(path) if row.step <= last_step]
        if not writes:
            return
        files.write(path, "".join(_line(row) for row in self.rows))

    def append(self, row: StepRecord) -> None:
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


def read_metrics(path: Path) -> list[StepRecord]:
    """The rows of a file up to the first that is not whole; none when there is no file."""
    rows: list[StepRecord] = []
    names = [f.name for f in fields(StepRecord)]
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            values = json.loads(line)
            schema.check(values, _ROW, "row")
        except (ValueError, RecursionError):
            break  # the process ended in the middle of this row
        rows.append(StepRecord(**{name: values[name] for name in names}))
    return rows


def plot_loss(path: Path, rows: Sequence[StepRecord]) -> None:
    """Draws the loss over the steps, with the learning rate, into an image file."""
    # Figure without pyplot: no window system is looked for, no state is left behind.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    steps = [row.step for row in rows]
    axes.plot(steps, [row.loss for row in rows], linewidth=0.6, alpha=0.5, label="loss")
    axes.plot(steps, smooth([row.loss for row in rows]), color="C0", label="loss, smoothed")
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


def _line(row: StepRecord) -> str:
    return json.dumps(asdict(row)) + "\n"
