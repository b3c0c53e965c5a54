"""Do the forms of a report say what the run found: JSON by its schema, JUnit, the next to fix?

The reports come from runs of small selections: one of a good backend, one of a wrong one.
"""

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
import torch
from rich.console import Console

from anychip import conformance
from anychip.conformance import archive, priorities, terminal
from anychip.conformance.case import Curve
from anychip.conformance.covering import Coverage
from anychip.conformance.hashes import distribution_hash, plugin_hash, suite_hash
from anychip.conformance.junit import to_junit
from anychip.conformance.page import Cell, coverage_groups, matrix, to_html
from anychip.conformance.report import Report, Result, to_text
from anychip.dispatch import selection
from anychip.operators import gelu
from tests.meta.honest import HonestBackend, make_table, reference_rows

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads((ROOT / "docs" / "report.schema.json").read_text(encoding="utf-8"))
VALUES, GRADIENTS = "operators/gelu/fp32/1025.none", "gradients/gelu/fp32/1025.none"
WAITS = "device/synchronize"
SELECT = f"{VALUES} or {GRADIENTS} or {WAITS} or device/identity or streams/order"


@pytest.fixture(scope="module", autouse=True)
def selection_is_restored() -> Iterator[None]:
    before = selection.current
    yield
    selection.current = before


def off_by_a_little(x: torch.Tensor, *, approximate: str) -> torch.Tensor:
    y: torch.Tensor = gelu.forward(x, approximate=approximate)
    return y * 1.001


def run(rows: dict[tuple[str, str], Callable[..., Any]], **parts: Any) -> Report:
    kind = type("Some", (HonestBackend,), {"operators": make_table(rows), **parts})
    return conformance.run(kind(), select=SELECT)


@pytest.fixture(scope="module")
def good() -> Report:
    return run(reference_rows())


@pytest.fixture(scope="module")
def wrong() -> Report:
    def refusing(self: Any, index: int | None = None) -> None:
        raise RuntimeError("no driver: \x1b[31mred\x00 <&>")

    return run({**reference_rows(), ("gelu", "forward"): off_by_a_little}, synchronize=refusing)


def document_of(report: Report) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(to_text(report.to_json()))
    return found


@pytest.mark.parametrize("name", ["good", "wrong"])
def test_json_is_valid_by_its_schema_and_comes_back(
    name: str, request: pytest.FixtureRequest
) -> None:
    report: Report = request.getfixturevalue(name)
    document = document_of(report)
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(document, SCHEMA)
    assert Report.from_json(document).to_json() == document


def test_schema_refuses_what_the_documentation_does_not_name(good: Report) -> None:
    document = document_of(good)
    for change in (
        {"schema": 5}, {"extra": 1}, {"counts": {**document["counts"], "skipped": 1}},
        {"results": [{**document["results"][0], "outcome": "skipped"}]},
    ):  # fmt: skip
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**document, **change}, SCHEMA)


def test_report_comes_back_whole_with_its_details_and_says_when_they_are_others(
    good: Report, wrong: Report, tmp_path: Path
) -> None:
    file, others = tmp_path / "report.json", tmp_path / "other.json"
    archive.write_report(wrong, file)
    archive.write_report(good, others)
    document = archive.read_document(file)
    jsonschema.validate(document, SCHEMA)
    found = archive.read_report(file)
    assert [r.to_json() for r in found.results] == [r.to_json() for r in wrong.results]
    brief = {row["case"]: row for row in document["results"]}
    (failed,) = (r for r in wrong.results if r.case == VALUES)
    assert brief[VALUES] == {**failed.to_json(), "error": "inf"}
    (passed,) = (r for r in wrong.results if r.case == GRADIENTS)
    error = float(f"{passed.measurements[0].of_limit:.4g}")
    assert brief[GRADIENTS].keys() == {"case", "outcome", "seconds", "error"}
    assert brief[GRADIENTS]["error"] == error > 0.0
    of_gelu = document["operators"]["gelu"]["fp32"]
    assert of_gelu["forward"] == {"cases": 1, "failed": 1, "error": "inf"}
    assert of_gelu["backward"] == {"cases": 1, "failed": 0, "error": error}
    beside = tmp_path / document["details"]["file"]
    assert archive.unlike_details(document, tmp_path) is None
    beside.write_bytes((tmp_path / "other.json.details.gz").read_bytes())
    assert "is not the file that was written with it" in (
        archive.unlike_details(document, tmp_path) or ""
    )
    with pytest.raises(ValueError, match="is not the file"):
        archive.read_report(file)
    beside.unlink()
    assert archive.unlike_details(document, tmp_path) is None
    assert Report.from_json(document).counts() == wrong.counts()
    with pytest.raises(FileNotFoundError):
        archive.read_report(file)


