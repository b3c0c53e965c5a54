"""``anychip export``: the weights of a run, as transformers loads them."""

import json
from pathlib import Path

import click

from anychip.cli.eval_command import averaged_option
from anychip.cli.train_command import PATH

SCHEMA = 1


@click.command("export")
@click.argument("run", type=PATH)
@click.argument("directory", type=PATH)
@click.option(
    "--part-size", type=click.IntRange(min=1), default=4096, show_default=True,
    help="MiB of a file at most.",
)  # fmt: skip
@click.option("--adapters", is_flag=True, help="Of a RUN with LoRA: these alone, for PEFT.")
@averaged_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON; docs/cli.md has the schema.")
def command(
    run: Path, directory: Path, part_size: int, adapters: bool, averaged: bool, as_json: bool
) -> None:
    """Write the weights of the RUN's last checkpoint to a new DIRECTORY.

    As Hugging Face transformers loads them, AutoModelForCausalLM.from_pretrained(DIRECTORY): a GPT
    as GPT-2, a Llama as Llama, a model of transformers as itself, with adapters merged; and the
    tokenizer when it is in the RUN.
    """
    from anychip.train import asking, models
    from anychip.train.checkpoint import pretrained

    chosen = asking.settings_of(asking.directory_of(run)).model
    nbytes = part_size << 20
    if isinstance(chosen, models.PretrainedConfig):
        if adapters and not chosen.lora_rank:
            raise click.UsageError(f"--adapters: {run} has none; a run has with model.lora_rank=N")
        written = pretrained.export_trained(
            run, directory, model=models.Pretrained(chosen), description=Path(chosen.path),
            part_nbytes=nbytes, adapters=adapters, averaged=averaged,
        )  # fmt: skip
    elif adapters:
        raise click.UsageError(f"--adapters: {run} has none; they are for a model of model.path")
    else:
        written = pretrained.export(
            run, directory, config=chosen, part_nbytes=nbytes, averaged=averaged
        )
    if (run / "tokenizer.json").exists():
        written.append(directory / "tokenizer.json")
        written[-1].write_bytes((run / "tokenizer.json").read_bytes())
    if as_json:
        files = {path.name: path.stat().st_size for path in written}
        click.echo(json.dumps({"schema": SCHEMA, "directory": str(directory), "files": files}))
    else:
        nbytes = sum(path.stat().st_size for path in written)
        click.echo(f"{directory}: {len(written)} files, {nbytes:,} bytes")
