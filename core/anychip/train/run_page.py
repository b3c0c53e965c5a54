"""Runs as one page for people: how they went, next to each other, and in what they differ.

``run_page.html.jinja`` beside this file is the page; here is what it shows. Only files of the runs
are read, while they train as well, and of earlier versions, which wrote less.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit
from markupsafe import Markup

import anychip
from anychip.dispatch.tally import torch_summary
from anychip.pages import render, svg
from anychip.train import evaluation, lock, report
from anychip.train.report import Evaluation, StepRecord, best_of, smooth
from anychip.train.watching import PARTS

TEMPLATE = Path(__file__).with_name("run_page.html.jinja")
STYLES = 6
"""Colours of the style sheet; runs after so many have them again, with other dashes."""
POINTS = 240
"""Of a curve at most: about as many as a picture has places for."""
FEW = 20
"""So many points or fewer are marked one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What the files of a run say.

    Attributes:
        name: that of its directory, or its path where several have that name.
        status: how far it has come, in words.
        settings: as in ``config.toml``, by ``"model.width"``.
        served: provenance: of which rank, rows of operators, and lines about torch's own.
        sample: what the trained model wrote; empty: it has not.
        style: colour and dashes of its curves.
    """

    name: str
    status: str
    settings: dict[str, Any]
    rows: list[StepRecord]
    evaluations: list[Evaluation]
    served: list[tuple[str, list[dict[str, Any]], list[str]]]
    sample: str
    style: str

    def median(self, name: str) -> float | None:
        """Of what was measured in each step; None: it was not."""
        values = [v for row in self.rows if (v := getattr(row, name)) is not None]
        return statistics.median(values) if values else None

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the lowest loss."""
        return best_of(self.evaluations) if self.evaluations else None


def read(outs: Sequence[Path]) -> list[RunRecord]:
    """The runs in some directories.

    Raises:
        FileNotFoundError: there is none in one of them.
        ValueError: a file of a run is not what a run writes.
    """
    names = [out.resolve().name for out in outs]
    return [
        _read(out, name if names.count(name) == 1 else str(out), number)
        for number, (out, name) in enumerate(zip(outs, names, strict=True))
    ]


def _read(out: Path, name: str, number: int) -> RunRecord:
    if not (out / "config.toml").is_file():
        raise FileNotFoundError(f"there is no run in {out}: it has no config.toml")
    tables = tomlkit.parse((out / "config.toml").read_text(encoding="utf-8")).unwrap()
    rows = report.read_metrics(out / "metrics.jsonl")
    settings = {f"{table}.{key}": v for table, keys in tables.items() for key, v in keys.items()}
    evaluations, sample = evaluation.rows_of(out), out / "sample.txt"
    return RunRecord(
        name=name, status=_status(out, settings, rows[-1].step if rows else 0, evaluations),
        settings=settings, rows=rows, evaluations=evaluations,
        served=_served(out / "provenance.json"),
        sample=sample.read_text(encoding="utf-8") if sample.exists() else "",
        style=f"run{number % STYLES} dash{(number + number // STYLES) % STYLES}",
    )  # fmt: skip


def _status(out: Path, settings: dict[str, Any], step: int, rows: list[Evaluation]) -> str:
    steps = settings.get("run.steps", step)
    if lock.is_held(out):
        return f"under way, step {step} of {steps}"
    if step >= steps:
        return f"done, {steps} steps"
    is_over = evaluation.is_out_of_patience(rows, settings.get("eval.patience", 0))
    return f"{'ended early' if is_over else 'stopped'}, step {step} of {steps}"


