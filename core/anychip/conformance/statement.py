"""Does a report prove what its backend says: "passed level L of suite S"? Read without the chip.

The statement holds when a whole level was run, every case of the must-pass list
(:mod:`.must_pass`) passed, every other case is either about a capability that is not declared or
an operator of a third party that passed, and the report agrees with itself. It is made again from
the results and from the suite that is installed here; no count or verdict of the file is believed.

That finds mistakes, selections and retouched files. It cannot find a report that somebody wrote by
hand from the first line to the last: who has to know runs the suite on the device.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import anychip
from anychip.conformance.case import LEVELS
from anychip.conformance.chapters import CHAPTERS
from anychip.conformance.formats import FORMATS
from anychip.conformance.hashes import suite_hash
from anychip.conformance.must_pass import MustPass, declared_list
from anychip.conformance.report import Report, digest_of

SHOWN = 3
"""Ids that an objection names; the rest is counted."""
SHORT = 12
"""Digits of a hash that a person reads."""


class Statement(NamedTuple):
    """What a report says, and why it does not hold.

    Attributes:
        text: the statement.
        objections: every reason why it does not hold; none: it holds.
    """

    text: str
    objections: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.objections


def verify(document: Mapping[str, Any]) -> Statement:
    """The statement of a report, and whether it holds.

    Raises:
        ValueError: it is not a report of this schema.
    """
    report = Report.from_json(document)
    if report.level not in LEVELS:
        raise ValueError(f"level: one of {', '.join(LEVELS)} expected, got {report.level!r}")
    objections = [*_edited(document, report), *_partial(report), *_impossible(report)]
    known = report.identity
    if known.plugin_hash is None:
        objections.append(
            f"the backend was handed over as an object of {known.distribution}: install it as a "
            "plugin, so that others can have the same files"
        )
    if (known.suite, known.suite_hash) != (anychip.__version__, suite_hash()):
        objections.append(
            f"it was made with suite {_version(known.suite, known.suite_hash)}, and this is "
            f"{_version(anychip.__version__, suite_hash())}: the must-pass list of another suite "
            "cannot be made here; verify with that version"
        )
    else:
        objections += _against_list(report)
    return Statement(_text(report), tuple(objections))


def _version(number: str, hash: str) -> str:
    return f"{number} ({hash[:SHORT]})"


def _text(report: Report) -> str:
    known = report.identity
    declared = ", ".join(f"{name} {v}" for name, v in sorted(known.capabilities.items())) or "none"
    seed = f", seed {report.seed}" if report.seed else ""
    return (
        f"backend {known.backend}, version {known.version} of {known.distribution} "
        f"({(known.plugin_hash or 'no files')[:SHORT]}), on device {known.device!r}, passed level "
        f"{report.level} of suite {_version(known.suite, known.suite_hash)}{seed}: "
        f"{report.must_pass[0]} cases (list {report.must_pass[1][:SHORT]}), float types "
        f"{', '.join(known.dtypes) or 'none'}, declared capabilities {declared}"
    )


def _edited(document: Mapping[str, Any], report: Report) -> Iterator[str]:
    """The report does not agree with itself."""
    if document.get("digest") != digest_of(document):
        yield "its digest is not that of its contents: it was edited after the run"
    if document.get("counts") != report.counts():
        found = {name: number for name, number in report.counts().items() if number}
        yield f"its counts are {document.get('counts')}, and its results count {found}"
    if document.get("passed") != report.passed:
        yield f"it says passed: {document.get('passed')}, and its results say {report.passed}"


def _partial(report: Report) -> Iterator[str]:
    """Not the whole level was run."""
    if report.select:
        yield f"only a selection was run: -k {report.select!r}"
    left_out = [name for name in CHAPTERS if name not in report.chapters]
    if left_out:
        yield f"chapters that were not run: {', '.join(left_out)}"


def _impossible(report: Report) -> Iterator[str]:
    """Results that no run gives."""
    twice = [case for case, count in Counter(r.case for r in report.results).items() if count > 1]
    if twice:
        yield f"cases with two results: {_some(twice)}"
    wrong = [
        result.case
        for result in report.results
        if result.outcome == "passed" and (result.crashed or not (result.error or 0.0) <= 1.0)
    ]
    if wrong:
        yield f"cases that passed with an error outside the bound, or crashed: {_some(wrong)}"
    unknown = sorted(set(report.identity.dtypes) - {format.name for format in FORMATS.values()})
    if unknown:
        yield f"float types that the suite does not know: {', '.join(unknown)}"


def _against_list(report: Report) -> Iterator[str]:
    """What the must-pass list of this backend asks for and the results do not have."""
    known = report.identity
    listed = declared_list(known.device_type, known.capabilities, known.dtypes, report.level)
    if report.must_pass != (len(listed.ids), listed.hash):
        yield (
            f"its must-pass list is {report.must_pass[0]} cases ({report.must_pass[1][:SHORT]}); "
            f"for what the backend declares it is {len(listed.ids)} ({listed.hash[:SHORT]})"
        )
    outcomes = {result.case: result.outcome for result in report.results}
    words = {
        None: "must-pass cases without a result",
        "failed": "must-pass cases that failed",
        "unsupported": "must-pass cases listed as unsupported, though no capability excuses them",
        "expected failure": "must-pass cases listed as expected failures",
        "unexpected pass": "cases that pass and are listed as if they did not",
    }
    found = {text: [c for c in listed.ids if outcomes.get(c) == o] for o, text in words.items()}
    for text, cases in (found | _beyond_list(report, listed)).items():
        if cases:
            yield f"{text}: {_some(cases)}"


def _beyond_list(report: Report, listed: MustPass) -> dict[str, list[str]]:
    """Results for cases that are not in the must-pass list, by what is wrong with them."""
    must = set(listed.ids)
    others = [result for result in report.results if result.case not in must]
    stale = [result.case for result in others if result.outcome == "stale entry"]
    excused = [r for r in others if r.case in listed.capabilities]
    names = [f"/{name}/" for name in report.references]
    foreign = [r for r in others if any(name in r.case for name in names)]
    accounted = {r.case for r in (*excused, *foreign)} | set(stale)
    return {
        "stale entries in its list": stale,
        "cases of a capability that is not declared, and not unsupported": [
            r.case
            for r in excused
            if r.outcome != "unsupported" or r.capability != listed.capabilities[r.case]
        ],
        "cases of third parties' operators that did not pass": [
            r.case for r in foreign if r.outcome != "passed"
        ],
        "cases that this suite does not have": [r.case for r in others if r.case not in accounted],
    }


def _some(cases: Iterable[str]) -> str:
    found: Sequence[str] = list(cases)
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"{len(found)}: {', '.join(found[:SHOWN])}{more}"
