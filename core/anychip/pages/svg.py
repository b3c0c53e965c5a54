"""Pictures as SVG text, coloured by the page's style sheet.

One picture is about as wide as a phone, so that its letters keep their size; wider pages put
several next to each other.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup

WIDTH, HEIGHT = 360, 168
LEFT, RIGHT, TOP, BOTTOM = 40, 8, 10, 34
"""Margins."""
SPAN, TALL = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

Point = tuple[float, float]


def picture(label: str, parts: Sequence[str]) -> Markup:
    """What is drawn, with words for whoever does not see it."""
    head = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
        WIDTH, HEIGHT, label
    )
    return head + Markup("".join(parts) + "</svg>")


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """A line in a style."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def text(kind: str, x: float, y: float, words: str, anchor: str = "middle") -> str:
    """Words at a place."""
    escaped = Markup.escape(words)
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped}</text>'


def path(kind: str, points: Iterable[Point], *, closed: bool = False) -> str:
    """A line through points, or what it encloses."""
    steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<{"polygon" if closed else "polyline"} class="{kind}" points="{steps}"/>'


def dot(kind: str, x: float, y: float) -> str:
    """A mark at a place."""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="2"/>'


def ceiling(value: float) -> float:
    """The next of a few even factors times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(factor * power for factor in (1, 2, 3, 4, 5, 6, 8, 10) if factor * power >= value)


def marks(low: float, high: float) -> list[float]:
    """About five even numbers, the first not above low and the last not below high."""
    step = ceiling(max(high - low, abs(high) * 1e-3) / 4)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def short(value: float) -> str:
    """A number in few letters: 250k, 1.5M, 3e-4."""
    size, thousands = abs(value), 0
    while size >= 999.5 and thousands < 5:
        size, thousands = size / 1000, thousands + 1
    if 0 < size < 1e-2:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    return f"{'-' if value < 0 else ''}{size:.3g}{('', 'k', 'M', 'G', 'T', 'P')[thousands]}"


class Plane(NamedTuple):
    """Steps across, from ``begin`` to ``end``; values up."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, step: float, value: float) -> Point:
        """The place of a value."""
        x = LEFT + (step - self.begin) * SPAN / max(self.end - self.begin, 1)
        return x, TOP + TALL * (self.high - value) / (self.high - self.low)

    def frame(self, values: Sequence[float], steps: Sequence[float], title: str) -> list[str]:
        """Lines and numbers of both axes."""
        parts = [text("axis", LEFT + SPAN / 2, HEIGHT - 4, title)]
        for mark in values:
            _, y = self.at(self.begin, mark)
            parts.append(line("grid", LEFT, y, WIDTH - RIGHT, y))
            parts.append(text("tick", LEFT - 6, y + 3.5, short(mark), "end"))
        for step in steps:
            x, _ = self.at(min(step, self.end), self.low)
            anchor = "end" if step >= self.end else "middle"
            parts.append(text("tick", x, HEIGHT - BOTTOM + 15, short(step), anchor))
        return parts

    def curve(self, kind: str, points: Iterable[Point]) -> str:
        """Through what is finite; what lies outside is drawn on the edge."""
        inside = ((step, min(max(value, self.low), self.high)) for step, value in points)
        return path(kind, [self.at(x, y) for x, y in inside if math.isfinite(y)])
