"""The trainer: the parts of a run, and a directory, become a trained model.

It holds no arithmetic of its own. Whoever wants another loop writes it with the same parts:
``examples/own_loop.py`` is this file in thirty lines.
"""

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import anychip
from anychip.comm import gather_objects
from anychip.runtime import device_errors, on_host
from anychip.train import data, evaluation, files, parallel, report
from anychip.train.asking import continued
from anychip.train.interruption import Interrupted, Interruption
from anychip.train.precision import LossScaleError
from anychip.train.report import Evaluation, StepRecord
from anychip.train.run import (
    Run,
    TrainingError,
    build,
    end_saving,
    loss_reduction,
    restore,
    save,
    whole_model,
    write_inputs,
)
from anychip.train.watching import part
from anychip.train.zero import StepResult


def train(
    run: Run,
    out: Path,
    show: Callable[[StepRecord], None],
    asked: Interruption | None = None,
    show_evaluation: Callable[[Evaluation], None] | None = None,
) -> list[StepRecord]:
    """Does the steps that are left, with evaluations and checkpoints now and then and at the end.

    Args:
        out: an existing directory; gets config.toml, metrics.jsonl, checkpoint, and
            tokenizer.json, eval.jsonl and best if there is one. Rank 0 writes; the others read it.
        show: called after each step, on rank 0.
        asked: has listened since before the ranks met; a signal ends the run after the next step.
        show_evaluation: called after each evaluation, on rank 0.

    Returns:
        The rows of all steps from the first, to the one at which ``eval.patience`` was over.

    Raises:
        Interrupted: on the first SIGINT or SIGTERM, after the step, with the checkpoint written.
        TrainingError: the loss or the gradient is not finite. The checkpoint is the one before.
        OSError, DeviceError: a file was not written, the device failed. The checkpoint likewise.
    """
    is_done = run.step == run.config.run.steps or evaluation.has_ended(run, out)
    writes = run.is_first and not is_done
    if writes:
        write_inputs(run, out)
    metrics = report.Metrics(out / "metrics.jsonl", last_step=run.step, writes=writes)
    if is_done and not metrics.rows:
        raise TrainingError(f"{out}: all {run.step} steps are done, and metrics.jsonl has no row")
    signal = None
    watched = nullcontext() if is_done else run.trackers.watching(out, run.config, run.step)
    try:
        with (
            asked or Interruption() as interruption,
            device_errors(run.loader.device.type),
            watched,  # around what is saved: to end may take a tracker long, and saving may fail
            run.saver or nullcontext(),
        ):
            if not is_done:
                evaluations = evaluation.Evaluations(run, out, show_evaluation)
                signal = _steps(run, out, metrics, evaluations, show, interruption)
            if run.step % run.config.checkpoint.every:
                save(run, out)
    finally:
        run.loader.close()
    if signal is not None:
        raise _interrupted(run, out, signal)
    return metrics.rows


def _steps(
    run: Run,
    out: Path,
    metrics: report.Metrics,
    evaluations: evaluation.Evaluations,
    show: Callable[[StepRecord], None],
    interruption: Interruption,
) -> int | None:
    """Those that are left, one at least; the signal that has ended them, if one has."""
    signal, is_done = None, False
    while not is_done and signal is None:
        with run.watch.step():
            row, signal = _step(run, metrics.rows, out, interruption)
        metrics.append(row)
        run.trackers.log(row)
        # Before the checkpoint: who goes on from there has the evaluations up to there.
        is_done = _evaluated(run, out, evaluations) or run.step == run.config.run.steps
        if run.step % run.config.checkpoint.every == 0:
            save(run, out)
        if run.is_first:
            show(row)
        if run.comm.world_size == 1:  # there is nobody to agree with at the next step
            signal = interruption.signal
    return signal