def test_curve_with_numbers_that_are_not_finite_comes_back() -> None:
    curve = Curve((1.0, float("inf"), float("nan")), (1.0,) * 3, (0.1,) * 3, float("nan"), 1.4)
    row = json.loads(json.dumps(Result(case="a/b", outcome="failed", curve=curve).to_json()))
    assert row["curve"]["losses"] == [1.0, "inf", "nan"]
    assert row["curve"]["deviation"] == "nan"
    assert Result.from_json(row).to_json() == row


def test_histogram_counts_every_element_and_knows_the_bound(good: Report, wrong: Report) -> None:
    for report, outside in ((good, False), (wrong, True)):
        (result,) = (r for r in report.results if r.case == VALUES)
        (measured,) = result.measurements
        assert sum(measured.histogram) == measured.count == 1025
        assert (len(measured.histogram) == 21) == outside
        last = max(i for i, count in enumerate(measured.histogram) if count)
        assert outside or last < 20 * measured.max <= last + 1


def test_hashes_tell_two_versions_of_a_file_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "acme_chip-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-chip\nVersion: 1.0\n")
    (info / "RECORD").write_text(
        "acme_chip.py,,\n__pycache__/acme_chip.pyc,,\nacme_chip-1.0.dist-info/RECORD,,\n"
        "acme_chip-1.0.dist-info/INSTALLER,,\n../../bin/acme,,\ngone.py,,\n"
    )
    (tmp_path / "__pycache__").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for module, noise in (("x = 1", "a"), ("x = 1", "b"), ("x = 2", "b")):
        (tmp_path / "acme_chip.py").write_text(module)
        (tmp_path / "__pycache__" / "acme_chip.pyc").write_text(noise)
        (info / "INSTALLER").write_text(noise)
        found.append(distribution_hash("acme-chip"))
    assert found[0] == found[1] != found[2]
    assert len(suite_hash()) == 64
    assert plugin_hash(HonestBackend()) is None


# JUnit


