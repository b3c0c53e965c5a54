"""How the subjects that are measured outside of the package are drawn: optimizers, training."""

from __future__ import annotations

from matplotlib.figure import Figure

from anychip.bench.plot import BOUND, COLORS, PICTURES, make_panels, over_bound
from anychip.bench.report import Report


def _optimizers(report: Report) -> Figure:
    groups: dict[str, dict[str, float]] = {}
    for row in report.rows:
        group, _, candidate = row.name.partition(": ")
        if candidate != "traffic":
            groups.setdefault(group, {})[candidate] = row.facts["x bound"]
    return over_bound({"a step": groups})


def _training(report: Report) -> Figure:
    """Throughput next to that without communication, and memory."""
    has_memory = all("peak MB" in row.facts for row in report.rows)
    figure, panels = make_panels(1 + has_memory, 1 + 0.42 * len(report.rows))
    names = [row.name for row in report.rows]
    colors = [_training_color(name) for name in names]
    shown: list[tuple[str, str, str]] = [("x alone", "throughput / no communication", "%.2f")]
    if has_memory:
        shown.append(("peak MB", "peak memory of a rank, MB", "%.0f"))
    for axes, (fact, label, form) in zip(panels, shown, strict=True):
        bars = axes.barh(names, [row.facts[fact] for row in report.rows], color=colors)
        # Inside the bars: beside them are the lines of what is aimed at.
        axes.bar_label(bars, fmt=form, label_type="center", color="white", fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(label)
    panels[0].axvline(1.0, color=BOUND, linestyle="--", linewidth=1)
    for row, height in zip(report.rows, range(len(names)), strict=True):
        goal = row.facts.get("goal", "")
        if isinstance(goal, float):
            panels[0].plot(goal, height, "|", color="black", markersize=16, markeredgewidth=2)
    return figure


def _training_color(name: str) -> str:
    if name.startswith(("torch", "DeepSpeed")):
        return COLORS["torch"]
    return COLORS["reference" if name.startswith("no ") else "ours"]


PICTURES.update(optimizers=_optimizers, training=_training)
