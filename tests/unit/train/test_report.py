"""What a run leaves behind and shows."""

import errno
import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from rich.console import Console

from anychip.train import display, files, report
from anychip.train.report import Metrics, StepRecord


def _row(step: int) -> StepRecord:
    return StepRecord(
        step=step, loss=5.0 / step, lr=1e-3, grad_norm=0.1 * step, tokens_per_s=1000.0
    )


DEEP = "[" * 200_000 + "\n"
ROWS = [_row(step) for step in range(1, 8)]


def test_metrics_have_a_row_per_step_as_soon_as_it_is_added(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl", last_step=0)
    for count, row in enumerate(ROWS, 1):
        metrics.append(row)
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, count + 1))
    known = {name: value for name, value in asdict(ROWS[0]).items() if value is not None}
    assert json.loads(lines[0]) == known
    assert report.read_metrics(tmp_path / "metrics.jsonl") == ROWS == metrics.rows


def test_what_was_measured_is_read_back_and_makes_no_rows_differ(tmp_path: Path) -> None:
    more = replace(ROWS[0], peak_nbytes=3, mfu=0.5, data_s=0.0, update_s=1e-3)
    (tmp_path / "old").write_text(json.dumps({**asdict(ROWS[0]), "grad_norm": None}))
    assert report.read_metrics(tmp_path / "old") == []  # null is no measurement
    Metrics(tmp_path / "metrics.jsonl", last_step=0).append(more)
    (found,) = report.read_metrics(tmp_path / "metrics.jsonl")
    assert found == more == ROWS[0]
    assert asdict(found) == asdict(more)
    assert found.allocated_nbytes is None


@pytest.mark.parametrize("torn", ["", '{"step": 8, "lo', '{"step": 8}\n', "null\n", DEEP])
def test_metrics_of_a_run_that_goes_on_keep_the_rows_up_to_there(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Metrics(path, last_step=0)
    for row in ROWS:
        first.append(row)
    path.write_text(path.read_text() + torn)
    second = Metrics(path, last_step=4)
    assert second.rows == ROWS[:4] == report.read_metrics(path)
    second.append(replace(ROWS[4], loss=9.0))
    assert [row.loss for row in report.read_metrics(path)][3:] == [5.0 / 4, 9.0]


def test_metrics_on_a_full_disk_say_which_row_is_missing(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl", last_step=0)
    metrics.path = Path("/dev/full")
    with pytest.raises(OSError, match="the row of step 3 was not written: No space left") as caught:
        metrics.append(_row(3))
    assert caught.value.errno == errno.ENOSPC


def test_text_is_replaced_whole_and_stays_when_it_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    files.write(path, "old")
    real = Path.open

    def full(self: Path, mode: str) -> IO[bytes]:
        real(self, mode).close()
        return real(Path("/dev/full"), "wb")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_smoothing_equals_the_weighted_mean() -> None:
    values = np.random.default_rng(0).normal(size=50)
    for count, smoothed in enumerate(report.smooth(values.tolist(), decay=0.8), 1):
        weights = 0.8 ** np.arange(count)[::-1]
        wanted = (weights * values[:count]).sum() / weights.sum()
        # A sum of 50 terms of order one, each rounded a few times.
        assert abs(smoothed - wanted) < 50 * 4 * np.finfo(float).eps * np.abs(values).max()


def test_plot_is_an_image_and_has_a_line_of_evaluations(tmp_path: Path) -> None:
    found = [
        report.Evaluation(step=step, loss=9.0, perplexity=1.0, accuracy=0.5, targets=3)
        for step in (2, 4)
    ]
    report.plot_loss(tmp_path / "with.png", ROWS, found)
    report.plot_loss(tmp_path / "without.png", ROWS)
    with_line, without = ((tmp_path / f"{n}.png").read_bytes() for n in ("with", "without"))
    assert with_line != without
    assert all(image.startswith(b"\x89PNG\r\n\x1a\n") for image in (with_line, without))


def test_curve_falls_where_the_loss_falls() -> None:
    rows = [replace(_row(1), step=step, loss=float(-step)) for step in range(1, 201)]
    lines = display.curve(rows, width=20, height=5).splitlines()
    columns = [line.split("|")[1].ljust(20) for line in lines[:5]]
    heights = [[row[i] for row in columns].index("*") for i in range(20)]
    assert heights == sorted(heights)
    assert (heights[0], heights[-1]) == (0, 4)
    assert lines[-1].split() == ["step", "1", "200"]


@pytest.mark.parametrize("count", [1, 2])
def test_curve_of_a_few_equal_losses_is_drawn(count: int) -> None:
    rows = [replace(_row(1), step=step) for step in range(1, count + 1)]
    assert display.curve(rows, height=3).splitlines()[2].split("|")[1] == "*" * count


def test_display_without_a_terminal_prints_lines_and_no_control_codes() -> None:
    output = io.StringIO()
    with display.Display(Console(file=output), steps=7) as show:
        for row in ROWS:
            show(row)
    lines = output.getvalue().splitlines()
    assert lines[0].startswith("step 1/7  loss 5.0000  lr 1.00e-03  1,000 tokens/s")
    assert lines[-1].startswith("step 7/7  loss 0.7143")
    assert "\x1b" not in output.getvalue()


def test_display_on_a_terminal_shows_step_loss_and_speed() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120)
    with display.Display(console, steps=7) as show:
        for row in ROWS:
            show(row)
    assert "7/7" in output.getvalue()
    assert "loss 0.7143" in output.getvalue()
    assert "1,000 tokens/s" in output.getvalue()
