"""What stages share: their options, their time, what they found, and how they end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import anychip
from anychip.bench.report import Report
from anychip.contract import Backend


@dataclass(slots=True)
class Stage:
    """One stage under way.

    Attributes:
        chip: the backend that is asked.
        tiny: sizes that take seconds on a host; what is measured then says nothing.
        deadline: when to stop beginning new work, as of ``time.monotonic``.
        checks: (what, whether it holds, in words).
        reports: of benchmarks.
        notes: what was left out, and why.
    """

    chip: Backend
    tiny: bool
    deadline: float
    checks: list[tuple[str, bool, str]] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self, what: str, holds: bool, text: str = "") -> None:
        """Notes the answer to a question."""
        self.checks.append((what, holds, text))

    def attempt(self, what: str, work: Callable[..., str | None], *given: Any) -> None:
        """Asks ``work(*given)``, whose answer is "" or None when it holds, and a text when not.

        An exception is an answer: the questions after it are asked all the same.
        """
        try:
            wrong = work(*given)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}".splitlines()[0]
        self.check(what, not wrong, wrong or "")

    def has_time(self, what: str) -> bool:
        """Whether the stage may begin something; notes it when not."""
        if time.monotonic() < self.deadline:
            return True
        self.notes.append(f"{what} and what follows were left out: the time was over")
        return False

    @property
    def failed(self) -> list[tuple[str, bool, str]]:
        """The checks that do not hold."""
        return [check for check in self.checks if not check[1]]

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON values."""
        return {
            "passed": not self.failed,
            "backend": self.chip.name,
            "device": self.chip.identity(),
            "tiny": self.tiny,
            "checks": [{"what": w, "holds": h, "text": t} for w, h, t in self.checks],
            "reports": [report.to_json() for report in self.reports],
            "notes": self.notes,
        }


def stage(seconds: float) -> Callable[[Callable[..., None]], click.Command]:
    """Decorator: ``f(stage, **own options)`` becomes a command that ends with 0 if all checks hold.

    Args:
        seconds: it stops beginning new work after so long, unless ``--seconds`` says otherwise.
    """

    def make(function: Callable[..., None]) -> click.Command:
        @wraps(function)
        def run(
            backend: str, tiny: bool, seconds: float, json_file: Path | None, **own: Any
        ) -> int:
            chip = anychip.use(backend)
            under_way = Stage(chip, tiny, time.monotonic() + seconds)
            function(under_way, **own)
            _say(under_way)
            if json_file is not None:
                json_file.write_text(json.dumps(under_way.to_json(), indent=2) + "\n")
            return 1 if under_way.failed or not (under_way.checks or under_way.reports) else 0

        file = click.Path(dir_okay=False, path_type=Path)
        options = (
            click.option("--backend", default="cuda", show_default=True, metavar="NAME"),
            click.option("--tiny", is_flag=True, help="Sizes for a machine without a device."),
            click.option("--seconds", default=seconds, show_default=True, help="Time to begin in."),
            click.option("--json", "json_file", type=file, help="Write what was found here."),
        )
        command: Any = run
        for option in options:
            command = option(command)
        return click.command(help=function.__doc__)(command)

    return make


def _say(under_way: Stage) -> None:
    console = Console(width=160)
    console.print(str(under_way.chip.decision), highlight=False)
    for report in under_way.reports:
        console.print(report.table())
        for note in report.notes:
            console.print(note, highlight=False, markup=False)
    for what, _, text in under_way.failed:
        console.print(f"FAILED {what}: {text}", highlight=False, markup=False)
    for note in under_way.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    holding = len(under_way.checks) - len(under_way.failed)
    console.print(f"{holding} of {len(under_way.checks)} checks hold", highlight=False)


def main(command: click.Command) -> None:
    """Runs a stage as a program; its result is the exit status."""
    raise SystemExit(command(standalone_mode=False))
