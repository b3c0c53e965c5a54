"""How well does a model predict what it was not trained on? One number, at any number of ranks.

Every rank runs windows of the same shape, the sums of their losses are added exactly, and no rank's
share of the windows shows in the result: on one chip it is the same, bit for bit, for any number of
replicas and any stage of ZeRO. Stages of a pipeline are within the roundings of their hand-overs.

Source: perplexity over windows side by side, as Megatron-LM's ``evaluate`` and torchtitan's
``Validator`` have it.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anychip import ops
from anychip.comm import gather_objects
from anychip.runtime import on_host
from anychip.train import data
from anychip.train.report import Evaluation, Rows, best_of, read_rows
from anychip.train.run import Run, TrainingError, save_best

FILE = "eval.jsonl"


class _Window(NamedTuple):
    """Over its targets: the sum of their losses, how many are predicted, how many there are."""

    loss: float
    hits: int
    targets: int


def evaluate(run: Run) -> Evaluation:
    """Asks the model about everything that is held out. A collective call, which changes nothing.

    Raises:
        ValueError: nothing is held out, or it has no target.
        TrainingError: the loss is not finite.
    """
    if run.held_out is None:
        raise ValueError("nothing is held out; set eval.files or eval.fraction")
    with _asked(run):
        mine = [tuple(window) for window in _windows(run, run.held_out)]
    found = [_Window(*each) for part in gather_objects(run.comm, mine) for each in part]
    targets = sum(window.targets for window in found)
    if not targets:
        raise ValueError("the held-out data has no target: it is ends of documents only")
    # Exactly rounded, so that it does not matter whose window is whose.
    loss = math.fsum(window.loss for window in found) / targets
    if not math.isfinite(loss):
        raise TrainingError(f"step {run.step}: the loss of the held-out data is {loss}")
    return Evaluation(
        step=run.step,
        loss=loss,
        perplexity=math.exp(min(loss, 709.0)),  # JSON has no word for what is more than a float
        accuracy=sum(window.hits for window in found) / targets,
        targets=targets,
    )


@contextmanager
def _asked(run: Run) -> Iterator[None]:
    """Without dropout, which would also draw random numbers that training is to have."""
    modules = list(run.pipeline.stages.values()) if run.pipeline else [run.model]
    before = [module.training for module in modules]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in zip(modules, before, strict=True):
            module.train(mode)


def _windows(run: Run, held_out: data.HeldOut) -> list[_Window]:
    """Those that this rank has a loss of. All replicas make as many calls, for stage 3's sake."""
    replicas, found = run.mesh.axis("data"), list[_Window]()

    def note(logits: Tensor, targets: Tensor) -> Tensor:
        losses, windows = _of_logits(logits, targets)
        found.extend(window for window in windows if window.targets)
        return losses.sum()

    size = run.config.data.batch_size * (run.pipeline.num_microbatches if run.pipeline else 1)
    for first in range(0, held_out.num_windows, size * replicas.world_size):
        start = first + replicas.rank * size
        batch = held_out.batch(range(start, start + size))
        tokens, targets = (part.to(run.loader.device) for part in batch)
        if run.pipeline is not None:
            run.pipeline.evaluate(tokens, targets, share_loss=False, loss_fn=note)
        else:
            with run.policy.autocast():
                note(run.model(tokens), targets)
    return found


def _of_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, list[_Window]]:
    """The losses (B, S), and what they are in each window."""
    losses = ops.cross_entropy(logits, targets, reduction="none")
    hits = (logits.argmax(-1) == targets).to(losses.dtype)
    values = on_host(torch.stack((losses, hits)))
    counts = on_host((targets != data.IGNORED_TARGET).sum(-1))
    sums = (*values.numpy().astype(np.float64).sum(-1), counts.numpy())
    return losses, [_Window(float(a), int(b), int(c)) for a, b, c in zip(*sums, strict=True)]


class Evaluations:
    """Those of a run that trains, in ``eval.jsonl``; nothing where nothing is held out.

    Args:
        show: called with each on rank 0.
    """

    def __init__(
        self, run: Run, out: Path, show: Callable[[Evaluation], None] | None = None
    ) -> None:
        self.run, self.out, self.show = run, out, show
        self._rows = None
        if run.held_out is not None:
            is_first, last = run.is_first, run.step
            self._rows = Rows(out / FILE, Evaluation, last_step=last, writes=is_first)

    def after_step(self) -> bool:
        """Evaluates, if it is time; True: the run ends, since its patience has."""
        run, every = self.run, self.run.config.eval.every
        is_due = run.step == run.config.run.steps or (every and not run.step % every)
        if self._rows is None or not is_due:
            return False
        with run.optimizer.averaged() if run.config.eval.ema else nullcontext():
            row = evaluate(run)
        self._rows.append(row)
        run.trackers.log(row)
        if run.config.eval.keep_best and best_of(self._rows.rows) is row:
            save_best(run, self.out)
        if self.show is not None and run.is_first:
            self.show(row)
        return is_out_of_patience(self._rows.rows, run.config.eval.patience)


def rows_of(out: Path) -> list[Evaluation]:
    """The evaluations of a run in a directory."""
    return read_rows(out / FILE, Evaluation)


def is_out_of_patience(rows: list[Evaluation], patience: int) -> bool:
    """Whether as many of the last rows were no better than one before; never with 0."""
    if not patience or not rows:
        return False
    return len(rows) - 1 - rows.index(best_of(rows)) >= patience


def has_ended(run: Run, out: Path) -> bool:
    """Whether a run's patience was over at the checkpoint that it goes on from."""
    rows = [row for row in rows_of(out) if row.step <= run.step]
    return is_out_of_patience(rows, run.config.eval.patience)
