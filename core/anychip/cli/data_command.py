"""``anychip data``: shards become a directory of tokens, once, and what is in one is checked."""

import json
import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from anychip.cli.train_command import PATH

SCHEMA = 1
_JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON; docs/cli.md has the schema."
)


@click.group("data")
def command() -> None:
    """Prepare shards of text for training, and check what was prepared."""


@command.command("prepare")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--out", type=PATH, required=True, help="Directory for the tokens; new or empty.")
@click.option(
    "--tokenizer",
    default="bytes",
    show_default=True,
    help="bytes; a JSON file of tokenizers, or the directory of a model of transformers.",
)
@click.option(
    "--field",
    default="text",
    show_default=True,
    help="Of JSON lines, tar files and Parquet; messages: conversations, with a model's directory.",
)
@click.option(
    "--filter", "filters", multiple=True, metavar="NAME[:OPTION=VALUE,...]",
    help="Which documents stay; several, in order: docs/data.md has them.",
)  # fmt: skip
@click.option(
    "--workers",
    type=click.IntRange(min=0),
    help="Processes that encode; 0: this one.  [default: one less than there are cores]",
)
@click.option("--skip-corrupt", is_flag=True, help="Leave out what is damaged, and count it.")
@click.option("--resume", is_flag=True, help="Go on in an --out that was not finished.")
@_JSON
def prepare(
    sources: tuple[str, ...], out: Path, tokenizer: str, field: str, filters: tuple[str, ...],
    workers: int | None, skip_corrupt: bool, resume: bool, as_json: bool,
) -> None:  # fmt: skip
    """Read each SOURCE once, filter it, and write its tokens for anychip train --data OUT.

    A SOURCE is a file of text, .jsonl, .parquet or .tar (WebDataset), packed or not, a directory or
    a pattern. Memory does not grow with them. What was ended goes on with --resume.
    """
    from anychip.train import preparing

    request = preparing.Request(sources=sources, field=field, tokenizer=tokenizer, filters=filters)
    cores = len(os.sched_getaffinity(0))
    at_file = TextColumn("file {task.completed} of {task.total}")
    columns = (at_file, BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None, text="")

        def show(at: preparing.Progress) -> None:
            text = f"{at.documents:,} documents, {at.tokens:,} tokens"
            bar.update(task, completed=at.files, total=at.num_files, text=text)

        about = preparing.prepare(
            request,
            out,
            num_workers=cores - 1 if workers is None else workers,
            skip_corrupt=skip_corrupt,
            resume=resume,
            note=lambda text: click.echo(f"anychip: {text}", err=True),
            show=show,
        )
    _tell(out, about, as_json)


@command.command("verify")
@click.argument("directory", type=PATH)
@_JSON
def verify(directory: Path, as_json: bool) -> None:
    """Read all of a prepared DIRECTORY, and compare it with its hashes."""
    from anychip.train.data import Prepared

    found = Prepared(directory)
    found.verify()
    _tell(directory, found.about, as_json)


def _tell(directory: Path, about: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({**about, "schema": SCHEMA, "directory": str(directory)}, indent=2))
        return
    report = about["report"]
    dropped = [f"{count:,} by {name}" for name, count in report["dropped"].items()]
    count = len(report["damaged"])
    damaged = f"{count} file{'s were' if count > 1 else ' was'} damaged" * bool(count)
    said = "; ".join(
        filter(None, (", ".join(dropped) and f"left out {', '.join(dropped)}", damaged))
    )
    click.echo(
        f"{directory}: {about['tokens']:,} tokens ({about['tokenizer']}) of {about['documents']:,} "
        f"of {report['documents']:,} documents{'; ' * bool(said)}{said}"
    )