def test_junit_has_a_testcase_per_case_and_says_why(good: Report, wrong: Report) -> None:
    suite = ElementTree.fromstring(to_junit(wrong)).find("testsuite")
    assert suite is not None
    cases = {f"{c.get('classname')}/{c.get('name')}": c for c in suite.iter("testcase")}
    assert len(cases) == len(wrong.results) == int(suite.attrib["tests"]) == 5
    assert (suite.get("failures"), suite.get("skipped"), suite.get("errors")) == ("2", "1", "0")
    failure = cases["anychip.operators.gelu.fp32/1025.none"].find("failure")
    assert failure is not None
    assert failure.text is not None
    assert "outside the bound" in failure.attrib["message"]
    assert f'-k "{VALUES}"' in failure.text
    skipped = cases["anychip.streams/order"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "unsupported: streams is not declared"
    assert not list(cases["anychip.device/identity"])
    assert 'failures="0"' in to_junit(good)


def test_junit_and_page_survive_control_characters(wrong: Report) -> None:
    text = to_junit(wrong)
    assert "\x00" not in text
    assert "\x1b" not in text
    assert "no driver: \ufffd[31mred\ufffd &lt;&amp;&gt;" in text
    page = to_html(wrong)
    assert "no driver: \ufffd[31mred\ufffd &lt;&amp;&gt;" in page
    assert not {"\x00", "\x1b"} & set(page)


# What to fix first


def test_calls_of_a_step_are_those_of_the_decoder() -> None:
    calls = priorities.calls_per_step("GPT")
    layers = priorities.LAYERS
    assert calls["layer_norm"] == 2 * (layers + 1)
    assert calls["add_layer_norm"] == 2 * layers
    assert calls["attention"] == calls["gelu"] == 2 * layers
    assert calls["linear"] == 2 * (4 * layers + 1)
    assert calls["cross_entropy"] == 2
    assert calls["adamw"] == 1
    assert priorities.calls_per_step("Llama")["add_rms_norm"] == 2 * layers


def test_next_to_fix_is_what_a_step_calls_most() -> None:
    failed = [
        "device/probe", "operators/hadamard/fp32/8", "operators/gelu/fp32/17.none",
        "gradients/linear/bf16/3x5", "optimizer/adamw/bias", "gradients/gelu/fp32/17.none",
    ]  # fmt: skip
    results = [Result(case=case, outcome="failed") for case in failed]
    results.append(Result(case="operators/rms_norm/fp32/4x8", outcome="expected failure"))
    found = priorities.next_to_fix(results, 9)
    assert [item.subject for item in found] == [
        "linear", "gelu", "adamw", "device/probe", "hadamard",
    ]  # fmt: skip
    gelu_cases = ("operators/gelu/fp32/17.none", "gradients/gelu/fp32/17.none")
    assert found[1] == ("gelu", 2 * priorities.LAYERS, "GPT", gelu_cases)
    assert found[3].model == ""
    assert len(priorities.next_to_fix(results)) == 3


def test_failed_run_names_what_to_fix_in_every_form(wrong: Report) -> None:
    first = wrong.next_to_fix[0]
    assert (first.subject, first.cases) == ("gelu", (VALUES,))
    assert document_of(wrong)["next_to_fix"][0]["calls"] == first.calls > 0
    assert "Next to fix" in to_html(wrong)


# The page


def test_matrix_has_the_worst_of_values_and_gradients(good: Report, wrong: Report) -> None:
    (row,) = matrix(good)
    largest = max(m.max for r in good.results for m in r.measurements)
    assert (row.name, row.cells["fp32"].status) == ("gelu", "passed")
    assert row.cells["fp32"].worst == largest
    assert row.cells["bf16"] == Cell("none")
    assert row.kinds == ("reference",)
    (row,) = matrix(wrong)
    assert row.cells["fp32"].status == "failed"
    assert row.cells["fp32"].worst is not None
    assert row.cells["fp32"].worst > 1.0


def test_page_shows_each_failure_with_its_command(wrong: Report) -> None:
    page = to_html(wrong)
    assert page.count('<details class="failure"') == len(wrong.failures) == 2
    for result in wrong.failures:
        assert f"-k &#34;{result.case}&#34;" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page


def test_terminal_names_the_next_to_fix_and_its_weight(wrong: Report) -> None:
    console = Console(file=io.StringIO(), width=200)
    terminal.print_summary(wrong, console, shown=set())
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    calls = 2 * priorities.LAYERS
    assert (
        f"next to fix, 1: gelu ({calls} calls in a step of GPT, 1 failed), first {VALUES}" in text
    )
    assert f"next to fix, 2: {WAITS} (1 failed), first {WAITS}" in text


# Coverage


def covering(operator: str, *asked: float, strength: int = 2) -> Coverage:
    """Three factors; parts asked of the pairs (b, a), (c, a), (c, b)."""
    ba, ca, cb = asked
    return Coverage(
        operator=operator, factors=("a", "b<", "c"), levels=(2, 3, 4), rows=17, strength=strength,
        asked=((1.0, ba, ca), (ba, 1.0, cb), (ca, cb, 1.0)),
    )  # fmt: skip


COVERAGE = (
    covering("gelu", 1.0, 1.0, 1.0), covering("softmax", 1.0, 0.25, 0.0),
    covering("linear", 1.0, 0.9999, 1.0), covering("swiglu", 1.0, 1.0, 1.0, strength=3),
)  # fmt: skip


def test_coverage_comes_back_from_json_and_fits_the_schema(good: Report) -> None:
    document = document_of(replace(good, coverage=COVERAGE))
    jsonschema.validate(document, SCHEMA)
    assert Report.from_json(document).coverage == COVERAGE


@pytest.mark.parametrize("change", [
    {"levels": (2, 3)}, {"asked": ((1.0,),)}, {"asked": ((1.1, 1.0, 1.0),) * 3},
    {"asked": ((float("nan"), 1.0, 1.0),) * 3},
], ids=["levels", "square", "above", "nan"])  # fmt: skip
def test_coverage_of_other_factors_or_of_no_part_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="coverage of gelu"):
        replace(COVERAGE[0], **change)


def test_page_draws_coverage_and_what_lacks_pairs_first(good: Report) -> None:
    assert 'id="coverage"' not in to_html(good)
    assert "#coverage" not in to_html(good)
    groups = coverage_groups(replace(good, coverage=COVERAGE))
    assert [(g.title, [name for name, _, _ in g.operators]) for g in groups] == [
        ("Pairs that no call has", ["softmax", "linear"]), ("Every pair, strength 3", ["swiglu"]),
        ("Every pair, strength 2", ["gelu"]),
    ]  # fmt: skip
    softmax, linear = (words for _, _, words in groups[0].operators)
    # 6 pairs of a and b, a quarter of 8 of a and c, none of 12 of b and c.
    assert "30.7 % of all pairs of levels; least: b< with c 0 %, a with c 25 %" in softmax
    assert "99.9 % of all pairs of levels; least: a with c 99.9 %" in linear
    page = to_html(replace(good, coverage=COVERAGE))
    assert page.count('<svg class="heat"') == 4
    assert page.count('<rect class="asked all"') == 6 + 4 + 5 + 6
    assert page.count('<rect class="asked none"') == page.count('<rect class="asked some"') == 1
    assert "<title>b&lt; with c: 0 %</title>" in page
    assert 'aria-label="gelu: 3 factors, 17 calls, strength 2: 100 % of all pairs' in page
