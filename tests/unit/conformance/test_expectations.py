"""Are the lists read strictly, and do they turn results into the outcomes that they should?"""

import datetime
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from anychip.conformance import expectations
from anychip.conformance.expectations import Entry, Expectations, parse
from anychip.conformance.report import Outcome, Result
from anychip.conformance.runner import judge
from anychip.contract import Backend
from tests.meta.honest import HonestBackend

GOOD = """
[[unsupported]]
case = "random/generator/*"
reason = "no state"
capability = "generator_state"

[[expected_failure]]
case = "operators/gelu/fp32/17.none"
reason = "polynomial"
until = "2030-01-31"

[[expected_failure]]
case = "operators/swiglu/*"
reason = "crashes"
until = "1.10"
crash = true
"""


def test_well_formed_list_is_read() -> None:
    first, second, third = parse(GOOD, "here").entries
    assert (first.kind, first.capability) == ("unsupported", "generator_state")
    assert second.until == datetime.date(2030, 1, 31)
    assert (third.until, third.crash) == ("1.10", True)


def test_date_without_quotes_is_a_date() -> None:
    text = '[[expected_failure]]\ncase = "a"\nreason = "b"\nuntil = 2030-01-31'
    assert parse(text, "here").entries[0].until == datetime.date(2030, 1, 31)


@pytest.mark.parametrize(("text", "words"), [
    ("[[unsupported", "not TOML"), ("[[unsuported]]\ncase = 'a'", "unsuported"),
    ("[unsupported]\ncase = 'a'", "two brackets"),
    ("[[unsupported]]\ncase = 'a'\nreason = 'b'", "capability"),
    ("[[unsupported]]\ncase = 'a'\nreason = 'b'\ncapability = 'c'\nuntil = '1'", "until"),
    ("[[unsupported]]\ncase = 'a'\nreason = ' '\ncapability = 'c'", "reason must be text"),
    ("[[unsupported]]\ncase = 'a'\nreason = 'b'\ncapability = 'c'", "there are streams, mem"),
    ("[[unsupported]]\ncase = 'a'\nreason = 'b'\ncapability = 'memory_stat'",
     "no capability is named 'memory_stat'; did you mean 'memory_stats'?"),
    ("[[expected_failure]]\ncase = 'a'\nreason = 'b'", "until"),
    ("[[expected_failure]]\ncase = 'a'\nreason = 'b'\nuntil = 'soon'", "soon"),
    ("[[expected_failure]]\ncase = 'a'\nreason = 'b'\nuntil = 3", "a date"),
    ("[[expected_failure]]\ncase = 'a'\nreason = 'b'\nuntil = '1'\ncrash = 1", "crash"),
    ("[[expected_failure]]\ncase = 5\nreason = 'b'\nuntil = '1'", "case must be text"),
])  # fmt: skip
def test_malformed_list_is_an_error_that_names_the_place(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"^mylist\.toml") as error:
        parse(text, "mylist.toml")
    assert words in str(error.value)


def test_unsupported_for_want_of_a_declared_capability_is_an_error() -> None:
    text = "[[unsupported]]\ncase = 'a'\nreason = 'b'\ncapability = 'memory_stats'"
    with pytest.raises(ValueError, match="memory_stats"):
        parse(text, "here").check_against(HonestBackend())


def test_list_of_the_backends_package_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "anychip_listed"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "backend.py").write_text("")
    (package / "expectations.toml").write_text(GOOD)
    monkeypatch.syspath_prepend(str(tmp_path))
    backend: Backend = type("Listed", (HonestBackend,), {"__module__": "anychip_listed.backend"})()
    assert len(expectations.load(backend).entries) == 3
    assert expectations.load(HonestBackend()).entries == ()
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as of a script or a notebook
    backend = type("Made", (HonestBackend,), {"__module__": "__main__"})()
    assert expectations.load(backend).entries == ()


@pytest.mark.parametrize(("until", "version", "today", "overdue"), [
    (datetime.date(2026, 5, 1), "1.0", datetime.date(2026, 5, 1), False),
    (datetime.date(2026, 5, 1), "1.0", datetime.date(2026, 5, 2), True),
    ("1.10", "1.9.3", datetime.date(2026, 5, 1), False),
    ("1.10", "1.10.0", datetime.date(2026, 5, 1), True),
    ("1.10", "2.0rc1", datetime.date(2026, 5, 1), True),
    ("1.10", "not installed", datetime.date(2026, 5, 1), False),
])  # fmt: skip
def test_entry_is_overdue_after_its_date_and_at_its_version(
    until: datetime.date | str, version: str, today: datetime.date, overdue: bool
) -> None:
    entry = Entry(kind="expected_failure", case="a", reason="b", until=until)
    assert (entry.expired(version, today) is not None) == overdue


