"""What does a schedule look like? A picture as SVG: who does what when, who waits, what is in use.

Colours are those of Okabe and Ito (2008), which the colour-blind tell apart, and each computation
has its letter where that fits. Text and lines suit a dark page where the reader has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from anychip.train.parallel.simulator import Span, Time, Timeline

Steps = Sequence[tuple[Time, int]]
"""Times, and the bytes in use from then on."""

_COLOURS = {
    "F": ("#56b4e9", "forward"),
    "B": ("#e69f00", "backward"),
    "I": ("#f0e442", "gradient of the input"),
    "W": ("#cc79a7", "gradients of weights"),
}
_STYLE = """text{font:12px sans-serif;fill:#222}.n{fill:#000;text-anchor:middle}.r{text-anchor:end}
.h{font-size:15px;font-weight:bold}.i{fill:#8883}.l{stroke:#8888;stroke-width:1;fill:none}
.m{fill:#0072b255;stroke:#0072b2}.p{stroke:#d55e00;stroke-dasharray:4 3}
@media(prefers-color-scheme:dark){text{fill:#ddd}.n{fill:#000}.m{fill:#56b4e955;stroke:#56b4e9}}"""
_LEFT, _WIDTH, _RIGHT, _TOP = 66, 1040, 110, 62
_ROW, _GAP, _CURVE = 24, 6, 34
_LETTER = 0.62
"""Width of a digit or letter in sizes of its font, on the wide side."""
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


class _Box(NamedTuple):
    """Of a computation, in the picture."""

    x: float
    y: float
    width: float

    @classmethod
    def of(cls, span: Span, y: float, makespan: Time) -> _Box:
        start, end = (float(time / makespan) * _WIDTH for time in span[1:])
        return cls(_LEFT + start, y, end - start)


def draw(timeline: Timeline, memory: Sequence[Steps] = (), *, title: str = "") -> str:
    """A row per rank with its computations, their microbatches and the idle time; below, per rank,
    the memory in use with its peak.

    Args:
        memory: of each rank, as :meth:`~.simulator.Timeline.memory` has it; none: it is left out.
        title: above it.

    Returns:
        The text of an SVG file, 1216 wide. A rank's later stages are paler.
    """
    ranks, makespan, wide = len(timeline.rows), timeline.makespan, _LEFT + _WIDTH + _RIGHT
    below = _TOP + ranks * (_ROW + _GAP)
    height = below + 28 + (ranks * (_CURVE + _GAP) + 32 if memory else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {height}">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        _text(_LEFT, 20, title, "h"),
        *_legend({(s.action.kind, s.action.stage) for row in timeline.rows for s in row}, ranks),
    ]
    for rank, (row, idle) in enumerate(zip(timeline.rows, timeline.idle, strict=True)):
        parts += _row(rank, row, makespan, float(idle / makespan))
    parts += _axis(below + 4)
    most = max((nbytes for steps in memory for _, nbytes in steps), default=0)
    if memory:
        parts.append(_text(_LEFT, below + 42, "Memory in use, and its peak"))
    for rank, steps in enumerate(memory):
        top = below + 52 + rank * (_CURVE + _GAP)
        parts += _curve(rank, steps, top, makespan, most or 1)
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, text: str, kind: str = "", size: float = 0) -> str:
    style = f' style="font-size:{size:g}px"' if size else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{style}>{escape(text)}</text>'


def _legend(done: set[tuple[str, int]], ranks: int) -> list[str]:
    parts, x = [], float(_LEFT)
    for kind, (colour, meaning) in _COLOURS.items():
        if kind in {kind for kind, _ in done}:
            label = f"{kind} {meaning}"
            parts.append(f'<rect x="{x:.1f}" y="33" width="13" height="13" fill="{colour}"/>')
            parts.append(_text(x + 18, 44, label))
            x += 42 + 12 * _LETTER * len(label)
    if len({stage for _, stage in done}) > ranks:
        parts.append(_text(x, 44, "paler: later stages of a rank"))
    return parts


def _row(rank: int, row: Sequence[Span], makespan: Time, idle: float) -> list[str]:
    y = _TOP + rank * (_ROW + _GAP)
    parts = [
        _text(_LEFT - 8, y + 17, f"rank {rank}", "r"),
        f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW}" class="i"/>',
        _text(_LEFT + _WIDTH + 8, y + 17, f"{idle:.1%} idle"),
    ]
    stages = sorted({span.action.stage for span in row})
    numbers = []
    for stage in stages:
        for kind, (colour, _) in _COLOURS.items():
            spans = [s for s in row if s.action.stage == stage and s.action.kind == kind]
            boxes = [_Box.of(span, y, makespan) for span in spans]
            shape = "".join(
                f"M{box.x:.2f} {y}h{max(box.width - 0.8, box.width / 2):.2f}v{_ROW}H{box.x:.2f}z"
                for box in boxes
            )
            fill = _paler(colour, 0.55 * stages.index(stage) / max(1, len(stages) - 1))
            parts += [f'<path fill="{fill}" d="{shape}"/>'] if boxes else []
            numbers += [_number(s, box) for s, box in zip(spans, boxes, strict=True)]
    return [*parts, *filter(None, numbers)]


def _number(span: Span, box: _Box) -> str:
    """What fits into it: letter and microbatch, the microbatch, or nothing."""
    number = str(span.action.microbatch)
    for label, size in ((f"{span.action.kind}{number}", 11), (number, 11), (number, 8)):
        if size * _LETTER * len(label) + 2 <= box.width:
            return _text(box.x + box.width / 2, box.y + 12 + 0.36 * size, label, "n", size)
    return ""


def _paler(colour: str, share: float) -> str:
    """A colour with a share of white."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in channels)


def _axis(y: float) -> list[str]:
    parts = [f'<path class="l" d="M{_LEFT} {y}h{_WIDTH}"/>']
    for percent in range(0, 101, 25):
        x = _LEFT + _WIDTH * percent / 100
        label = f"{percent} %" + " of the time" * (percent == 100)
        parts += [f'<path class="l" d="M{x} {y}v4"/>', _text(x + 14, y + 16, label, "r")]
    return parts


def _curve(rank: int, steps: Steps, top: float, makespan: Time, most: int) -> list[str]:
    """Steps over time, on a scale that begins at 0 and is the same for all ranks."""
    bottom = top + _CURVE

    def at(nbytes: int) -> float:
        return bottom - _CURVE * nbytes / most

    shape, held = [f"M{_LEFT} {bottom:.1f}"], 0
    for time, held in steps:
        shape.append(f"H{_LEFT + _WIDTH * float(time / makespan):.2f}V{at(held):.2f}")
    shape.append(f"H{_LEFT + _WIDTH}V{bottom:.1f}z")
    peak = max((nbytes for _, nbytes in steps), default=0)
    return [
        _text(_LEFT - 8, bottom - 11, f"rank {rank}", "r"),
        f'<path class="m" d="{"".join(shape)}"/>',
        f'<path class="p" d="M{_LEFT} {at(peak):.2f}h{_WIDTH}"/>',
        _text(_LEFT + _WIDTH + 8, bottom - 11, f"peak {_bytes(peak)}"),
    ]


def _bytes(nbytes: int) -> str:
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"
