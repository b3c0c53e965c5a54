"""What does a trained model say? Its run is put together again, whatever ranks it was trained on.

The weights come from the checkpoint, the settings from config.toml beside it. Of the arrangement
only the stage of ZeRO stays: the ranks that ask are replicas. States of the optimizer are not read.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from anychip.contract import Backend, Communicator
from anychip.runtime import on_host
from anychip.train import config, models
from anychip.train.config import Config, EvalConfig, ParallelConfig, SGDConfig
from anychip.train.run import (
    BEST,
    MODEL,
    Run,
    Texts,
    build,
    known_tokenizer,
    read_data,
    read_held_out,
    read_texts,
    require_checkpoint,
    restore_weights,
    whole_model,
)


def directory_of(out: Path, *, best: bool = False) -> Path:
    """Where the checkpoint that is meant is.

    Raises:
        FileNotFoundError: there is no run, or it has kept no best checkpoint.
    """
    if not (out / "config.toml").exists():
        raise FileNotFoundError(
            f"there is no run of anychip train in {out}, which would have a config.toml; for a "
            "loop of your own there is anychip.train.checkpoint"
        )
    found = out / BEST if best else out
    if best and not (found / "config.toml").exists():
        raise FileNotFoundError(
            f"{out} has no best checkpoint; a run that holds something out keeps it with "
            "eval.every=N eval.keep_best=true"
        )
    return found


def settings_of(out: Path, held_out: Sequence[str] = ()) -> Config:
    """The settings of a run, as they are when it is asked.

    Args:
        held_out: files in the place of those of the settings.
    """
    found = config.load(out / "config.toml", note=lambda _: None)
    own = out / "tokenizer.json"
    if found.data.tokenizer == "bpe" and own.exists():
        found = replace(found, data=replace(found.data, tokenizer=str(own)))
    if isinstance(found.model, models.PretrainedConfig):
        # The run's own, without weights, which are in the checkpoint.
        found = replace(found, model=replace(found.model, path=str(out / MODEL)))
    if held_out:
        asked = replace(found.eval, files=tuple(held_out), fraction=0.0, batches=0)
        found = replace(found, eval=asked)
    # Nobody watches, and what would need not be installed where the run is asked. Nothing is
    # trained either: this rule has no states.
    found = replace(found, run=replace(found.run, trackers=()))
    away = [e for e in found.optimizer.offload.split(",") if e.strip().startswith("weights")]
    rule = SGDConfig(momentum=0.0, stage=found.optimizer.stage, offload=",".join(away))
    found = replace(found, optimizer=rule, eval=replace(found.eval, ema=False))
    return replace(found, parallel=ParallelConfig(), data=replace(found.data, prefetch=0))


def without_held_out(settings: Config) -> Config:
    """The settings of a run of which nothing is to be read but its model."""
    return replace(settings, eval=EvalConfig())


def trained(
    out: Path,
    settings: Config,
    chip: Backend,
    comm: Communicator | None = None,
    *,
    fuse: models.Fuse | None = None,
    averaged: bool = False,
) -> Run:
    """A run at its checkpoint, to be asked. With several ranks a collective.

    What was trained on is read only where a part of it was held out.

    Args:
        fuse: as :func:`~anychip.train.run.build` has it.
        averaged: with the averages of its weights.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: the checkpoint is damaged or has no averages, or the text is not the one
            of the run.
        OSError, ValueError: as reading raises.
    """
    require_checkpoint(out)
    needs_text = bool(settings.eval.fraction)
    read = read_texts if needs_text else _without_training
    run = build(settings, chip, comm, read=read, fuse=fuse)
    restore_weights(run, out, same_text=needs_text, averaged=averaged)
    return run


def _without_training(settings: Config) -> Texts:
    tokenizer = known_tokenizer(settings) or read_data(settings)[1]
    # A loader has some tokens; of this one nobody takes a batch.
    tokens = torch.zeros(settings.model.context + 1, dtype=torch.uint8)
    held_out = read_held_out(settings, tokenizer) if settings.eval.files else None
    return Texts(tokens, tokenizer, held_out)


def continued(
    run: Run,
    prompts: Sequence[str],
    count: int,
    *,
    seed: int,
    temperature: float = 0.8,
    top_p: float = 1.0,
) -> list[str]:
    """What the model writes after each prompt. With stages a collective.

    Each prompt has a generator of its own, so that a text does not depend on the other prompts.

    Args:
        count: tokens of each text.
        temperature, top_p: as :func:`~anychip.train.models.generate` has them.

    Raises:
        ValueError: a prompt is empty, or has a character that no text has.
    """
    tokenizer, texts = run.loader.tokenizer, list[str]()
    encoded = tokenizer.encode(prompts)
    for prompt, row in zip(prompts, encoded, strict=True):
        if not len(row):
            raise ValueError(f"a prompt with at least one token expected, got {prompt!r}")
    model = whole_model(run)
    for row in encoded:
        tokens = models.generate(
            model, row[None].to(run.loader.device, torch.int64), count, temperature=temperature,
            top_p=top_p, generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        texts.append(tokenizer.decode(on_host(tokens[0, len(row) :])))
    return texts
