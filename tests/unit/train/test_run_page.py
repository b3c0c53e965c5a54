"""The page of runs shows what their files say, of runs in any state, and what differs."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from anychip.cli import group
from anychip.cli.exit_codes import WRONG_USE
from anychip.pages import svg
from anychip.train import lock, run_page
from anychip.train.report import MEASURED, Evaluation, StepRecord
from anychip.train.watching import PARTS

OPERATOR = {
    "operator": "linear", "direction": "forward", "implementation": "a.b.linear", "kind": "native",
    "provider": "acme", "distribution": "anychip-acme", "version": "1.2", "calls": 1234,
    "fallback_reason": None,
}  # fmt: skip


def row_of(step: int, **more: Any) -> StepRecord:
    return StepRecord(
        step=step, loss=5.0 / step, lr=1e-3, grad_norm=0.1, tokens_per_s=1e3 * step, **more
    )


def measured_row(step: int) -> StepRecord:
    seconds = {f"{name}_s": 0.01 * (place + 1) for place, name in enumerate(PARTS)}
    return row_of(step, allocated_nbytes=10, peak_nbytes=2_500_000, mfu=0.25, **seconds)


def written(out: Path, rows: list[StepRecord], *, steps: int = 8, width: int = 16) -> Path:
    """The directory of a run in which rows were written, and nothing at its end."""
    out.mkdir(parents=True)
    lines = f"[run]\nsteps = {steps}\nbackend = 'cpu'\n[model]\nwidth = {width}\n"
    (out / "config.toml").write_text(lines)
    known = ({k: v for k, v in asdict(row).items() if v is not None} for row in rows)
    (out / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in known))
    return out


def ended(out: Path, **more: Any) -> Path:
    """The directory of a run that has all files."""
    written(out, [measured_row(step) for step in range(1, 9)], **more)
    (out / "sample.txt").write_text("<b>to be\x1b[31m")
    served = {"schema": 1, "operators": [OPERATOR], "refused": [], "torch": []}
    (out / "provenance.json").write_text(json.dumps(served))
    found = [
        Evaluation(step=step, loss=loss, perplexity=1.0, accuracy=0.5, targets=3)
        for step, loss in ((4, 2.5), (8, 2.75))
    ]
    (out / "eval.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in found))
    return out


def pages_of(*outs: Path) -> tuple[str, list[str]]:
    page = run_page.to_html(run_page.read(outs))
    return page, re.findall(r'<section id="(\w+)"', page)


def test_page_of_a_run_has_all_that_its_files_say_and_loads_nothing(tmp_path: Path) -> None:
    page, sections = pages_of(ended(tmp_path / "mine"))
    assert sections == [
        "runs", "curves", "throughput", "memory", "time", "samples", "provenance", "settings",
    ]  # fmt: skip
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(|https?:", page)
    assert page.count('<svg viewBox="0 0 360') == 4 + 2 + 2 + 1
    for words in (
        "done, 8 steps", "2.5000", "at 4", "2.5M", "25.0 %", "4.5k", "a.b.linear", "acme 1.2",
        "&lt;b&gt;to be\ufffd[31m", "1\N{NARROW NO-BREAK SPACE}234",
    ):  # fmt: skip
        assert words in page
    # 1 to 5 hundredths of a second; of 0.15 in all.
    shares = re.findall(r"</i>(\w+)</th>\D*([\d.]+) ms</td>\D*([\d.]+) %", page)
    wanted = [(n, f"{10 * (i + 1)}", f"{100 * (i + 1) / 15:.1f}") for i, n in enumerate(PARTS)]
    assert shares == wanted


def test_runs_are_told_apart_and_their_settings_compared(tmp_path: Path) -> None:
    runs = [ended(tmp_path / "one"), ended(tmp_path / "two", width=32), tmp_path / "x" / "two"]
    written(runs[2], [row_of(1)])
    read = run_page.read(runs)
    assert [run.name for run in read] == ["one", str(runs[1]), str(runs[2])]
    assert len({run.style for run in read}) == 3
    assert run_page.differing(read) == [("model.width", [16, 32, 16])]
    page, sections = pages_of(*runs)
    assert "differences" in sections
    assert page.count('<polyline class="run run1 dash1" points="40') == 4 + 2 + 2
    assert "None." in pages_of(runs[0], runs[2])[0]


def test_run_in_any_state_is_shown_as_it_is(tmp_path: Path) -> None:
    old = written(tmp_path / "old", [row_of(step) for step in range(1, 6)])
    page, sections = pages_of(old)
    assert "stopped, step 5 of 8" in page
    assert {"memory", "time"}.isdisjoint(sections)
    with lock.hold(old):
        assert "under way, step 5 of 8" in pages_of(old)[0]
    assert "stopped, step 0 of 8" in pages_of(written(tmp_path / "begun", []))[0]
    seconds = {f"{name}_s": 1.024 for name in PARTS}
    slow = pages_of(written(tmp_path / "slow", [row_of(1, **seconds)]))[0]
    assert slow.count("1.02 s</td>") == len(PARTS)
    assert slow.count("No text was written.") == 1
    torn = ended(tmp_path / "torn")
    with (torn / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    assert "done, 8 steps" in pages_of(torn)[0]


def test_what_is_no_run_is_refused_and_a_page_is_written_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(ended(tmp_path / "run"))
    assert group.run(["report", run, str(tmp_path / "absent")]) == WRONG_USE
    assert f"there is no run in {tmp_path / 'absent'}" in capsys.readouterr().err
    assert not (tmp_path / "run" / "report.html").exists()
    (tmp_path / "run" / "provenance.json").write_text("[]")
    assert group.run(["report", run]) == WRONG_USE
    assert "provenance.json is not what a run writes" in capsys.readouterr().err
    (tmp_path / "run" / "provenance.json").unlink()
    assert group.run(["report", run]) == group.run(["report", run, "-o", f"{run}.html"]) == 0
    assert capsys.readouterr().out.split() == [f"{run}/report.html", f"{run}.html"]
    assert Path(f"{run}.html").read_text() == Path(f"{run}/report.html").read_text()


def test_many_points_become_a_few_means_and_few_stay() -> None:
    points: list[svg.Point] = [(float(x), float(x % 2)) for x in range(10 * run_page.POINTS)]
    found = run_page.thinned(points)
    assert [y for _, y in found] == [0.5] * run_page.POINTS
    assert found[-1][0] == points[-1][0]
    assert run_page.thinned(points[:7]) == points[:7]
    assert run_page.thinned([]) == []


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 0.0), (0.0, 3e-4), (2.31, 5.51), (-1.0, 1.0), (5.0, 5.0), (1.0, 1e9)]
)
def test_marks_enclose_what_is_drawn_and_are_few(low: float, high: float) -> None:
    found = svg.marks(low, high)
    assert found[0] <= low <= high <= found[-1]
    assert found[0] < found[-1]
    assert 2 <= len(found) <= 7


@pytest.mark.parametrize(("value", "words"), [
    (0.0, "0"), (3.2e-4, "3.2e-4"), (0.25, "0.25"), (-2.5, "-2.5"), (999.0, "999"),
    (999.7, "1k"), (55_408.0, "55.4k"), (110_979_296.0, "111M"),
])  # fmt: skip
def test_short_number_is_read_at_once(value: float, words: str) -> None:
    assert svg.short(value) == words


def test_measured_names_are_those_that_the_page_shows() -> None:
    shown = {"allocated_nbytes", "peak_nbytes", "mfu", *(f"{name}_s" for name in PARTS)}
    assert set(MEASURED) == shown
