"""The pictures of the report's page: SVG text, coloured by the page's style sheet.

One picture is about as wide as a phone, so that its letters keep their size; wider pages put
several next to each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from anychip.conformance.bounds import BINS
from anychip.conformance.case import Curve
from anychip.conformance.covering import Coverage

WIDTH, HEIGHT = 360, 168
LEFT, RIGHT, TOP, BOTTOM = 40, 8, 10, 34
"""Margins."""
CELL, LINE, NAMES, LACKING = 17.0, 10.5, 126, 3
"""Of a heat map: largest side of a cell, least height of a row, for its name to be read, room for
the last name, pairs that its words name."""
SPAN, TALL = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM


def _svg(label: str, parts: Sequence[str]) -> Markup:
    head = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
        WIDTH, HEIGHT, label
    )
    return head + Markup("".join(parts) + "</svg>")


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(kind: str, x: float, y: float, text: str, anchor: str = "middle") -> str:
    words = Markup.escape(text)
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def _path(kind: str, points: Sequence[tuple[float, float]]) -> str:
    steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{kind}" points="{steps}"/>'


def histogram(name: str, counts: Sequence[int]) -> Markup:
    """Elements by error in units of the bound, on a logarithmic scale.

    Args:
        counts: of BINS + 1 bins; the last is for errors outside the bound.
    """
    decades = max(1, math.ceil(math.log10(max(max(counts), 1) + 1)))
    step = SPAN / (BINS + 1.6)  # the last bin stands apart
    parts = []
    for decade in range(0, decades + 1, 2 if decades > 5 else 1):
        y = TOP + TALL * (1 - decade / decades)
        parts.append(_line("grid", LEFT, y, WIDTH - RIGHT, y))
        parts.append(_text("tick", LEFT - 6, y + 3.5, _power(decade), "end"))
    for index, count in enumerate(counts):
        if count == 0:
            continue
        # A single element has to be seen too: its bar is a tenth of a decade.
        size = TALL * max(math.log10(count), 0.1) / decades
        x = LEFT + step * (index + 0.6 * (index == BINS))
        kind = "bar over" if index == BINS else "bar"
        parts.append(
            f'<rect class="{kind}" x="{x + 0.75:.1f}" y="{TOP + TALL - size:.1f}" '
            f'width="{step - 1.5:.1f}" height="{size:.1f}"/>'
        )
    for mark in (0, 0.25, 0.5, 0.75, 1):
        x = LEFT + step * BINS * mark
        parts.append(_text("tick", x, HEIGHT - BOTTOM + 15, f"{mark:g}"))
    limit = LEFT + step * BINS + 0.3 * step
    parts.append(_line("limit", limit, TOP, limit, HEIGHT - BOTTOM))
    parts.append(_text("axis", LEFT + SPAN / 2, HEIGHT - 4, "error in units of its bound"))
    total = sum(counts)
    return _svg(f"{name}: {total} elements by error, {counts[-1]} outside", parts)


def _power(decade: int) -> str:
    thousands, rest = divmod(decade, 3)
    return f"{10**rest}{'kMGTP'[thousands - 1] if thousands else ''}"


def heat_map(coverage: Coverage) -> Markup:
    """Which pairs of factors had all pairs of their levels: a triangle, factors on its diagonal.

    A name stands right of its row and above its column.
    """
    count = len(coverage.factors)
    step = min(CELL, (WIDTH - NAMES) / max(count, 1))
    tall = max(step, LINE)
    parts = []
    for row, name in enumerate(coverage.factors):
        y = tall * row
        for column in range(row + 1):
            part = coverage.asked[row][column]
            place = f'x="{step * column:.1f}" y="{y:.1f}"'
            size = f'width="{step - 1.5:.1f}" height="{tall - 1.5:.1f}"'
            words = ""
            if part < 1.0:
                pair = name if row == column else f"{coverage.factors[column]} with {name}"
                words = Markup("<title>{}: {}</title>").format(pair, percent(part))
            parts.append(f'<rect class="{shade(part)}" {place} {size} rx="2">{words}</rect>')
        words = f"{name} ({coverage.levels[row]})"
        parts.append(_text("tick", step * (row + 1) + 3, y + tall / 2 + 3.5, words, "start"))
    head = Markup('<svg class="heat" viewBox="0 0 {} {:.0f}" role="img" aria-label="{}">').format(
        WIDTH, tall * count, f"{coverage.operator}: {in_words(coverage)}"
    )
    return head + Markup("".join(parts) + "</svg>")


def shade(part: float) -> str:
    """The style of a part asked: nothing, less than half, more, all."""
    if part >= 1.0:
        return "asked all"
    return "asked none" if part == 0.0 else f"asked {'some' if part < 0.5 else 'most'}"


def percent(part: float) -> str:
    """A part; what is not all never looks like it."""
    return f"{100 if part >= 1.0 else min(math.floor(1000 * part) / 10, 99.9):g} %"


def in_words(coverage: Coverage) -> str:
    """What the picture shows, for whoever does not see it."""
    names = coverage.factors
    lacking = sorted(
        (coverage.asked[row][column], f"{names[column]} with {names[row]}")
        for row in range(len(names))
        for column in range(row)
        if coverage.asked[row][column] < 1.0
    )
    text = (
        f"{len(names)} factors, {coverage.rows} calls, strength {coverage.strength}: "
        f"{percent(coverage.of_pairs())} of all pairs of levels"
    )
    worst = ", ".join(f"{pair} {percent(part)}" for part, pair in lacking[:LACKING])
    more = f" and {len(lacking) - LACKING} more" if len(lacking) > LACKING else ""
    return f"{text}; least: {worst}{more}" if lacking else text


class _Plane(NamedTuple):
    """Steps across, values up."""

    low: float
    high: float
    steps: int

    def at(self, index: int, value: float) -> tuple[float, float]:
        x = LEFT + index * SPAN / max(self.steps - 1, 1)
        return x, TOP + TALL * (self.high - value) / (self.high - self.low)

    def frame(self, marks: Sequence[float], title: str) -> list[str]:
        """Lines and numbers of both axes."""
        parts = [_text("axis", LEFT + SPAN / 2, HEIGHT - 4, title)]
        for mark in marks:
            _, y = self.at(0, mark)
            parts.append(_line("grid", LEFT, y, WIDTH - RIGHT, y))
            parts.append(_text("tick", LEFT - 6, y + 3.5, f"{mark:g}", "end"))
        for step in range(0, self.steps + 1, 50):
            x, _ = self.at(min(step, self.steps - 1), self.low)
            anchor = "end" if step >= self.steps - 1 else "middle"
            parts.append(_text("tick", x, HEIGHT - BOTTOM + 15, str(step), anchor))
        return parts

    def curve(self, kind: str, values: Iterable[float]) -> str:
        """Through what is finite; what lies outside is drawn on the edge."""
        inside = enumerate(min(max(v, self.low), self.high) for v in values)
        return _path(kind, [self.at(i, v) for i, v in inside if math.isfinite(v)])


def losses(name: str, curve: Curve) -> Markup:
    """A training's losses by step, on float64's."""
    plane = _Plane(0.0, _ceiling(max(curve.exact)), len(curve.exact))
    parts = plane.frame([plane.high * part / 4 for part in range(5)], "loss by step")
    parts += [plane.curve("exact", curve.exact), plane.curve("candidate", curve.losses)]
    return _svg(f"{name}: losses of {len(curve.losses)} steps", parts)


def deviation(name: str, curve: Curve) -> Markup:
    """How far the losses are from float64's, in units of float32's spread, and the limit."""
    rows = zip(curve.losses, curve.exact, curve.spread, strict=False)
    off = [(loss - exact) / spread for loss, exact, spread in rows]
    size = max((abs(value) for value in off if math.isfinite(value)), default=0.0)
    high = _ceiling(min(max(size, 1.25 * curve.limit), 8 * curve.limit))
    plane = _Plane(-high, high, len(curve.exact))
    (left, above), (right, below) = plane.at(0, 1.0), plane.at(plane.steps - 1, -1.0)
    parts = [
        f'<rect class="band" x="{left:.1f}" y="{above:.1f}" width="{right - left:.1f}" '
        f'height="{below - above:.1f}"/>'
    ]
    title = "loss minus float64's, in spreads of float32"
    parts += plane.frame([high * part / 2 for part in range(-2, 3)], title)
    for sign in (-1, 1):
        (x1, y), (x2, _) = (plane.at(i, sign * curve.limit) for i in (0, plane.steps - 1))
        parts.append(_line("limit", x1, y, x2, y))
    parts.append(plane.curve("candidate", off))
    return _svg(f"{name}: deviation by step, limit {curve.limit:.3g}", parts)


def _ceiling(value: float) -> float:
    """The next of a few even factors times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(factor * power for factor in (1, 2, 3, 4, 5, 6, 8, 10) if factor * power >= value)
