"""The pictures of the report's page: histograms of errors, covered pairs, losses and deviations."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from anychip.conformance.bounds import BINS
from anychip.conformance.case import Curve
from anychip.conformance.covering import Coverage
from anychip.pages import svg
from anychip.pages.svg import BOTTOM, HEIGHT, LEFT, RIGHT, SPAN, TALL, TOP, WIDTH

CELL, LINE, NAMES, LACKING = 17.0, 10.5, 126, 3
"""Of a heat map: largest side of a cell, least height of a row, for its name to be read, room for
the last name, pairs that its words name."""


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
        parts.append(svg.line("grid", LEFT, y, WIDTH - RIGHT, y))
        parts.append(svg.text("tick", LEFT - 6, y + 3.5, _power(decade), "end"))
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
        parts.append(svg.text("tick", x, HEIGHT - BOTTOM + 15, f"{mark:g}"))
    limit = LEFT + step * BINS + 0.3 * step
    parts.append(svg.line("limit", limit, TOP, limit, HEIGHT - BOTTOM))
    parts.append(svg.text("axis", LEFT + SPAN / 2, HEIGHT - 4, "error in units of its bound"))
    total = sum(counts)
    return svg.picture(f"{name}: {total} elements by error, {counts[-1]} outside", parts)


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
        parts.append(svg.text("tick", step * (row + 1) + 3, y + tall / 2 + 3.5, words, "start"))
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


def losses(name: str, curve: Curve) -> Markup:
    """A training's losses by step, on float64's."""
    plane = svg.Plane(0.0, svg.ceiling(max(curve.exact)), 0, len(curve.exact) - 1)
    steps = range(0, len(curve.exact) + 1, 50)
    parts = plane.frame([plane.high * part / 4 for part in range(5)], steps, "loss by step")
    parts += [plane.curve("exact", enumerate(curve.exact))]
    parts += [plane.curve("candidate", enumerate(curve.losses))]
    return svg.picture(f"{name}: losses of {len(curve.losses)} steps", parts)


def deviation(name: str, curve: Curve) -> Markup:
    """How far the losses are from float64's, in units of float32's spread, and the limit."""
    rows = zip(curve.losses, curve.exact, curve.spread, strict=False)
    off = [(loss - exact) / spread for loss, exact, spread in rows]
    size = max((abs(value) for value in off if math.isfinite(value)), default=0.0)
    high = svg.ceiling(min(max(size, 1.25 * curve.limit), 8 * curve.limit))
    plane = svg.Plane(-high, high, 0, len(curve.exact) - 1)
    (left, above), (right, below) = plane.at(0, 1.0), plane.at(plane.end, -1.0)
    parts = [
        f'<rect class="band" x="{left:.1f}" y="{above:.1f}" width="{right - left:.1f}" '
        f'height="{below - above:.1f}"/>'
    ]
    title = "loss minus float64's, in spreads of float32"
    steps = range(0, len(curve.exact) + 1, 50)
    parts += plane.frame([high * part / 2 for part in range(-2, 3)], steps, title)
    for sign in (-1, 1):
        (x1, y), (x2, _) = (plane.at(i, sign * curve.limit) for i in (0, plane.end))
        parts.append(svg.line("limit", x1, y, x2, y))
    parts.append(plane.curve("candidate", enumerate(off)))
    return svg.picture(f"{name}: deviation by step, limit {curve.limit:.3g}", parts)