def _evaluated(run: Run, out: Path, evaluations: evaluation.Evaluations) -> bool:
    """Evaluates, if it is time; whether patience is over."""
    try:
        return evaluations.after_step()
    except TrainingError as error:
        raise TrainingError(f"{error}; {_kept(run, out)}") from None


def _interrupted(run: Run, out: Path, signal: int) -> Interrupted:
    text = f"interrupted after step {run.step} of {run.config.run.steps}; to go on: "
    return Interrupted(f"{text}anychip train --resume --out {out}", signal)


class _Agreed(NamedTuple):
    """What all ranks know after a step.

    Attributes:
        loss: mean over all targets of all ranks.
        signal: what asks a rank to end; None: nothing does.
    """

    loss: float
    signal: int | None


def _step(
    run: Run, rows: list[StepRecord], out: Path, interruption: Interruption
) -> tuple[StepRecord, int | None]:
    """One update of the parameters; and the signal that asks some rank to end, if there is one."""
    start = time.perf_counter()
    loss, num_tokens = _forward_backward(run)
    mine = _noted(loss, interruption.signal)
    try:
        with part("update"):
            result = run.optimizer.step(share=None if run.pipeline else mine)
    except LossScaleError as error:
        raise TrainingError(f"step {run.step + 1}: {error}; {_kept(run, out)}") from None
    memory = run.watch.memory()  # before the host waits: asking costs the device nothing
    run.optimizer.zero_grad()
    agreed = _agreed(run, mine if result.shared is None else result.shared)
    norm = 0.0 if result.grad_norm is None else on_host(result.grad_norm).item()
    if not math.isfinite(agreed.loss + norm):
        raise TrainingError(_not_finite(run, agreed.loss, norm, rows, out))
    run.step += 1
    seconds = time.perf_counter() - start
    measured: dict[str, Any] = {**memory, **run.watch.times(seconds)}
    return _row(run, agreed.loss, norm, result, num_tokens / seconds, measured), agreed.signal


def _forward_backward(run: Run) -> tuple[Tensor, int]:
    """Gradients of one update; this replica's loss, 0-dim, and the tokens of all replicas.

    The mean of the replicas' losses is that over all targets. With stages only the last one knows
    its replica's; the others give 0.
    """
    parts = run.config.data.accumulation
    weight = _weight(run, parts)
    with part("data"):
        batches = [run.loader.next_batch() for _ in range(parts)]
    num_tokens = parts * batches[0][0].numel() * run.mesh.axis("data").world_size
    if run.pipeline is not None:
        return _through_stages(run, run.pipeline, batches, weight), num_tokens
    reduction = loss_reduction(run.config)
    total = torch.zeros((), device=run.loader.device)
    for number, (tokens, targets) in enumerate(batches, 1):
        # What is not the last is added up on this rank; the last sends the sum.
        with nullcontext() if number == parts else run.optimizer.no_sync():
            with part("forward"), run.policy.autocast():
                loss = run.model(tokens, targets, reduction=reduction)
                loss = loss / parts if weight is None else loss * weight
            with part("backward"):
                run.optimizer.backward(loss)
        total += loss.detach()
    return total, num_tokens


def _weight(run: Run, parts: int) -> float | None:
    """Of each batch's loss, when that is a sum; None: batches have as many targets, and means.

    Every target of the step counts alike then, whichever batch of whichever replica it is in. Each
    rank counts for itself, in the tokens that all have: no message is needed.
    """
    if loss_reduction(run.config) == "mean":
        return None
    count = run.loader.num_targets(parts)
    if not count:
        raise TrainingError(
            f"step {run.step + 1}: no batch has a target; the text is ends of documents only, "
            "which data.cross_document_targets = false leaves out"
        )
    return run.mesh.axis("data").world_size / count


def _through_stages(
    run: Run, pipeline: parallel.Pipeline, batches: list[data.Batch], weight: float | None
) -> Tensor:
    tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with part("exchange"):  # but for what the stages compute
        loss = pipeline.run(
            tokens, targets, weight=weight, optimizer=run.optimizer, share_loss=False
        )
    return torch.zeros((), device=run.loader.device) if loss is None else loss


