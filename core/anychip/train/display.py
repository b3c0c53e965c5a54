"""What a person sees of a run: a live line on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from anychip.train.report import Evaluation, StepRecord, smooth

INTERVAL_S = 5.0
"""Between two plain lines."""


class Display:
    """Context that shows each row it is called with.

    Args:
        console: where to.
        steps: of the whole run.
        done: of them, before this process.
    """

    def __init__(self, console: Console, *, steps: int, done: int = 0) -> None:
        self.console, self.steps = console, steps
        self._left = steps - done
        self._start = self._last = time.monotonic()
        self._count = 0
        self._speed = 0.0
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"), TimeRemainingColumn(compact=True),
            TextColumn("left"), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("train", total=steps, completed=done, status="")

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def __call__(self, row: StepRecord) -> None:
        self._count += 1
        # Over the last few steps: a single step's speed jumps, the whole run's hides a change.
        self._speed += (row.tokens_per_s - self._speed) / min(self._count, 20)
        rate = f"skipped at scale {row.loss_scale:g}" if row.skipped else f"lr {row.lr:.2e}"
        status = f"loss {row.loss:.4f}  {rate}  {self._speed:,.0f} tokens/s"
        self._progress.update(self._task, completed=row.step, status=status)
        now = time.monotonic()
        ends = self._count in (1, self._left)
        if not self.console.is_terminal and (ends or now - self._last >= INTERVAL_S):
            self._last = now
            left_s = (now - self._start) / self._count * (self.steps - row.step)
            width = len(str(self.steps))
            line = f"step {row.step:{width}}/{self.steps}  {status}  {left_s:.0f} s left"
            self.console.print(line, highlight=False, soft_wrap=True)

    def evaluated(self, row: Evaluation) -> None:
        """Shows an evaluation, on a line that stays."""
        self.console.print(
            f"step {row.step:{len(str(self.steps))}}/{self.steps}  {in_words(row)}",
            highlight=False,
            soft_wrap=True,
        )


def in_words(row: Evaluation) -> str:
    """An evaluation on a line."""
    return (
        f"held-out loss {row.loss:.4f}  perplexity {row.perplexity:.4g}  accuracy "
        f"{row.accuracy:.2%} of {row.targets:,} targets"
    )


def curve(rows: Sequence[StepRecord], *, width: int = 64, height: int = 10) -> str:
    """The smoothed loss over the steps, drawn with plain characters."""
    losses = smooth([row.loss for row in rows])
    columns = min(width, len(losses))
    values = [losses[(i + 1) * len(losses) // columns - 1] for i in range(columns)]
    low, high = min(values), max(values)
    scale = (height - 1) / (high - low) if high > low else 0.0
    heights = [round((value - low) * scale) for value in values]
    lines = []
    for level in reversed(range(height)):
        label = low + (high - low) * level / (height - 1)
        marks = "".join("*" if place == level else " " for place in heights)
        lines.append(f"{label:8.3f} |{marks}".rstrip())
    first, last = f"step {rows[0].step}", str(rows[-1].step)
    gap = " " * max(1, columns - len(first) - len(last))
    return "\n".join([*lines, f"{'loss':>8} +{'-' * columns}", f"{'':10}{first}{gap}{last}"])
