"""Do 37 consecutive commits ask every case of a grid, and every one what has failed before?"""

import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import anychip
from anychip.conformance import expression
from anychip.conformance.case import Context
from anychip.conformance.chapters import all_cases
from anychip.dispatch.operator import registered
from anychip.operators import all_specs
from tests import budgets, slices

pytest_plugins = ["pytester"]

CASES = [f"tests/unit/test_grid.py::test_case[{number}]" for number in range(2000)]
GRID = """
import pytest

@pytest.mark.grid
@pytest.mark.parametrize("number", range(40))
def test_case(number):
    assert number != 7

def test_alone():
    pass
"""


def git(folder: Path, *words: str) -> None:
    names = {
        f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    environment = {**os.environ, **names, "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run(["git", "-C", folder, *words], check=True, env=environment, capture_output=True)


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Five commits on main, of which the last merges a branch of three."""
    folder = tmp_path / "history"
    folder.mkdir()
    git(folder, "init", "-b", "main")
    for branch, count in (("main", 2), ("side", 3), ("main", 2)):
        git(folder, "symbolic-ref", "HEAD", f"refs/heads/{branch}")
        if branch == "side":
            git(folder, "reset", "--soft", "main")
        for _ in range(count):
            git(folder, "commit", "--allow-empty", "-m", "one more")
    git(folder, "merge", "--no-ff", "-m", "merge", "side")
    return folder


def test_slices_are_disjoint_and_together_all_cases_in_about_equal_parts() -> None:
    asked = [slices.Slice(number=n, because="") for n in range(slices.SLICES)]
    assert Counter(case for each in asked for case in CASES if each.takes(case)) == Counter(CASES)
    sizes = [sum(map(each.takes, CASES)) for each in asked]
    # 100 expected in each; six standard deviations of a binomial distribution are 59.
    assert all(abs(size - 100) < 59 for size in sizes), sizes
    assert all(slices.Slice(number=None, because="").takes(case) for case in CASES)


def test_slice_of_a_case_is_the_same_in_every_process_and_version() -> None:
    assert [slices.slice_of(case) for case in CASES[:6]] == [25, 8, 17, 28, 29, 32]


def test_commits_are_counted_along_first_parents(history: Path) -> None:
    assert slices.chosen({}, history).number == 5
    git(history, "commit", "--allow-empty", "-m", "one more")
    chosen = slices.chosen({}, history)
    assert (chosen.number, chosen.because) == (6, "commit 6")


def test_where_no_commits_can_be_counted_the_variable_must_be_set(
    history: Path, tmp_path: Path
) -> None:
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--depth", "1", f"file://{history}", str(shallow))
    inside = history / "unpacked"
    inside.mkdir()
    for folder, words in ((shallow, "shallow"), (inside, "no git history"), (Path("/"), "no git")):
        with pytest.raises(slices.SliceError, match=f"{words}.*ANYCHIP_SLICE"):
            slices.chosen({}, folder)
        assert slices.chosen({"ANYCHIP_SLICE": "3"}, folder).number == 3
        assert slices.chosen({"ANYCHIP_SLICE": "all"}, folder).number is None


@pytest.mark.parametrize("value", ["", "37", "-1", "ALL", "x"])
def test_malformed_variable_is_refused(value: str) -> None:
    with pytest.raises(slices.SliceError, match=r"expected 0 to 36 or 'all', got"):
        slices.chosen({"ANYCHIP_SLICE": value})


def test_case_that_fails_is_asked_by_every_slice_from_then_on(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = tmp_path / "failed_before.txt"
    record.write_text("# for people\n")
    monkeypatch.setattr(slices, "FAILED_BEFORE", record)
    pytester.makepyfile(test_grid=GRID)
    pytester.makeini("[pytest]\npythonpath = .\nmarkers = grid")
    bad = "test_grid.py::test_case[7]"

    def run(number: int) -> dict[str, int]:
        monkeypatch.setenv(slices.VARIABLE, str(number))
        return pytester.runpytest_inprocess("-p", "tests.conftest", "--slice").parseoutcomes()

    ids = [f"test_grid.py::test_case[{number}]" for number in range(40)]
    own = slices.slice_of(bad)
    sizes = Counter(map(slices.slice_of, ids))
    assert run(own) == {
        "failed": 1, "passed": sizes[own], "deselected": 40 - sizes[own]
    }  # fmt: skip
    assert slices.listed(record) == [bad]
    assert run((own + 1) % slices.SLICES)["failed"] == 1
    assert record.read_text() == f"# for people\n{bad}\n"
    record.write_text("test_grid.py::test_case[renamed]\n")
    monkeypatch.setenv(slices.VARIABLE, "0")
    done = pytester.runpytest_inprocess("-p", "tests.conftest", "--slice")
    assert "list what is no case" in done.stderr.str()


def test_cases_of_one_thing_share_its_slice(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_grid=GRID.replace("mark.grid", "mark.grid('a job')"))
    pytester.makeini("[pytest]\npythonpath = .\nmarkers = grid(of)")
    monkeypatch.setattr(slices, "remember", lambda cases: [])
    own = slices.slice_of("a job")
    for number, want in ((own, {"failed": 1, "passed": 40}), (own + 1, {"deselected": 40})):
        monkeypatch.setenv(slices.VARIABLE, str(number % slices.SLICES))
        found = pytester.runpytest_inprocess("-p", "tests.conftest", "--slice").parseoutcomes()
        assert found == {"passed": 1, **want}


def test_slices_ask_the_suite_about_every_operator_and_always_everything_else() -> None:
    every = all_cases(Context(anychip.use("cpu"), "quick", 0))
    foreign = registered().keys() - {spec.name for spec in all_specs()}  # of other tests
    cases = [case for case in every if foreign.isdisjoint(case.id.split("/"))]
    taken = Counter[str]()
    for number in range(slices.SLICES):
        asked = slices.Slice(number=number, because="", always={"family/rope"})
        words = slices.suite_words(asked, "family", Path("report.json"))
        assert words[:4] == ["--level", "quick", "--json", "report.json"]
        taken.update(case.id for case in expression.select(cases, words[words.index("-k") + 1]))
    of_operators = {c.id for c in cases if c.chapter in ("operators", "gradients")}
    of_worlds = {c.id for c in cases if c.id.startswith(("collectives/3/", "collectives/4/"))}
    assert of_worlds
    assert all(taken[case] == 1 for case in of_worlds)
    of_chapters = {
        c.id for c in cases if c.id.startswith((*slices.LONG_CHAPTERS, "collectives/2/"))
    }
    assert all(6 <= taken[case] <= 7 for case in of_chapters if "/rope/" not in case)
    sliced = of_operators | of_worlds | of_chapters
    assert all(taken[case.id] == slices.SLICES for case in cases if case.id not in sliced)
    assert set(taken) == {case.id for case in cases}
    assert all(taken[case] == slices.SLICES for case in of_operators if "/rope/" in case)
    assert sum(taken[case] for case in of_operators) < 2.5 * len(of_operators)


def test_six_commits_ask_every_operator_and_long_test_once() -> None:
    every = all_cases(Context(anychip.use("cpu"), "quick", 0))
    taken = Counter[str]()
    for number in range(7, 13):
        asked = slices.Slice(number=number, because="")
        words = slices.part_of_operators(asked)
        taken.update(case.id for case in expression.select(every, words[-1]))
        taken.update(test for test in CASES if asked.takes(test, parts=slices.PARTS))
    own = tuple(
        f"{part}/{spec.name}/" for spec in all_specs() for part in ("operators", "gradients")
    )
    of_operators = [case.id for case in every if case.id.startswith(own)]
    assert all(taken[case] == 1 for case in [*CASES, *of_operators])
    assert all(taken[case.id] == 6 for case in every if case.chapter in ("memory", "collectives"))


def test_operators_that_failed_are_read_from_the_report(tmp_path: Path) -> None:
    found = {"gradients/rope/fp32/1.none": "failed", "operators/gelu/fp32/1.none": "passed",
             "memory/free": "failed", "operators/lion/fp32/plain": "failed"}  # fmt: skip
    report = tmp_path / "report.json"
    results = [{"case": case, "outcome": outcome} for case, outcome in found.items()]
    report.write_text(json.dumps({"results": results}))
    assert slices.operators_that_failed("npu", report) == ["npu/lion", "npu/rope"]
    assert slices.operators_that_failed("npu", tmp_path / "none.json") == []


def test_every_stage_of_ci_has_a_budget_and_together_they_keep_to_half_an_hour() -> None:
    table = budgets.read()
    text = (slices.ROOT / ".ci" / "run").read_text()
    stages = text.split("stages=(")[1].split(")")[0].split()
    assert set(stages) <= set(table)
    one_after_another, others = (
        sum(table[stage][0] for stage in names.split())
        for names in re.findall(r"run_stages took-\d ([a-z ]+)\n", text)
    )
    beside = [table[stage][0] for stage in text.split("by_turn=(")[1].split(")")[0].split()]
    assert one_after_another + max(*beside, others) <= 30 * 60
    parts = {name: budget for name, (budget, _) in table.items() if "/" in name}
    for stage in {name.partition("/")[0] for name in parts}:
        own = sum(budget for name, budget in parts.items() if name.startswith(f"{stage}/"))
        assert own <= table[stage][0], stage


def test_table_of_times_warns_of_what_is_over_its_budget() -> None:
    budget = budgets.read()["lint"][0]
    lines = budgets.table({"lint": budget + 1.0, "native": 1.0}).splitlines()
    assert ["over its budget" in line for line in lines] == [False, True, False, False]
    assert lines[-1].split()[:3] == ["all", str(budget + 2), "s"]
