"""Which commands did a stage run, and what did they print?"""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


class CommandError(Exception):
    """A command ended with another status than 0."""


class Log:
    """Runs commands at the root, and keeps what they print."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        self.path = path

    def command(self, *words: str | Path, env: Mapping[str, str] | None = None) -> None:
        """Runs a command.

        Raises:
            CommandError: it did not end with 0.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        with self.path.open("a") as file:
            file.write(f"$ {' '.join(map(str, words))}\n")
            file.flush()
            command = [str(word) for word in words]
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
            )
        if done.returncode != 0:
            raise CommandError(f"ended with {done.returncode}: {' '.join(map(str, words[:4]))} ...")

    def end(self, lines: int = 40) -> str:
        """The last lines, for a person to read."""
        return "\n".join(f"  | {line}" for line in self.path.read_text().splitlines()[-lines:])