def _served(file: Path) -> list[tuple[str, list[dict[str, Any]], list[str]]]:
    if not file.exists():
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        parts = found.get("pipeline") or [found]
        return [
            (
                f"rank {rank} of the pipeline, {part['backend']}" if len(parts) > 1 else "",
                [{key: row[key] for key in _SERVED} for row in part["operators"]],
                torch_summary(part.get("torch", ())),
            )
            for rank, part in enumerate(parts)
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not what a run writes: {error!r}") from None


_SERVED = (
    "operator", "direction", "implementation", "kind", "provider", "version", "calls",
    "fallback_reason",
)  # fmt: skip


def differing(runs: Sequence[RunRecord]) -> list[tuple[str, list[Any]]]:
    """Settings that are not alike in all runs; None: a run has no such setting."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    found = [(key, [run.settings.get(key) for run in runs]) for key in keys]
    return [(key, values) for key, values in found if any(v != values[0] for v in values)]


# Curves


class Curve(NamedTuple):
    """One picture of all runs.

    Attributes:
        points: of a run, (step, value); none: it has not got them.
        from_zero: where the axis begins; else at what is lowest.
    """

    title: str
    points: Callable[[RunRecord], list[svg.Point]]
    from_zero: bool = True


def _of(name: str) -> Callable[[RunRecord], list[svg.Point]]:
    return lambda run: [(r.step, v) for r in run.rows if (v := getattr(r, name)) is not None]


def _smoothed(run: RunRecord) -> list[svg.Point]:
    losses = smooth([row.loss for row in run.rows])
    return [(row.step, loss) for row, loss in zip(run.rows, losses, strict=True)]


CURVES = {
    "curves": (
        Curve("loss, smoothed, by step", _smoothed, False),
        Curve(
            "held-out loss by step", lambda run: [(r.step, r.loss) for r in run.evaluations], False
        ),
        Curve("learning rate by step", _of("lr")),
        Curve("norm of the gradient by step", _of("grad_norm")),
    ),
    "throughput": (
        Curve("tokens per second by step", _of("tokens_per_s")),
        Curve("MFU by step", _of("mfu")),
    ),
    "memory": (
        Curve("bytes in use by step", _of("allocated_nbytes")),
        Curve("most bytes in use so far, by step", _of("peak_nbytes")),
    ),
}


def thinned(points: Sequence[svg.Point]) -> list[svg.Point]:
    """At most POINTS of them, each the mean of its neighbours."""
    size = -(-len(points) // POINTS) or 1
    groups = (points[first : first + size] for first in range(0, len(points), size))
    return [(group[-1][0], statistics.fmean(y for _, y in group)) for group in groups]


def pictures(runs: Sequence[RunRecord], curves: Iterable[Curve]) -> list[Markup]:
    """The curves that any run has."""
    found = []
    for curve in curves:
        series = {run.style: thinned(curve.points(run)) for run in runs}
        if any(series.values()):
            found.append(_picture(curve, series))
    return found


def _picture(curve: Curve, series: dict[str, list[svg.Point]]) -> Markup:
    values = [value for points in series.values() for _, value in points]
    steps = [step for points in series.values() for step, _ in points]
    plane, parts = _framed(0.0 if curve.from_zero else min(values), max(values), steps, curve.title)
    for style, points in series.items():
        parts.append(plane.curve(f"run {style}", points))
        if len(points) <= FEW:
            parts += [svg.dot(f"run {style}", *plane.at(*point)) for point in points]
    return svg.picture(f"{curve.title}: from {values[0]:.4g} to {values[-1]:.4g}", parts)


def _framed(
    low: float, high: float, steps: Sequence[float], title: str
) -> tuple[svg.Plane, list[str]]:
    marks = svg.marks(low, high)
    plane = svg.Plane(marks[0], marks[-1], min(steps), max(steps))
    # The first and the last mark of even numbers are not in the plane, as often as not.
    across = [m for m in svg.marks(plane.begin, plane.end) if plane.begin <= m <= plane.end]
    across = [mark for mark in across if mark == int(mark)]
    return plane, plane.frame(marks, across or [plane.begin], title)


def parts_of(run: RunRecord) -> list[tuple[str, float, float]]:
    """(part, its median of all steps in seconds, its share); none, where there are no times."""
    found = [(name, run.median(f"{name}_s")) for name in PARTS]
    known = [(name, seconds) for name, seconds in found if seconds is not None]
    whole = sum(seconds for _, seconds in known) or 1.0
    return [(name, seconds, seconds / whole) for name, seconds in known]


def stacked(run: RunRecord) -> Markup:
    """The time of each step by its parts, one on the other."""
    series = [thinned(_of(f"{name}_s")(run)) for name in PARTS]
    steps = [step for step, _ in series[0]]
    values = ([value for _, value in points] for points in series)
    tops = list(accumulate(values, lambda a, b: [x + y for x, y in zip(a, b, strict=True)]))
    # One slow step, as the first often is, must not press all others to the floor.
    high = min(max(tops[-1]), 3 * statistics.median(tops[-1]))
    plane, frame = _framed(0.0, high, steps, "seconds of a step by part")
    parts, below = list[str](), [0.0] * len(steps)
    for name, top in zip(PARTS, tops, strict=True):
        outline = [*zip(steps, top, strict=True), *reversed([*zip(steps, below, strict=True)])]
        inside = (plane.at(step, min(value, plane.high)) for step, value in outline)
        parts.append(svg.path(f"part {name}", inside, closed=True))
        below = top
    return svg.picture(f"{run.name}: seconds of a step by part", [*parts, *frame])


def to_html(runs: Sequence[RunRecord]) -> str:
    """The page, complete in itself."""
    charts = {name: pictures(runs, curves) for name, curves in CURVES.items()}
    timed = [(run, parts_of(run), stacked(run)) for run in runs if parts_of(run)]
    return render(
        TEMPLATE, {"short": svg.short}, version=anychip.__version__, runs=runs,
        charts={name: found for name, found in charts.items() if found}, timed=timed,
        differing=differing(runs) if len(runs) > 1 else [],
    )  # fmt: skip
