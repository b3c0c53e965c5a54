"""The picture of a timeline: every computation where it ran, text that fits, the numbers beside."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from anychip.train.parallel import (
    Bytes,
    Costs,
    Timeline,
    add_weights,
    draw,
    make_schedule,
    simulate,
)

LEFT, WIDTH, WIDE = 66, 1040, 1216
FONT = 0.65
"""Width of a character in sizes of its font, in the widest of the usual ones."""
SVG = "{http://www.w3.org/2000/svg}"


def timeline(name: str, ranks: int, count: int, virtual: int) -> tuple[Timeline, str]:
    schedule = add_weights(make_schedule(name, ranks, count, virtual=virtual), whole=1)
    found = simulate(schedule, Costs(forward=1.0, backward=2.5))
    memory = found.memory(schedule, Bytes(saved=3 << 30, kept=2 << 30, weights=1 << 28))
    return found, draw(found, memory, title="a < b & c")


CASES = [
    ("1f1b", 2, 1, 1), ("gpipe", 4, 8, 1), ("interleaved", 4, 8, 4), ("zbv", 8, 16, 2),
    ("dualpipev", 8, 128, 2), ("interleaved-zb", 16, 64, 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "count", "virtual"), CASES)
def test_picture_has_every_computation_where_it_ran(
    name: str, ranks: int, count: int, virtual: int
) -> None:
    found, text = timeline(name, ranks, count, virtual)
    root = ElementTree.fromstring(text)
    drawn = [
        (float(x) - LEFT, float(y), float(x) - LEFT + float(width))
        for path in root.iter(f"{SVG}path")
        if path.get("fill")
        for x, y, width in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)", path.get("d", ""))
    ]
    scale = WIDTH / float(found.makespan)
    for rank, row in enumerate(found.rows):
        y = 62 + 30 * rank
        boxes = sorted((start, end) for start, at, end in drawn if at == y)
        assert len(boxes) == len(row)
        for (start, end), span in zip(boxes, row, strict=True):
            assert start == pytest.approx(float(span.start) * scale, abs=0.02)
            assert start < end <= float(span.end) * scale + 0.02
            assert end >= float(span.end) * scale - 0.82
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts[0] == "a < b & c"
    for idle in found.idle:
        assert f"{float(idle / found.makespan):.1%} idle" in texts
    assert sum(str(text).startswith("peak ") for text in texts) == ranks


@pytest.mark.parametrize(("name", "ranks", "count", "virtual"), CASES)
def test_text_of_a_picture_runs_into_nothing(
    name: str, ranks: int, count: int, virtual: int
) -> None:
    """Numbers stay within their computation's width, all else within the page and off its like."""
    found, text = timeline(name, ranks, count, virtual)
    root = ElementTree.fromstring(text)
    height = float(root.get("viewBox", "").split()[3])
    narrowest = min(float(s.end - s.start) for row in found.rows for s in row)
    lines: dict[float, list[tuple[float, float]]] = {}
    for element in root.iter(f"{SVG}text"):
        size = float(re.sub(r"\D", "", element.get("style", "")) or 12)
        long, x = FONT * size * len(element.text or ""), float(element.get("x", 0))
        kind = element.get("class")
        begin = x - {"n": long / 2, "r": long}.get(str(kind), 0.0)
        assert begin >= 0
        assert begin + long <= WIDE + 4
        assert float(element.get("y", 0)) <= height
        lines.setdefault(float(element.get("y", 0)), []).append((begin, begin + long))
    assert narrowest > 0
    for places in lines.values():
        ordered = sorted(places)
        for (_, end), (begin, _) in pairwise(ordered):
            assert end <= begin + 6