UNSUPPORTED = Entry(kind="unsupported", case="x/*", reason="cannot", capability="wings")
LATER = Entry(kind="expected_failure", case="x/*", reason="bug 7", until=datetime.date(2999, 1, 1))
OVERDUE = Entry(
    kind="expected_failure", case="x/*", reason="bug 7", until=datetime.date(2001, 1, 1)
)


@pytest.mark.parametrize(
    ("entry", "outcome", "crashed", "want"),
    [
        (None, "passed", False, "passed"), (None, "failed", False, "failed"),
        (None, "failed", True, "failed"), (None, "unsupported", False, "unsupported"),
        (UNSUPPORTED, "passed", False, "unexpected pass"),
        (UNSUPPORTED, "failed", False, "unsupported"),
        (UNSUPPORTED, "unsupported", False, "unsupported"), (UNSUPPORTED, "failed", True, "failed"),
        (LATER, "passed", False, "unexpected pass"), (LATER, "failed", False, "expected failure"),
        (LATER, "failed", True, "expected failure"),
        (LATER, "unsupported", False, "unexpected pass"), (OVERDUE, "failed", False, "failed"),
    ],
)  # fmt: skip
def test_result_is_judged_by_its_entry(
    entry: Entry | None, outcome: Outcome, crashed: bool, want: Outcome
) -> None:
    result = Result(case="x/y", outcome=outcome, reason="it broke", crashed=crashed)
    assert judge(result, entry, "1.0").outcome == want


def test_glob_that_partly_passes_is_to_be_narrowed_and_one_that_passes_taken_out() -> None:
    found = {"x/a": "failed", "x/b": "passed", "x/c": "passed", "y/a": "passed", "y/b": "passed"}
    lists = Expectations([LATER, replace(LATER, case="y/*")])
    results = [
        judge(Result(case=case, outcome=outcome), lists.find(case), "1.0")
        for case, outcome in found.items()
    ]
    reasons = [r.reason for r in expectations.advised(results, lists)]
    start = "listed as expected_failure (bug 7), and does not fail; "
    narrow = f"{start}'x/*': 2 of 3 pass: narrow it to those that fail"
    out = f"{start}'y/*': take it out of the list"
    assert reasons == ["bug 7", narrow, narrow, out, out]


def test_first_list_makes_the_run_pass_and_keeps_what_was_listed() -> None:
    results = [
        Result(case="a/x", outcome="failed", reason="2 ULP\nat [3]"),
        Result(case="a/y", outcome="failed", crashed=True), Result(case="a/z", outcome="passed"),
        Result(case="device/rows", outcome="failed", reason="a row of no operator"),
        Result(case="x/y", outcome="expected failure"), Result(case="z/y", outcome="unsupported"),
    ]  # fmt: skip
    stated = replace(UNSUPPORTED, case="z/*", capability="graphs")
    text = expectations.first_list(
        results, Expectations([LATER, stated]), datetime.date(2998, 1, 1)
    )
    made, soon = parse(text, "here"), datetime.date(2998, 4, 1)
    assert {e.case: (e.reason, e.until, e.crash) for e in made.entries} == {
        "a/x": ("2 ULP", soon, False), "a/y": ("failed", soon, True),
        "x/y": ("bug 7", LATER.until, False), "z/y": ("cannot", None, False),
    }  # fmt: skip
    judged = [judge(replace(r, outcome="failed"), made.find(r.case), "1.0") for r in results]
    assert [r.ok for r in judged] == [True, True, False, False, True, True]


def test_first_entry_that_matches_counts_and_the_unused_ones_are_stale() -> None:
    lists = Expectations([UNSUPPORTED, LATER, Entry(kind="unsupported", case="z?", reason="r")])
    assert lists.find("x/y") is UNSUPPORTED
    assert lists.find("other") is None
    assert [entry.case for entry in lists.stale(["x/y", "z"])] == ["z?"]
