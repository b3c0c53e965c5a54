"""The report as one page for people: nothing to load, no script, for wide and narrow screens.

``report.html.jinja`` beside this file is the page; here is what it shows.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from anychip.conformance import charts
from anychip.conformance.bounds import BINS, MANY_ULP, Measurement
from anychip.conformance.covering import Coverage
from anychip.conformance.formats import FORMATS
from anychip.conformance.priorities import weight_of
from anychip.conformance.rank_questions import NAMES
from anychip.conformance.report import DIRECTIONS, OUTCOMES, Report, Result, abridged, dtypes_of
from anychip.conformance.statement import verify
from anychip.pages import render

TEMPLATE = Path(__file__).with_name("report.html.jinja")
FLOATS = tuple(format.name for format in FORMATS.values())
SHOWN = 5
"""Results with the largest errors, per dtype."""
KINDS = ("native", "mapped", "compiled", "reference")


def to_html(report: Report) -> str:
    """The page, complete in itself."""
    return render(
        TEMPLATE,
        {"error": error_text, "ulp": ulp_text, "abridged": abridged},
        report=report,
        known=report.identity,
        version=report.identity.suite,
        statement=verify(report.to_json()),
        outcomes=[outcome for outcome in OUTCOMES if report.counts()[outcome]],
        matrix=list(matrix(report)),
        distributions=list(distributions(report)),
        coverage=coverage_groups(report),
        collectives=collectives(report),
        questions=list(rank_questions(report)),
        trainings=[
            (r, r.curve, charts.losses(r.case, r.curve), charts.deviation(r.case, r.curve))
            for r in report.results
            if r.curve is not None
        ],
        provenance=list(provenance(report)),
        torch_rows=(report.provenance or {}).get("torch", []),
        excused=excused(report),
        pages=[(n, text) for n, text in PARTS.items() if n != "coverage" or report.coverage],
    )


PARTS = {
    "chapters": "Chapters",
    "operators": "Operators",
    "coverage": "Coverage",
    "errors": "Errors",
    "collectives": "Collectives",
    "training": "Training",
    "provenance": "Provenance",
    "excused": "Not passed",
    "identity": "Identity",
}
"""Ids of the page's parts, and their names."""


def error_text(value: float) -> str:
    """An error in units of its bound, short."""
    if not math.isfinite(value):
        return "\N{INFINITY}" if value > 0 else str(value)
    return f"{value:.2f}" if value < 10 else f"{value:.1e}".replace("e+0", "e")


def ulp_text(value: float) -> str:
    """A distance in ULP, where that tells something."""
    return f"{value:.3g}" if value <= MANY_ULP else "-"


# Operators


class Cell(NamedTuple):
    """One operator in one dtype.

    Attributes:
        status: the worst outcome of its cases, as a style: passed, failed, expected, unsupported;
            none: there is no case.
        worst: the largest error, in units of the bound; None: nothing was measured.
        side: where that was: forward or backward.
        detail: both directions, in words.
    """

    status: str
    worst: float | None = None
    side: str = ""
    detail: str = ""


class OperatorRow(NamedTuple):
    """One line of the matrix."""

    name: str
    calls: int
    model: str
    kinds: tuple[str, ...]
    cells: Mapping[str, Cell]


def matrix(report: Report) -> Iterator[OperatorRow]:
    """Operator by dtype: the worst of values and gradients, and who served it."""
    found: dict[str, dict[str, list[Result]]] = {}
    for result in report.results:
        for dtype in dtypes_of(result, report.identity.dtypes):
            name = result.case.split("/")[1]
            found.setdefault(name, {}).setdefault(dtype, []).append(result)
    kinds: dict[str, set[str]] = {}
    for row in _rows(report):
        if row["calls"]:
            kinds.setdefault(row["operator"], set()).add(row["kind"])
    for name, by_dtype in found.items():
        weight = weight_of(name)
        yield OperatorRow(
            name,
            weight.calls,
            weight.model,
            tuple(kind for kind in KINDS if kind in kinds.get(name, ())),
            {dtype: _cell(dtype, by_dtype.get(dtype, [])) for dtype in FLOATS},
        )


def _cell(dtype: str, results: list[Result]) -> Cell:
    if not results:
        return Cell("none")
    details, worst, side = [], None, ""
    for chapter, direction in DIRECTIONS.items():
        mine = [result for result in results if result.chapter == chapter]
        if not mine:
            continue
        failed = sum(not result.ok for result in mine)
        # Results of another type, states and codes, count where there are none of this one.
        measured = [m for r in mine for m in r.measurements]
        errors = [m.max for m in measured if m.format == dtype] or [m.max for m in measured]
        words = f"{direction}: {len(mine)} cases, {failed} failed"
        if errors:
            words += f", error {error_text(max(errors))}"
            if worst is None or max(errors) > worst:
                worst, side = max(errors), direction
        details.append(words)
    return Cell(status_of(results), worst, side, "; ".join(details))


def status_of(results: Iterable[Result]) -> str:
    """The worst outcome of some results, as the name of a style."""
    outcomes = {result.outcome for result in results}
    if any(not result.ok for result in results):
        return "failed"
    if "expected failure" in outcomes:
        return "expected"
    return "passed" if "passed" in outcomes else "unsupported"