def _noted(loss: Tensor, signal: int | None) -> Tensor:
    """What a rank tells the others: (2,) float32, which holds a signal's number exactly."""
    loss = loss.float()
    return torch.stack((loss, torch.full_like(loss, signal or 0)))


def _agreed(run: Run, told: Tensor) -> _Agreed:
    """What the optimizer's message has brought. With stages there is another one, of all ranks.

    Of a pipeline's ranks those that share the gradients of a stage are not those that know the
    loss.
    """
    if run.pipeline is not None:
        mine, told = told, told.new_empty(run.comm.world_size * 2)
        with part("exchange"):
            run.comm.all_gather(told, mine)
    losses, signals = on_host(told).view(-1, 2).t().tolist()
    return _Agreed(math.fsum(losses) / run.mesh.axis("data").world_size, int(max(signals)) or None)


def _row(
    run: Run, loss: float, norm: float, result: StepResult, speed: float, measured: dict[str, Any]
) -> StepRecord:
    return StepRecord(
        step=run.step, loss=loss, lr=float(result.lr), tokens_per_s=speed,
        grad_norm=None if result.grad_norm is None else norm, loss_scale=result.loss_scale,
        skipped=result.skipped, **measured,
    )  # fmt: skip


def _not_finite(run: Run, loss: float, norm: float, before: list[StepRecord], out: Path) -> str:
    last = f" (loss {before[-1].loss:.4f} at the step before)" if before else ""
    return (
        f"step {run.step + 1}: loss {loss}, gradient norm {norm}{last}; stopped\n"
        f"  {_kept(run, out)}"
    )


def _kept(run: Run, out: Path) -> str:
    end_saving(run)  # all ranks stop here
    if (out / "checkpoint" / "manifest.json").exists():
        return (
            f"the last good checkpoint is in {out}; from there: anychip train --resume --out "
            f"{out} optimizer.lr={run.config.optimizer.lr / 2:g}"
        )
    return "there is no checkpoint yet; begin again with a lower optimizer.lr"


def sample(run: Run) -> str:
    """Text that the model writes after a line break, drawn with the run's seed.

    With stages a collective.
    """
    return continued(run, ["\n"], run.config.run.sample_tokens, seed=run.config.run.seed)[0]


def served(run: Run) -> dict[str, Any]:
    """What served the operators of this rank; and of each rank of its pipeline, by ``pipeline``.

    With stages a collective.
    """
    found = anychip.provenance().to_json()
    if run.pipeline is None:
        return found
    chip = anychip.backend()
    mine = {"backend": chip.name, "device": chip.identity(), **found}
    return {**found, "pipeline": gather_objects(run.mesh.axis("pipeline"), mine)}


def finish(run: Run, out: Path, rows: list[StepRecord]) -> str:
    """Writes loss.png, sample.txt and provenance.json, on rank 0; returns the sample.

    What served the steps, on each rank of a pipeline, is not known to a process that did none:
    provenance.json stays then.

    Raises:
        Interrupted: on the first SIGINT or SIGTERM, when all is written.
        OSError: something could not be written.
    """
    with Interruption() as interruption, device_errors(run.loader.device.type):
        text, found = sample(run), served(run)
        if run.is_first:
            files.write(out / "sample.txt", text)
            report.plot_loss(out / "loss.png", rows, evaluation.rows_of(out))
            if run.step > run.begun or not (out / "provenance.json").exists():
                files.write(out / "provenance.json", json.dumps(found, indent=2) + "\n")
    if interruption.signal is not None:
        raise _interrupted(run, out, interruption.signal)
    return text


__all__ = [
    "Run", "TrainingError", "build", "finish", "restore", "sample", "save", "train", "whole_model",
]  # fmt: skip
