"""The trainer: a configuration, a backend and a directory become a trained model.

It holds no arithmetic of its own. Whoever wants another loop writes it with the same parts:
``examples/own_loop.py`` is this file in thirty lines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import anychip
from anychip.contract import AnychipError, Backend
from anychip.train import checkpoint, data, models, optim, precision, report, zero
from anychip.train.config import Config, dump
from anychip.train.interruption import Interrupted, Interruption
from anychip.train.report import Row


class TrainingError(AnychipError, RuntimeError):
    """The loss or the gradient is not finite, so that no step can follow."""


@dataclass(kw_only=True, slots=True)
class Run:
    """The parts of a run, on the device, at the step where it goes on."""

    config: Config
    model: models.Decoder
    policy: precision.Policy
    optimizer: zero.Optimizer
    loader: data.Loader
    step: int = 0


def build(config: Config, chip: Backend) -> Run:
    """The parts of a fresh run; reads the data, writes nothing.

    Raises:
        OSError, ValueError: a data file is missing, empty, binary or too short.
        UnsupportedError: a precision or stage that this chip or version does not have.
    """
    policy = precision.policy(config.run.precision, chip)
    files = config.data.files
    loader = data.Loader(
        data.read_texts(files) if files else data.python_documentation(),
        context=config.model.context,
        batch_size=config.data.batch_size,
        seed=config.run.seed,
        device=chip.device(),
    )
    torch.manual_seed(config.run.seed)
    model = models.build(config.model).to(chip.device())
    optimizer = zero.Optimizer(
        models.parameter_groups(model, config.optimizer.weight_decay),
        _rule(config),
        chip.communicator(),
        stage=config.optimizer.stage,
        precision=policy,
    )
    return Run(config=config, model=model, policy=policy, optimizer=optimizer, loader=loader)


def _rule(config: Config) -> optim.Rule:
    settings, steps = config.optimizer, config.run.steps
    schedule = optim.warmup_cosine(
        settings.lr,
        round(config.schedule.warmup * steps),
        steps,
        final_fraction=config.schedule.final,
    )
    return optim.chain(
        optim.clip_by_global_norm(settings.max_norm or math.inf),
        optim.adamw(schedule, beta1=settings.beta1, beta2=settings.beta2, eps=settings.eps),
    )


def restore(run: Run, out: Path) -> None:
    """Goes to the checkpoint in a directory; to the start, when there is none.

    Settings of the optimizer come from the run's configuration, not from the checkpoint.

    Raises:
        CheckpointError: it is damaged or does not fit.
        ValueError: it is past the run's last step.
    """
    decays = [group["weight_decay"] for group in run.optimizer.param_groups]
    state = checkpoint.resume(out, model=run.model, optimizer=run.optimizer, data=run.loader)
    for group, decay in zip(run.optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay
    if state.step > run.config.run.steps:
        raise ValueError(
            f"{out} has been trained for {state.step} steps already, and run.steps is "
            f"{run.config.run.steps}; ask for more steps"
        )
    run.step = state.step


def train(run: Run, out: Path, show: Callable[[Row], None]) -> list[Row]:
    """Does the steps that are left, with a checkpoint now and then and at the end.

    Args:
        out: an existing directory; gets config.toml, metrics.jsonl and checkpoint.
        show: called after each step.

    Returns:
        The rows of all steps from the first.

    Raises:
        Interrupted: on the first SIGINT or SIGTERM, after the step, with the checkpoint written.
        TrainingError: the loss or the gradient is not finite. The checkpoint is the one before.
        OSError: something could not be written. The checkpoint is the one before.
    """
    report.write_text(out / "config.toml", dump(run.config))
    metrics = report.Metrics(out / "metrics.jsonl", last_step=run.step)
    if run.step == run.config.run.steps and not metrics.rows:
        raise TrainingError(f"{out}: all {run.step} steps are done, and metrics.jsonl has no row")
    with Interruption() as interruption:
        while run.step < run.config.run.steps and interruption.signal is None:
            row = _step(run, metrics.rows, out)
            metrics.append(row)
            if run.step % run.config.checkpoint.every == 0:
                save(run, out)
            show(row)
        if run.step % run.config.checkpoint.every:
            save(run, out)
    if interruption.signal is not None:
        raise Interrupted(
            f"interrupted after step {run.step} of {run.config.run.steps}; to go on: "
            f"anychip train --resume --out {out}",
            interruption.signal,
        )
    return metrics.rows


def save(run: Run, out: Path) -> None:
    """Writes the checkpoint of where the run is."""
    checkpoint.save(out, step=run.step, model=run.model, optimizer=run.optimizer, data=run.loader)


def _step(run: Run, before: list[Row], out: Path) -> Row:
    """One update of the parameters."""
    start = time.perf_counter()
    parts = run.config.data.accumulation
    total = torch.zeros((), device=run.loader.device)
    for _ in range(parts):
        tokens, targets = run.loader.next_batch()
        with run.policy.autocast():
            loss = run.model(tokens, targets) / parts
        run.optimizer.backward(loss)
        total += loss.detach()
    result = run.optimizer.step()
    run.optimizer.zero_grad()
    assert result.grad_norm is not None
    # One transfer for both: the only time in a step that the host waits for the device.
    mean_loss, norm = torch.stack([total, result.grad_norm]).tolist()
    num_tokens = parts * tokens.numel()
    if not math.isfinite(mean_loss + norm):
        raise TrainingError(_not_finite(run, mean_loss, norm, before, out))
    run.step += 1
    return Row(
        step=run.step,
        loss=mean_loss,
        lr=result.lr,
        grad_norm=norm,
        tokens_per_s=num_tokens / (time.perf_counter() - start),
    )


def _not_finite(run: Run, loss: float, norm: float, before: list[Row], out: Path) -> str:
    last = f" (loss {before[-1].loss:.4f} at the step before)" if before else ""
    kept = (
        f"the last good checkpoint is in {out}; from there: anychip train --resume --out {out} "
        f"optimizer.lr={run.config.optimizer.lr / 2:g}"
        if (out / "checkpoint" / "manifest.json").exists()
        else "there is no checkpoint yet; begin again with a lower optimizer.lr"
    )
    return f"step {run.step + 1}: loss {loss}, gradient norm {norm}{last}; stopped\n  {kept}"


def sample(run: Run) -> str:
    """Text that the model writes after a line break, drawn with the run's seed."""
    generator = torch.Generator().manual_seed(run.config.run.seed)
    prompt = torch.tensor([[ord("\n")]], device=run.loader.device)
    count = run.config.run.sample_bytes
    tokens = models.generate(run.model, prompt, count, generator=generator)
    return data.decode(tokens[0, 1:].cpu())


def finish(run: Run, out: Path, rows: list[Row]) -> str:
    """Writes loss.png, sample.txt and provenance.json; returns the sample."""
    text = sample(run)
    report.write_text(out / "sample.txt", text)
    report.plot_loss(out / "loss.png", rows)
    report.write_json(out / "provenance.json", anychip.provenance().to_json())
    return text
