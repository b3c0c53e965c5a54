"""Can the results be written? Asked before the work that they come from."""

import os
from pathlib import Path
from typing import Any

import click


class ResultFile(click.Path):
    """A file that a command writes at its end, with one of the suffixes if there are any."""

    def __init__(self, *suffixes: str) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self.suffixes = suffixes

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """The path, if a file can be made there."""
        file = super().convert(value, param, ctx)
        assert isinstance(file, Path)
        if not file.parent.is_dir():
            self.fail(f"{file}: there is no folder {file.parent}", param, ctx)
        if not file.exists() and not os.access(file.parent, os.W_OK):
            self.fail(f"{file}: the folder {file.parent} cannot be written to", param, ctx)
        if self.suffixes and file.suffix not in self.suffixes:
            self.fail(f"{file}: a name in {', '.join(self.suffixes)} expected", param, ctx)
        return file
