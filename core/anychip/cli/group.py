"""Which subcommand is meant? Finds it by name and imports nothing but it."""

import os
from collections.abc import Mapping, Sequence
from importlib import import_module

import click

import anychip
from anychip.cli.exit_codes import protect
from anychip.registry import extensions

SUBCOMMANDS: Mapping[str, str] = {
    "backends": "Lists the backends that are installed, and which one is chosen.",
    "bench": "Measures speed against named peers and against the hardware's bound.",
    "config": "Says where the C interface for chips is: flags for a compiler, a folder for CMake.",
    "conformance": "Checks that a backend computes what the contract says.",
    "data": "Prepares shards of text for training: tokens in a directory, made once.",
    "doctor": "Says why a backend cannot run here, and what fixes it.",
    "eval": "Says how well the model of a run predicts what it was not trained on.",
    "export": "Writes the weights of a run as Hugging Face transformers loads them.",
    "new-backend": "Writes a plugin project for a new chip.",
    "operators": "Says what a row for an operator is given and gives, with a stub of one.",
    "plan": "Shows what a training run would be like: sizes, stages, bytes, waiting.",
    "report": "Shows runs on one page: curves, speed, memory, time by part, what differs.",
    "sample": "Writes text with the model of a run.",
    "train": "Trains a model; without a configuration a small one, in about a minute.",
}
"""Every subcommand and its line in ``anychip --help``, which therefore imports none of them."""

_DEBUG = "--debug"


class _Group(click.Group):
    """Subcommands from modules of their own."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        module = import_module(f"anychip.cli.{cmd_name.replace('-', '_')}_command")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in SUBCOMMANDS and not name.startswith("-"):
            import difflib

            near = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(SUBCOMMANDS)}"
            raise click.UsageError(f"there is no command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(SUBCOMMANDS.items()))


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(anychip.__version__, "--version", prog_name="anychip")
@click.option(_DEBUG, is_flag=True, expose_value=False, help="Show the traceback of an error.")
def group() -> None:
    """Write the training once. Run it on any chip. Prove it.

    Exit codes: 0 done; 1 a check failed; 2 wrong use; 3 the backend cannot run here.
    """


def run(args: Sequence[str]) -> int:
    """Runs the command line and returns its exit code. ``--debug`` may stand anywhere."""
    debug = _DEBUG in args or os.environ.get("ANYCHIP_DEBUG", "") not in ("", "0")
    rest = [arg for arg in args if arg != _DEBUG]

    def work() -> object:
        try:
            return group.main(rest, "anychip", standalone_mode=False)
        except Exception as error:
            if why := extensions.failure(error):
                click.echo(f"anychip: {why}; starting again without torch's extensions", err=True)
                extensions.restart_without(["-m", "anychip", *args])
            raise

    return protect(work, debug=debug)
