"""Settings on the command line: what they are, and which one an option that is none meant."""

import difflib
import json
import sys

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from anychip.cli.backends_command import WIDE

SCHEMA = 1


class SettingsCommand(click.Command):
    """A command whose settings are key=value: ``--lr 3`` is answered with ``optimizer.lr=3``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            option = error.option_name
            key = _meant(option.lstrip("-").replace("-", "_"))
            if key is None:
                raise
            place = next(i for i, arg in enumerate(given) if arg.partition("=")[0] == option)
            value = given[place].partition("=")[2] or [*given[place + 1 :], "VALUE"][0]
            raise click.UsageError(
                f"there is no option {option}; {key.partition('.')[2]} is a setting: write "
                f"{key}={value}",
                ctx,
            ) from None


def _meant(name: str) -> str | None:
    """The setting that a wrong option is most like, by its name or else by its line."""
    from anychip.train import config

    listed = config.settings()
    tails: dict[str, str] = {
        setting.key.partition(".")[2]: setting.key for setting in reversed(listed)
    }
    if name in tails.values():
        return name
    if near := [name] if name in tails else difflib.get_close_matches(name, tails, n=1):
        return tails[near[0]]
    return next((s.key for s in listed if name.replace("_", " ") in s.meaning), None)


def list_settings(*, as_json: bool) -> None:
    """Prints every setting: its type, its default, and a line about it."""
    from anychip.train import config

    listed = config.settings()
    if as_json:
        entries = [setting._asdict() for setting in listed]
        click.echo(json.dumps({"schema": SCHEMA, "settings": entries}, indent=2))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("setting", "of kind", "type", "default", "meaning"):
        table.add_column(title)
    for setting in listed:
        default = "" if setting.default is None else json.dumps(setting.default)
        words = (setting.key, setting.kind or "", setting.type, default, setting.meaning)
        table.add_row(*map(Text, words))
    Console(width=None if sys.stdout.isatty() else WIDE, highlight=False).print(table)