# Coverage


class CoverageGroup(NamedTuple):
    """Operators whose calls are alike in how many pairs they have; the least covered first."""

    title: str
    operators: list[tuple[str, Markup, str]]


def coverage_groups(report: Report) -> list[CoverageGroup]:
    """Operators that lack pairs, and those that lack none, by strength."""
    lacking = sorted((c for c in report.coverage if c.of_pairs() < 1.0), key=Coverage.of_pairs)
    found = {"Pairs that no call has": lacking} if lacking else {}
    for each in sorted(report.coverage, key=lambda c: (-c.strength, c.operator)):
        if each.of_pairs() >= 1.0:
            found.setdefault(f"Every pair, strength {each.strength}", []).append(each)
    return [
        CoverageGroup(title, [(c.operator, charts.heat_map(c), charts.in_words(c)) for c in cs])
        for title, cs in found.items()
    ]


# Errors


class Distribution(NamedTuple):
    """Errors of all results of one dtype.

    Attributes:
        elements, results: that were compared.
        median, p999: upper edges of the histogram's bins that hold them.
        worst: the results with the largest errors, each with its case.
    """

    name: str
    picture: Markup
    elements: int
    results: int
    median: float
    p999: float
    worst: list[tuple[Result, Measurement]]


def distributions(report: Report) -> Iterator[Distribution]:
    """Per float type that anything was measured in."""
    for name in FLOATS:
        pairs = [(r, m) for r in report.results for m in r.measurements if m.format == name]
        counts = [0] * (BINS + 1)
        for _, measured in pairs:
            for index, count in enumerate(measured.histogram):
                counts[index] += count
        if not sum(counts):
            continue
        pairs.sort(key=lambda pair: -pair[1].max)
        yield Distribution(
            name,
            charts.histogram(name, counts),
            sum(counts),
            len(pairs),
            _quantile(counts, 0.5),
            _quantile(counts, 0.999),
            pairs[:SHOWN],
        )


def _quantile(counts: list[int], part: float) -> float:
    seen = 0
    for index, count in enumerate(counts):
        seen += count
        if seen >= part * sum(counts):
            return (index + 1) / BINS if index < BINS else math.inf
    return math.inf


# Collectives


class CollectiveCell(NamedTuple):
    """One call in one dtype on one number of ranks."""

    ranks: int
    status: str
    detail: str


class Collectives(NamedTuple):
    """The matrix: calls by dtype by number of ranks."""

    dtypes: tuple[str, ...]
    ranks: tuple[int, ...]
    rows: Mapping[str, Mapping[str, list[CollectiveCell]]]


def collectives(report: Report) -> Collectives:
    """Calls that move values; other questions to ranks are ``rank_questions``."""
    rows: dict[str, dict[str, list[CollectiveCell]]] = {}
    dtypes, worlds = set(), set()
    for result, (world, call, dtype) in _asked_of_ranks(report):
        if dtype not in NAMES:
            continue
        status = status_of([result])
        if status == "passed" and result.note:
            status = "unclaimed"
        detail = f"{call} of {dtype} on {world} ranks: {result.note or result.outcome}"
        cell = CollectiveCell(int(world), status, detail)
        rows.setdefault(call, {}).setdefault(dtype, []).append(cell)
        dtypes.add(dtype)
        worlds.add(int(world))
    return Collectives(tuple(n for n in NAMES if n in dtypes), tuple(sorted(worlds)), rows)


def rank_questions(report: Report) -> Iterator[tuple[str, str, Result]]:
    """(question, status, result) of what else ranks were asked."""
    for result, (world, call, rest) in _asked_of_ranks(report):
        if rest not in NAMES:
            name = f"{call}/{rest}" if rest else call
            yield f"{name}, {world}", status_of([result]), result


def _asked_of_ranks(report: Report) -> Iterator[tuple[Result, tuple[str, str, str]]]:
    for result in report.results:
        parts = result.case.split("/")
        if result.chapter == "collectives" and len(parts) >= 3 and parts[1].isdigit():
            yield result, (parts[1], parts[2], "/".join(parts[3:]))


# Who did the work, and what was not passed


def provenance(report: Report) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Operators with what served them, most calls first."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in _rows(report):
        found.setdefault(row["operator"], []).append(row)
    for name in sorted(found):
        yield name, sorted(found[name], key=lambda row: (row["direction"], -row["calls"]))


def _rows(report: Report) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = (report.provenance or {}).get("operators", [])
    return found


def excused(report: Report) -> list[tuple[str, str, str, list[str]]]:
    """(outcome, reason, capability, ids) of what let the run pass without passing."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for result in report.results:
        if result.ok and result.outcome != "passed":
            key = (result.outcome, result.reason, result.capability or "")
            found.setdefault(key, []).append(result.case)
    order: Counter[str] = Counter({outcome: -n for n, outcome in enumerate(OUTCOMES)})
    return sorted(
        [(*key, cases) for key, cases in found.items()], key=lambda row: (order[row[0]], row[1])
    )
