"""``anychip eval``: how well the model of a run predicts what it was not trained on."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from anychip.cli.ranks import run_ranks, this_rank
from anychip.cli.train_command import PATH, chip_names

if TYPE_CHECKING:
    from anychip.contract import Backend
    from anychip.train.config import Config

SCHEMA = 1

averaged_option = click.option(
    "--ema", "averaged", is_flag=True, help="With the averaged weights of optimizer.ema_decay."
)


@click.command("eval")
@click.argument("run", type=PATH)
@click.option(
    "--data", type=PATH, multiple=True, help="Text files.  [default: what the RUN held out]"
)
@click.argument("more", nargs=-1, type=PATH, metavar="")
@click.option("--best", is_flag=True, help="Of the best evaluation, not the last checkpoint.")
@averaged_option
@click.option("--backend", metavar="NAME", help="The chip that computes.  [default: the RUN's]")
@click.option(
    "--nproc", type=click.IntRange(min=1), default=1, help="Processes on this machine: ranks."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; docs/cli.md has the schema.")
def command(
    run: Path, data: tuple[Path, ...], more: tuple[Path, ...], best: bool, averaged: bool,
    backend: str | None, nproc: int, as_json: bool,
) -> int:  # fmt: skip
    """Loss, perplexity and accuracy of the RUN's last checkpoint, over every target once.

    On what the RUN held out (eval.files, eval.fraction), or on text files after --data. The numbers
    do not depend on how many ranks trained it, nor on --nproc.
    """
    from anychip.train import asking

    if more and not data:
        raise click.UsageError(f"'{more[0]}': a text to be asked about goes after --data")
    if this_rank() is not None and nproc > 1:
        raise click.UsageError("--nproc starts the ranks itself; leave it out under torchrun")
    directory = asking.directory_of(run, best=best)
    texts = [str(path) for path in (*data, *more)]
    settings = asking.settings_of(directory, texts)
    if not (settings.eval.files or settings.eval.fraction):
        raise click.UsageError(f"{run} has held nothing out; name text files after --data")
    if nproc == 1:
        return _evaluate(directory, settings, chip_of(backend, settings), averaged, as_json)
    from anychip import registry

    words = ["eval", str(run), *(word for text in texts for word in ("--data", text))]
    words += ["--backend", registry.name_of(chip_of(backend, settings))]
    words += ["--best"] * best + ["--ema"] * averaged + ["--json"] * as_json
    with tempfile.TemporaryDirectory() as logs:
        return run_ranks(nproc, words, Path(logs))


def chip_of(backend: str | None, settings: Config) -> Backend:
    """The chip that was asked for, else the one of the run; the first one of several."""
    import anychip

    return anychip.use(next(iter(chip_names(backend, settings)), None))


def _evaluate(
    directory: Path, settings: Config, chip: Backend, averaged: bool, as_json: bool
) -> int:
    import anychip
    from anychip import registry, runtime
    from anychip.train import asking, display, evaluation

    registry.take_device(chip)
    with runtime.device_errors(chip.device_type):
        run = asking.trained(directory, settings, chip, fuse=anychip.fuse, averaged=averaged)
        row = evaluation.evaluate(run)
    if not run.is_first:
        return 0
    if as_json:
        about = {"schema": SCHEMA, "checkpoint": str(directory), "backend": chip.name}
        click.echo(json.dumps({**about, **asdict(row)}, indent=2))
    else:
        click.echo(f"{directory}, step {row.step}: {display.in_words(row)}")
    return 0
