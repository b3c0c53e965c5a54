"""A vendor's afternoon: the guide's section on C libraries, followed to the letter and timed.

``python -m benchmarks.vendor_afternoon`` begins in an empty folder with an empty cache, writes the
chip and the kernel that docs/writing-a-backend.md shows, runs every command of the section, and
records them in docs/vendor-afternoon.md. A test runs the same steps, with less conformance.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "writing-a-backend.md"
SECTION = "## A C library, in an afternoon"
TABLE = "static const anychip_library library = {\n"
TAIL, WIDTH = 12, 110
"""Lines of a command's output that the record keeps, and characters of each line."""


class Done(NamedTuple):
    """A command that ended well."""

    title: str
    command: str
    seconds: float
    printed: str


def blocks() -> Iterator[tuple[str, str, str]]:
    """Heading, language and text of each block of the section."""
    section = GUIDE.read_text(encoding="utf-8").partition(f"\n{SECTION}\n")[2]
    for part in section.partition("\n## ")[0].split("\n### ")[1:]:
        title = part.partition("\n")[0]
        for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", part, re.M | re.S):
            yield title, language, text


def field() -> str:
    """What the guide has put into the table for the first kernel."""
    (line,) = re.findall(r"`(\.operators = .*?,)` into it", GUIDE.read_text(encoding="utf-8"))
    return f"    {line}\n"


class Vendor:
    """Somebody with a folder, who does what the guide says."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder, self.site = folder, folder / "site"
        self.path = folder / "chip.c"
        tools = folder / "bin"
        tools.mkdir()
        pip = "install --quiet --no-deps --no-build-isolation --no-index --target"
        for name, words in (("anychip", '-m anychip "$@"'),
                            ("pip", f'-m pip {pip} "{self.site}" "$2"')):  # fmt: skip
            (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}\n')
            (tools / name).chmod(0o755)
        path = os.pathsep.join([str(tools), os.environ["PATH"]])
        imports = os.pathsep.join([str(self.site), os.environ.get("PYTHONPATH", "")])
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": imports, **variables}

    def follow(self, change: Callable[[str], str] = lambda command: command) -> Iterator[Done]:
        """Writes and runs the section, block by block.

        Args:
            change: what to run instead of a command.
        """
        for title, language, text in blocks():
            if language == "c":
                self.write(text)
                continue
            for command in text.splitlines():
                yield self.run(title, change(command))

    def write(self, text: str) -> None:
        """The next piece of the chip; once it is whole, a kernel above its table."""
        known = self.path.read_text() if self.path.exists() else ""
        if TABLE in known:
            text = known.replace(TABLE, f"{text}\n{TABLE}{field()}")
        else:
            text = f"{known}\n{text}".lstrip("\n")
        self.path.write_text(text)

    def run(self, title: str, command: str) -> Done:
        start = time.monotonic()
        done = subprocess.run(
            ["sh", "-ec", command],
            cwd=self.folder, env=self.environment, capture_output=True, text=True,
        )  # fmt: skip
        seconds = time.monotonic() - start
        if done.returncode:
            raise SystemExit(f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
        return Done(title, command, seconds, done.stdout)


def record(steps: list[Done], lines: int) -> str:
    """The page."""
    import torch

    whole = sum(step.seconds for step in steps)
    text = [
        "# A vendor's afternoon, measured",
        "",
        "Written by `python -m benchmarks.vendor_afternoon`: every command of"
        f" [the guide]({GUIDE.name}#a-c-library-in-an-afternoon), from an empty folder",
        f"and an empty cache, with the chip of {lines} lines that it shows. {date.today()},"
        f" {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}.",
        f"All commands together: {whole:.0f} s. What is not timed is reading and typing.",
    ]
    title = ""
    for step in steps:
        if step.title != title:
            title = step.title
            text += ["", f"## {title}"]
        shown = [shortened(line) for line in step.printed.splitlines() if line.strip()]
        text += ["", "```", f"$ {step.command}", *shown[-TAIL:], "```", "", f"{step.seconds:.1f} s"]
    return "\n".join(text) + "\n"


def shortened(line: str) -> str:
    """No word, and above all no number, is cut."""
    if len(line) <= WIDTH:
        return line.rstrip()
    return line[:WIDTH].rpartition(" ")[0].rstrip() + " ..."


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        vendor = Vendor(Path(folder), ANYCHIP_CACHE_DIR=str(Path(folder, "cache")))
        steps = []
        for step in vendor.follow():
            print(f"{step.seconds:8.1f} s  {step.command}", flush=True)
            steps.append(step)
            if step.title == "A device":
                lines = len(vendor.path.read_text().splitlines())
        page = record(steps, lines).replace(folder, "")
    (ROOT / "docs" / "vendor-afternoon.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
