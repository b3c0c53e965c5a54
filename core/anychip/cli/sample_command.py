"""``anychip sample``: what the model of a run writes."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import click

from anychip.cli.eval_command import averaged_option, chip_of
from anychip.cli.train_command import PATH, printable

SCHEMA = 1


class _Finite(click.FloatRange):
    """A number in a range, which nan and infinity are not."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"a finite number expected, got {value}", param, ctx)
        return number


@click.command("sample")
@click.argument("run", type=PATH)
@click.argument("prompts", nargs=-1, metavar="[PROMPT...]")
@click.option("--best", is_flag=True, help="Of the best evaluation, not the last checkpoint.")
@averaged_option
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    help="Length of each text.  [default: the RUN's run.sample_tokens]",
)
@click.option(
    "--temperature",
    type=_Finite(min=0.0),
    default=0.8,
    show_default=True,
    help="Above 1 flattens the probabilities; 0 takes the likeliest token.",
)
@click.option(
    "--top-p",
    type=_Finite(min=0.0, max=1.0, min_open=True),
    default=1.0,
    show_default=True,
    help="Draw from the likeliest tokens, as few as have this part of the probability.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Of the draws.  [default: the RUN's]")
@click.option("--backend", metavar="NAME", help="The chip that computes.  [default: the RUN's]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; docs/cli.md has the schema.")
def command(
    run: Path, prompts: tuple[str, ...], best: bool, averaged: bool, max_tokens: int | None,
    temperature: float, top_p: float, seed: int | None, backend: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Write on after each PROMPT, with the RUN's last checkpoint; without one after a line break.

    The same seed gives a prompt the same text, whichever other prompts there are.
    """
    import anychip
    from anychip import registry, runtime
    from anychip.train import asking

    directory = asking.directory_of(run, best=best)
    settings = asking.settings_of(directory)
    chip = chip_of(backend, settings)
    registry.take_device(chip)
    asked = prompts or ("\n",)
    with runtime.device_errors(chip.device_type):
        asked_of = asking.without_held_out(settings)
        model = asking.trained(directory, asked_of, chip, fuse=anychip.fuse, averaged=averaged)
        texts = asking.continued(
            model,
            asked,
            max_tokens or settings.run.sample_tokens,
            seed=settings.run.seed if seed is None else seed,
            temperature=temperature,
            top_p=top_p,
        )
    if not model.is_first:
        return
    if as_json:
        samples = [{"prompt": p, "text": text} for p, text in zip(asked, texts, strict=True)]
        about = {"schema": SCHEMA, "checkpoint": str(directory), "backend": chip.name}
        click.echo(json.dumps({**about, "step": model.step, "samples": samples}, indent=2))
        return
    whole = [f"{prompt}{text}" for prompt, text in zip(asked, texts, strict=True)]
    click.echo(printable("\n\n".join(whole), sys.stdout.encoding))
