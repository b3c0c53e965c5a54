"""Does the engine turn what happens in a case into the right result, and select what was asked?"""

import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from anychip import conformance
from anychip.conformance import isolation, side_by_side, statement, terminal
from anychip.conformance.asking import run_case
from anychip.conformance.case import Case, CheckFailedError, Context, check, check_equal_bits
from anychip.conformance.chapters import collectives
from anychip.conformance.page import to_html
from anychip.conformance.report import Report, Result
from anychip.conformance.runner import run_plan
from anychip.contract import MemoryStats, OperatorTable, UnsupportedError
from anychip.dispatch import selection
from tests.meta.honest import CountingMemory, HonestBackend, make_table, reference_rows


@pytest.fixture(autouse=True)
def selection_is_restored() -> Iterator[None]:
    before = selection.current
    yield
    selection.current = before


CHAPTERS = ("random", "operators", "gradients", "optimizer")


def backend(**parts: object) -> HonestBackend:
    made: HonestBackend = type(
        "Honest", (HonestBackend,), {"operators": make_table(ROWS), **parts}
    )()
    return made


ROWS = reference_rows()


def fail(error: Exception) -> Callable[[Context], None]:
    def run(context: Context) -> None:
        context.call = "f(x)"
        raise error

    return run


def half(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> Any:
    raise AssertionError("its limits refuse every call")


def test_run_of_a_selection_finds_a_row_that_fits_no_operator() -> None:
    table = make_table(ROWS)
    table.forward("soft_max")(ROWS["softmax", "forward"])
    report = conformance.run(backend(operators=table), select="operators/rms_norm/fp32/4x8")
    assert {r.case: r.outcome for r in report.results} == {
        "operators/rms_norm/fp32/4x8": "passed",
        "device/rows": "failed",
    }
    assert "did you mean 'softmax'?" in report.failures[0].reason


def test_report_says_of_every_row_what_it_served_and_refused_and_why() -> None:
    table = OperatorTable()
    table.forward("rms_norm", limits={"hidden": range(1 << 20, 1 << 21)})(half)
    table.forward("rms_norm", dtypes={torch.bfloat16})(half)
    table.forward("gelu")(ROWS["gelu", "forward"])
    report = conformance.run(backend(operators=table), select="operators/rms_norm/fp32/4x8")
    assert report.passed
    text, page = show(report), to_html(report)
    known = {(r["operator"], r["kind"]): r for r in report.to_json()["provenance"]["operators"]}
    assert set(known) == {("rms_norm", "native"), ("rms_norm", "reference")}
    assert known["rms_norm", "native"]["calls"] == 0
    calls = known["rms_norm", "reference"]["calls"]
    reasons = {"hidden must be in 1048576 to 2097151": calls, "x is torch.float32": calls}
    assert dict(report.refusals(known["rms_norm", "native"])) == reasons
    for reason in reasons:
        assert f"refused {calls}: {reason}" in text
        assert f"refused {calls}: {reason}" in page
    assert "served no call: rms_norm forward of honest" in text


def show(report: Report) -> str:
    """The end of a run, as a person sees it."""
    console = Console(file=io.StringIO(), width=400)
    terminal.print_summary(report, console, shown=set())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(("error", "outcome", "words"), [
    (CheckFailedError("1 expected, got 2"), "failed", "1 expected, got 2"),
    (ZeroDivisionError("division"), "failed", "ZeroDivisionError: division"),
    (UnsupportedError("no capability 'streams'"), "unsupported", "streams is not declared"),
    (UnsupportedError("no capability 'memory_stats'"), "failed", "memory_stats"),
    (UnsupportedError("not today"), "failed", "not today"),
])  # fmt: skip
def test_exception_of_a_case_is_its_outcome(error: Exception, outcome: str, words: str) -> None:
    result = run_case(Case(id="device/x", run=fail(error)), backend(), "quick")
    assert result.outcome == outcome
    assert words in result.reason
    assert result.call == "f(x)"


@pytest.mark.parametrize("is_wrong", [False, True])
def test_backend_that_cannot_say_what_served_a_call_fails_and_a_run_goes_on(is_wrong: bool) -> None:
    def run(context: Context) -> None:
        context.served_by = lambda: str(1 / 0)
        check(not is_wrong, "wrong")

    result = run_case(Case(id="device/x", run=run), backend(), "quick")
    assert result.outcome == "failed"
    assert ("wrong" if is_wrong else "ZeroDivisionError") in result.reason


def test_unexpected_exception_names_the_line_that_raised_it() -> None:
    case = Case(id="device/x", run=fail(ZeroDivisionError("division")))
    assert "test_runner.py" in run_case(case, backend(), "quick").reason


def test_case_of_an_undeclared_capability_is_not_run() -> None:
    case = Case(id="device/x", run=fail(AssertionError("it ran")), capability="streams")
    assert run_case(case, backend(), "quick").outcome == "unsupported"


def test_case_of_more_devices_than_there_are_is_not_run_and_no_proof() -> None:
    """Ranks that share devices are asked on one, and others are not."""
    chip = backend(ranks_share_devices=False, device_count=lambda self: 1)
    (two,) = [c for c in collectives.cases(Context(chip)) if c.id == "collectives/2/large"]
    assert two.devices == 2
    result = run_case(two, chip, "quick")
    assert (result.outcome, result.reason) == ("unsupported", "needs 2 devices, and here is 1")
    report = conformance.run(chip, select=two.id)
    assert report.passed
    found = statement.verify(report.to_json())
    assert any("no capability excuses them" in why for why in found.objections), found
    assert {c.devices for c in collectives.cases(Context(backend()))} == {1}


def test_case_starts_from_one_random_state() -> None:
    drawn = []
    case = Case(id="random/x", run=lambda _: drawn.append(torch.rand(3)))
    for _ in range(2):
        run_case(case, backend(), "quick")
    assert torch.equal(*drawn)


def test_what_cases_share_starts_once_and_before_the_first_case() -> None:
    seen: list[str] = []

    def begin() -> None:
        seen.append("start")

    plan = conformance.plan(conformance.activate(backend()), chapters=["random"])
    cases = [
        Case(id="random/a", run=lambda _: seen.append("a")),
        *(Case(id=f"random/{x}", run=lambda _: seen.append("b"), start=begin) for x in "bc"),
    ]
    run_plan(replace(plan, cases=tuple(cases)))
    assert seen == ["start", "a", "b", "b"]


@pytest.mark.parametrize(("options", "words"), [
    ({"chapters": ["devices"]}, "did you mean 'device'"),
    ({"chapters": ["serving"]}, "this version has device, memory"),
    ({"select": "no_such_word"}, "no case is selected"),
    ({"select": "operators/rms_norm", "chapters": ["device"]}, "is in chapter operators"),
    ({"select": "softmax and vocabulary"}, "at level full"),
])  # fmt: skip
def test_run_without_a_case_is_wrong_use(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=r"chapter|case") as error:
        conformance.run(backend(), **options)  # type: ignore[arg-type]
    assert words in str(error.value)


def test_full_level_contains_quick() -> None:
    active = conformance.activate(backend())
    quick, full = (
        {case.id for case in conformance.plan(active, level=level).cases}
        for level in conformance.LEVELS
    )
    assert quick < full


def test_ids_are_words_of_an_expression() -> None:
    word = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:+-/")
    plan = conformance.plan(conformance.activate(backend()), level="full")
    assert all(set(case.id) <= word for case in plan.cases)


def expectations(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "list.toml"
    file.write_text(text)
    return file


def test_run_with_lists_gives_each_outcome(tmp_path: Path) -> None:
    file = expectations(
        tmp_path,
        """
        [[unsupported]]
        case = "device/compile_backend"
        reason = "no compiler"
        capability = "graphs"
        [[expected_failure]]
        case = "device/index/device.negative"
        reason = "bug"
        until = "2999-01-01"
        [[expected_failure]]
        case = "device/index/device.text"
        reason = "segfault"
        until = "2999-01-01"
        crash = true
        [[expected_failure]]
        case = "device/probe"
        reason = "repaired long ago"
        until = "2999-01-01"
        [[unsupported]]
        case = "device/wings"
        reason = "none"
        capability = "graphs"
        """,
    )
    wrong = backend(
        compile_backend="nobody",
        check_index=lambda self, index: self.current_device() if index is None else index,
    )
    report = conformance.run(
        wrong, level="full", chapters=["device"],
        select="compile_backend or probe or index/device. or device/identity", expectations=file,
    )  # fmt: skip
    outcomes = {result.case: result.outcome for result in report.results}
    assert outcomes["device/compile_backend"] == "unsupported"
    assert outcomes["device/index/device.negative"] == "expected failure"
    assert outcomes["device/index/device.text"] == "expected failure"
    assert outcomes["device/probe"] == "unexpected pass"
    assert outcomes["device/wings"] == "stale entry"
    assert outcomes["device/index/device.beyond"] == "failed"
    assert outcomes["device/identity"] == "passed"
    assert not report.passed
    assert sum(report.counts().values()) == len(report.results)


def test_entry_of_another_chapter_or_level_is_not_stale(tmp_path: Path) -> None:
    text = (
        '[[expected_failure]]\ncase = "operators/softmax/fp32/vocabulary"\n'
        'reason = "r"\nuntil = "2999-01-01"\n'
    )
    report = conformance.run(
        backend(), chapters=["device"], select="identity", expectations=expectations(tmp_path, text)
    )
    assert report.passed


@pytest.mark.parametrize(("method", "case", "call"), [
    ("allocate", "memory/allocate/negative", "backend.memory.allocate(-1) (memory.py:"),
    ("stats", "memory/stats/follow", "memory.allocate(nbytes), nbytes = "),
], ids=["allocate", "stats"])  # fmt: skip
def test_failure_of_a_history_of_calls_names_the_last(method: str, case: str, call: str) -> None:
    def changed(self: Any, *args: Any) -> Any:
        if method == "stats":
            return MemoryStats(7, 1 << 20, 7)
        return torch.UntypedStorage(max(args[0], 0))

    memory = type("Memory", (CountingMemory,), {method: changed})
    report = conformance.run(backend(memory=property(memory)), chapters=["memory"], select=case)
    (failed,) = report.failures
    assert (failed.call or "").startswith(call)
    assert f"  call: {call}" in report.explain(failed)


def test_long_lists_are_cut_short_for_people_and_kept_for_machines() -> None:
    reason = f"sizes {list(range(100))} and (1, 2, 3), f(x, (), 5)"
    short = "sizes [0, 1, 2, 3, 4, 5, ... 93 more ..., 99] and (1, 2, 3), f(x, (), 5)"
    report = conformance.run(backend(), select="device/identity")
    result = Result(case="a/b", outcome="failed", reason=reason, call=f"g({reason})")
    said = report.explain(result)
    assert f"call: g({short})" in said
    assert f"\n  {short}\n" in said
    assert result.to_json()["reason"] == reason


def test_json_has_the_documented_keys_and_comes_back() -> None:
    report = conformance.run(backend(), select="rms_norm and 3x17 or device/identity")
    document = json.loads(json.dumps(report.to_json()))
    assert document["schema"] == 4
    assert document["passed"] is True
    assert set(document) == {
        "schema", "passed", "identity", "level", "chapters", "select", "seed", "isolated",
        "started", "seconds", "counts", "must_pass", "next_to_fix", "references", "operators",
        "coverage", "results", "provenance", "details", "digest",
    }  # fmt: skip
    assert document["identity"]["backend"] == "honest"
    rows = [json.loads(json.dumps(result.to_json())) for result in report.results]
    row = next(r for r in rows if r["case"] == "operators/rms_norm/fp32/3x17")
    assert row["served_by"].startswith("honest: ")
    assert {"median", "p999", "max", "rms", "quantile", "where"} <= set(row["errors"][0])
    assert [Result.from_json(r).to_json() for r in rows] == rows


@pytest.mark.grid
def test_two_processes_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "MANY", 2)
    asked = Counter[str]()
    isolated = isolation.run_isolated

    def counted(case: Case) -> Case:
        asked[case.chapter] += 1
        return case

    def spy(plan: conformance.SuitePlan, cases: Iterator[Case], *rest: Any) -> Iterator[Result]:
        return isolated(plan, map(counted, cases), *rest)

    monkeypatch.setattr(isolation, "run_isolated", spy)
    plan = conformance.plan(
        conformance.activate("cpu"),
        select="/gelu/fp32/17 or /gelu/fp32/1025 or random/philox or optimizer/sgd/plain",
        chapters=CHAPTERS,
    )
    reports = [run_plan(plan, jobs=jobs) for jobs in (1, 2)]
    assert asked["optimizer"] == 1  # what comes last is taken first
    assert asked.keys() <= {"operators", "gradients", "random", "optimizer"}
    one, two = ([(r.case, r.outcome) for r in report.results] for report in reports)
    assert one == two
    assert {case.split("/")[0] for case, _ in one} == set(CHAPTERS)
    assert reports[0].provenance == reports[1].provenance


def test_object_that_is_not_installed_cannot_be_isolated() -> None:
    with pytest.raises(ValueError, match="handed over as an object"):
        conformance.run(backend(), select="device/identity", isolate=True)


def test_equal_bits_tells_signed_zeros_and_sees_equal_nans() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    check_equal_bits("x", nan, nan.clone())
    with pytest.raises(CheckFailedError, match=r"first at \[1\]"):
        check_equal_bits("x", torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]))
