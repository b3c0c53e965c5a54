"""Does ``verify`` accept what a whole, good run writes, and nothing else?

The report is made by hand: every case of the must-pass list passed. Each test spoils it in one way.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anychip.cli.group import run
from anychip.conformance import CHAPTERS, LEVELS, statement
from anychip.conformance.archive import read_document
from anychip.conformance.case import Context
from anychip.conformance.chapters import all_cases
from anychip.conformance.hashes import suite_hash
from anychip.conformance.must_pass import declared_list, must_pass
from anychip.conformance.report import Identity, Report, Result, digest_of, to_text
from tests.meta.honest import HonestBackend

CAPABILITIES = {"memory_stats": 1, "memory_peak": 1}
NEEDS_STREAMS = "streams/order"
CASE = "operators/gelu/fp32/17.none"

Document = dict[str, Any]
Change = Callable[[Document], None]


def good_report() -> Report:
    listed = declared_list("cpu", CAPABILITIES, ["fp32"], "quick")
    passed = [Result(case=case, outcome="passed") for case in listed.ids]
    excused = [
        Result(case=case, outcome="unsupported", reason="not declared", capability=missing)
        for case, missing in listed.capabilities.items()
    ]
    return Report(
        identity=Identity(
            backend="acme", device_type="cpu", device="acme one", num_devices=1,
            distribution="anychip-acme", version="1.2", api=(2, 0), capabilities=CAPABILITIES,
            dtypes=("fp32",), plugin_hash="0" * 64, suite_hash=suite_hash(),
        ),
        level="quick", chapters=tuple(CHAPTERS), select="", seed=0, isolated=False,
        results=tuple(passed + excused), must_pass=(len(listed.ids), listed.hash),
        started="2026-11-21T12:00:00+00:00", provenance={"schema": 1, "operators": []},
    )  # fmt: skip


@pytest.fixture(scope="module")
def written() -> Document:
    document: Document = json.loads(json.dumps(good_report().to_json()))
    return document


def row(document: Document, case: str) -> Document:
    found: Document = next(row for row in document["results"] if row["case"] == case)
    return found


def with_result(case: str, **fields: Any) -> Change:
    return lambda document: row(document, case).update(fields)


def without(case: str) -> Change:
    return lambda document: document["results"].remove(row(document, case))


def adding(case: str, **fields: Any) -> Change:
    return lambda document: document["results"].append(
        {**row(document, CASE), "case": case, **fields}
    )


def setting(**fields: Any) -> Change:
    return lambda document: document.update(fields)


def identity(**fields: Any) -> Change:
    return lambda document: document["identity"].update(fields)


def copied(document: Document) -> Document:
    """As deep as the changes go."""
    rows = [dict(row) for row in document["results"]]
    return {**document, "results": rows, "identity": dict(document["identity"])}


def signed(document: Document, change: Change) -> Document:
    """A copy, changed, with counts, verdict and digest that fit: as a careful forger leaves it."""
    changed = copied(document)
    change(changed)
    report = Report.from_json(changed)
    changed.update(counts=report.counts(), passed=report.passed)
    return {**changed, "digest": digest_of(changed)}


def test_statement_of_a_whole_good_run_holds(written: Document) -> None:
    found = statement.verify(written)
    assert found.holds, found.objections
    assert "backend acme, version 1.2 of anychip-acme" in found.text
    assert "passed level quick" in found.text
    assert "memory_peak 1, memory_stats 1" in found.text


def test_stand_in_for_a_backend_has_the_list_of_the_backend_itself() -> None:
    backend = HonestBackend()
    for level in LEVELS:
        own = must_pass(all_cases(Context(backend, level)), backend, level)
        assert own == declared_list("cpu", backend.capabilities, ["fp32"], level)
        assert len(own.ids) > 1000


def test_list_depends_on_level_types_and_capabilities() -> None:
    hashes = {
        declared_list("cpu", capabilities, formats, level).hash
        for capabilities in (dict[str, int](), CAPABILITIES)
        for formats in (["fp32"], ["fp32", "bf16"]) for level in LEVELS
    }  # fmt: skip
    assert len(hashes) == 8


SPOILED: dict[str, tuple[Change, str]] = {
    "selection": (setting(select="gelu"), "only a selection"),
    "chapters": (setting(chapters=["device", "operators"]), "chapters that were not run: memory"),
    "failed": (with_result(CASE, outcome="failed"), "must-pass cases that failed: 1: "),
    "excused": (with_result(CASE, outcome="unsupported", capability="streams"),
                "listed as unsupported, though no capability excuses them: 1: "),
    "expected": (with_result(CASE, outcome="expected failure"),
                 "listed as expected failures: 1: "),
    "unexpected": (with_result(CASE, outcome="unexpected pass"), "listed as if they did not"),
    "missing": (without(CASE), f"must-pass cases without a result: 1: {CASE}"),
    "not-excused": (with_result(NEEDS_STREAMS, outcome="expected failure"),
                    "not unsupported: 1: "),
    "other-capability": (with_result(NEEDS_STREAMS, capability="wings"), "not unsupported: 1: "),
    "invented": (adding("operators/gelu/fp32/invented"),
                 "cases that this suite does not have: 1: "),
    "stale": (adding("memory/*", outcome="stale entry"), "stale entries in its list: 1: memory/*"),
    "twice": (adding(CASE), f"cases with two results: 1: {CASE}"),
    "crashed": (with_result(CASE, crashed=True), "or crashed: 1: "),
    "suite-files": (identity(suite_hash="1" * 64), "it was made with suite 0.1.0 (111111111111)"),
    "suite-version": (identity(suite="0.0.1"), "cannot be made here; verify with that version"),
    "object": (identity(plugin_hash=None), "handed over as an object"),
    "unknown-type": (identity(dtypes=["fp32", "fp4"]), "does not know: fp4"),
    "more-types": (identity(dtypes=["fp32", "bf16"]), "for what the backend declares it is"),
    "more-capabilities": (identity(capabilities={**CAPABILITIES, "streams": 1}),
                          "must-pass cases listed as unsup"),
    "level": (setting(level="full"), "must-pass cases without a result"),
}  # fmt: skip
"""What was done to the report, and words of the objection."""


@pytest.mark.grid
@pytest.mark.parametrize("how", SPOILED)
def test_statement_of_a_spoiled_report_does_not_hold(written: Document, how: str) -> None:
    change, words = SPOILED[how]
    found = statement.verify(signed(written, change))
    assert not found.holds
    assert words in "\n".join(found.objections)


def test_case_of_an_undeclared_capability_may_be_left_out(written: Document) -> None:
    assert statement.verify(signed(written, without(NEEDS_STREAMS))).holds


def test_case_with_an_error_outside_the_bound_cannot_have_passed(written: Document) -> None:
    error = {
        "name": "y", "format": "fp32", "count": 9, "median": 0.1, "p999": 0.2, "max": 1.5,
        "rms": None, "quantile": None, "max_ulp": 3.0, "where": [1], "failure": None,
        "histogram": [9],
    }  # fmt: skip
    for change, holds in (({"max": 1.0}, True), ({}, False), ({"max": "nan"}, False)):
        fields = with_result(CASE, errors=[{**error, **change}])
        assert statement.verify(signed(written, fields)).holds == holds
    for brief, holds in ((1.0, True), (1.01, False), ("nan", False), ("inf", False)):
        fields = with_result(CASE, error=brief)
        assert statement.verify(signed(written, fields)).holds == holds


@pytest.mark.parametrize(("change", "words"), [
    (with_result(CASE, outcome="failed", reason="off"), "its counts are"),
    (setting(passed=False), "it says passed: False"),
    (with_result(CASE, call="gelu()"), "it was edited after the run"),
], ids=["outcome", "verdict", "call"])  # fmt: skip
def test_report_edited_by_hand_does_not_hold(written: Document, change: Change, words: str) -> None:
    changed = copied(written)
    change(changed)
    assert words in "\n".join(statement.verify(changed).objections)


def test_third_partys_operator_has_to_pass_and_is_not_in_the_list(written: Document) -> None:
    case = "operators/acme_norm/fp32/8"
    for outcome, holds in (("passed", True), ("failed", False), ("unsupported", False)):

        def change(document: Document, outcome: str = outcome) -> None:
            document["references"] = ["acme_norm"]
            adding(case, outcome=outcome)(document)

        assert statement.verify(signed(written, change)).holds == holds


@pytest.mark.parametrize(("text", "words"), [
    ("no json", "it is not JSON"), ("[]", "schema 4 expected, got []"),
    ('{"schema": 1}', "schema 4 expected, got 1"),
    ('{"schema": 4}', "schema 4 expected: KeyError: 'level'"),
], ids=["text", "list", "old", "empty"])  # fmt: skip
def test_what_is_no_report_is_wrong_use(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "report.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="report") as error:
        statement.verify(read_document(file))
    assert words in str(error.value)


@pytest.mark.parametrize(("text", "code", "words"), [
    ("good", 0, "the statement holds"), ("spoiled", 1, "DOES NOT HOLD"), ("other", 2, "not JSON"),
])  # fmt: skip
def test_command_verifies_a_file(
    written: Document, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int,
    words: str,
) -> None:  # fmt: skip
    spoiled = signed(written, without(CASE))
    texts = {"good": to_text(written), "spoiled": to_text(spoiled), "other": "not JSON"}
    file = tmp_path / "report.json"
    file.write_text(texts[text], encoding="utf-8")
    assert run(["conformance", "verify", str(file)]) == code
    found = capsys.readouterr()
    assert words in found.out + found.err
    assert (f"must-pass cases without a result: 1: {CASE}" in found.out) == (code == 1)
