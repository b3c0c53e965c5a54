"""What does a report look like? Bars next to the bound, or throughput over size, from its rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from anychip.bench.report import Report, Timing
from anychip.train.parallel.rates import COPY_UNIT, PRODUCT_UNIT

COLORS = {
    "ours": "#1b6ca8", "torch": "#d1793b", "compiled": "#8a5fa8", "reference": "#9aa0a6",
    "copy": "#3c3c3c",
}  # fmt: skip
_OTHERS = ("#d1793b", "#e3b23c", "#8a5fa8", "#5b9f5b", "#a0522d", "#c06c84")
BOUND = "#3c3c3c"


def plot(report: Report, file: Path) -> None:
    """Draws a report; the format is that of the file's name.

    Raises:
        ValueError: a subject that has no picture, or a format that matplotlib does not write.
    """
    subject = report.subject.split(",")[0]
    if subject not in PICTURES:
        raise ValueError(f"no picture for {subject}; there are {', '.join(PICTURES)}")
    figure = PICTURES[subject](report)
    figure.suptitle(f"{report.subject} on {report.backend}, {report.device}", fontsize=11)
    figure.savefig(file, dpi=110)


def _dispatch(report: Report) -> Figure:
    figure, (axes,) = make_panels(1, 1 + 0.3 * len(report.rows))
    names = [row.name for row in report.rows]
    colors = [COLORS["ours" if name.startswith("ops") else "reference"] for name in names]
    bars = axes.barh(names, [row.microseconds for row in report.rows], color=colors)
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel("us per call")
    return figure


def _device(report: Report) -> Figure:
    """Rates: of the copy in one panel, of the products in the other."""
    figure, panels = make_panels(2, 2.5)
    for axes, unit in zip(panels, (COPY_UNIT, PRODUCT_UNIT), strict=True):
        rates = {row.name: row.facts[unit] for row in report.rows if unit in row.facts}
        bars = axes.barh(list(rates), list(rates.values()), color=COLORS["ours"])
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set_xlabel(unit)
    return figure


def _operators(report: Report) -> Figure:
    """Time over the bound, of ours and of what it is compared with; a panel per direction."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for row in report.rows:
        name, _, direction = row.name.partition(" ")
        ours = row.facts["x bound"]
        bars = panels.setdefault(direction, {}).setdefault(name, {"ours": ours})
        for peer in ("torch", "compiled", "reference"):
            if f"x {peer}" in row.facts:
                bars[peer] = ours * row.facts[f"x {peer}"]
    return over_bound(panels)


def over_bound(panels: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Figure:
    """Horizontal bars by panel and group, on a log scale that begins below the bound."""
    every = [bars for groups in panels.values() for bars in groups.values()]
    candidates = list(dict.fromkeys(name for bars in every for name in bars))
    palette = _palette(candidates)
    tallest = max(sum(map(len, groups.values())) + len(groups) for groups in panels.values())
    least = min([1.0, *(value for bars in every for value in bars.values())])
    start = 10 ** math.floor(math.log10(least) - 0.01)
    figure, drawn = make_panels(len(panels), 1.4 + 0.15 * tallest)
    for axes, (title, groups) in zip(drawn, panels.items(), strict=True):
        place, ticks = 0.0, []
        for bars in groups.values():
            ticks.append(place + (len(bars) - 1) / 2)
            for name, value in bars.items():
                axes.barh(place, value - start, left=start, height=0.9, color=palette[name])
                text = f" {value:.0f}" if value >= 10 else f" {value:.2g}"
                axes.text(value, place, text, va="center", fontsize=6.5)
                place += 1
            place += 0.8
        axes.set_xscale("log")
        axes.set_xlim(start, 3 * max(v for bars in groups.values() for v in bars.values()))
        axes.set_yticks(ticks, list(groups), fontsize=8)
        axes.set_ylim(place, -1)
        axes.axvline(1.0, color=BOUND, linestyle="--", linewidth=1)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("time over the bound (dashed)", fontsize=9)
    handles = [Patch(color=palette[name], label=name) for name in candidates]
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=len(handles))
    return figure


def _collectives(report: Report) -> Figure:
    """Throughput over size, a panel per call."""
    calls: dict[str, list[Timing]] = {}
    for row in report.rows:
        if row.facts["bytes"]:
            calls.setdefault(row.name.split()[0], []).append(row)
    columns = min(3, len(calls))
    figure, panels = make_panels(columns, 2.6 * math.ceil(len(calls) / columns), len(calls))
    for axes, (call, rows) in zip(panels, calls.items(), strict=True):
        sizes = [row.facts["bytes"] for row in rows]
        for name, style in (("copy", "--"), ("torch", "o-"), ("ours", "o-")):
            rates = [row.facts[f"{name} GB/s"] for row in rows]
            axes.plot(sizes, rates, style, color=COLORS[name], label=name, markersize=3)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(call, fontsize=9)
        axes.set_xticks(sizes, [row.name.removeprefix(f"{call} ") for row in rows])
        axes.set_ylabel("GB/s", fontsize=8)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=7)
        axes.minorticks_off()
    panels[0].legend(fontsize=8)
    return figure


def make_panels(
    columns: int, height: float, count: int | None = None
) -> tuple[Figure, Sequence[Axes]]:
    """A figure with ``count`` panels, as many as columns when None."""
    count = columns if count is None else count
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(5 + 4 * (columns - 1) if columns > 1 else 8, max(2.5, height)))
    figure.set_layout_engine("constrained")
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(count)]


def _palette(names: Sequence[str]) -> dict[str, str]:
    others = iter(_OTHERS * len(names))
    return {name: COLORS[name] if name in COLORS else next(others) for name in names}


PICTURES: dict[str, Callable[[Report], Figure]] = {
    "dispatch": _dispatch, "device": _device, "operators": _operators, "collectives": _collectives,
}  # fmt: skip
"""By subject; a program that measures another one adds how it is drawn."""
