"""A page whose files are written and whose commands are run, in an empty directory.

A block of a program's language begins with a comment that is the file's name; a block ``bash`` is
run, and prints each line of the block ``text`` behind it, in their order and among others.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
# What an installed anychip brings without being asked.
IMPORTS = [str(ROOT / "core"), *(str(path) for path in (ROOT / "backends").iterdir())]


class Command(NamedTuple):
    """Commands of one block, and the lines that the page says they print."""

    text: str
    lines: list[str]


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and text of every fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def files(page: Path) -> dict[str, str]:
    """The files of the page by name."""
    found = [
        text
        for language, text in blocks(page.read_text("utf-8"))
        if language in ("c", "python", "toml")
    ]
    return {text.partition("\n")[0].lstrip("#/ "): text for text in found}


def commands(page: Path) -> list[Command]:
    """The commands, each with the block of output behind it, if there is one."""
    found: list[Command] = []
    for language, text in blocks(page.read_text("utf-8")):
        if language == "bash":
            found.append(Command(text.strip(), []))
        elif language == "text":
            found[-1].lines.extend(text.splitlines())
    return found


class Place:
    """An empty directory with the page's files, and a shell in it."""

    def __init__(self, page: Path, directory: Path, **variables: str) -> None:
        self.page = page
        self.directory, self.site = directory / "project", directory / "site"
        shims = directory / "bin"
        for folder in (self.directory, shims):
            folder.mkdir(parents=True)
        for name, text in files(page).items():
            (self.directory / name).write_text(text, encoding="utf-8")
        for name, module in (("python", ""), ("anychip", "-m anychip "), ("pip", "-m pip ")):
            (shims / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n')
            (shims / name).chmod(0o755)
        self.environment = {
            **os.environ, "PATH": os.pathsep.join([str(shims), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(self.site), *IMPORTS]),
            # pip installs beside the tests, with what is here already.
            "PIP_TARGET": str(self.site),
            "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables,
        }  # fmt: skip

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-ec", command], cwd=self.directory, env=self.environment, capture_output=True,
            text=True, errors="replace", timeout=200, check=False,
        )  # fmt: skip

    def follow(self) -> int:
        """Runs the commands, and says how many lines were printed that the page shows."""
        checked = 0
        for command in commands(self.page):
            done = self.run(command.text)
            output = done.stdout + done.stderr
            assert done.returncode == 0, f"{command.text}\n{output}"
            rest = plain(output)
            for line in command.lines:
                head, found, rest = rest.partition(plain(line))
                assert found, f"{command.text}\nprinted no {line!r} after\n{head}\nof\n{output}"
                checked += 1
        return checked


def plain(text: str) -> str:
    """Text with single spaces: tables may be of any width."""
    return " ".join(text.split())
