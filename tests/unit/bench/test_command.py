"""``anychip bench``: what it prints and writes, and what it refuses; and the pictures."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from anychip.bench import dispatch
from anychip.bench import plot as plots
from anychip.bench.plot import plot
from anychip.bench.report import Report, Timing
from anychip.cli.bench_command import command
from benchmarks import pictures, record


def report(subject: str, facts: dict[str, dict[str, Any]]) -> Report:
    rows = [
        Timing(name=name, microseconds=20_000.0, best_microseconds=15_000.0, facts=of)
        for name, of in facts.items()
    ]
    return Report(
        subject=subject, backend="cpu", device="a chip", threads=1, rows=rows, notes=("[note]",)
    )


TRAINING = report("training", {
    "no communication": {"x alone": 1.0, "goal": "", "peak MB": 700.0},
    "data parallel": {"x alone": 0.97, "goal": "not below DDP", "peak MB": 750.0},
    "ZeRO-2": {"x alone": 0.95, "goal": 0.93, "peak MB": 690.0},
    "torch DDP": {"x alone": 0.96, "goal": "", "peak MB": 800.0},
})  # fmt: skip
OPERATORS = report("operators, float32", {
    "gelu forward": {"x bound": 2.0, "x reference": 10.0, "x torch": 1.5, "x compiled": 0.25},
    "new forward": {"x bound": 1.5, "x reference": 2.0},
})  # fmt: skip
OPTIMIZERS = report("optimizers", {
    "adamw, 1 tensor: ours": {"x bound": 1.1}, "adamw, 1 tensor: traffic": {"x bound": 1.0},
})  # fmt: skip
COLLECTIVES = report(
    "collectives",
    {
        "all_reduce 4 B": {"bytes": 4, "ours GB/s": 0.1, "torch GB/s": 0.2, "copy GB/s": 3.0},
        "all_reduce 1 MiB": {
            "bytes": 1 << 20, "ours GB/s": 1.0, "torch GB/s": 2.0, "copy GB/s": 9.0,
        },
        "send 1 MiB": {"bytes": 1 << 20, "ours GB/s": 1.5, "torch GB/s": 2.5, "copy GB/s": 9.0},
        "barrier": {"bytes": 0},
    },
)  # fmt: skip
DISPATCH = report("dispatch", {"ops, no gradient": {}, "torch.add": {}})
DEVICE = report(
    "device", {"copy": {"GB/s": 3.0}, "product, float32": {"TFLOP/s": 0.1, "of properties": 0.5}}
)
ALL = [DISPATCH, DEVICE, OPERATORS, OPTIMIZERS, COLLECTIVES, TRAINING]


def widths(figure: Figure, panel: int = 0) -> list[float]:
    """Right ends of the bars that are seen, from the top."""
    bars = [bar for bar in figure.axes[panel].patches if bar.get_width()]  # type: ignore[attr-defined]
    return [bar.get_x() + bar.get_width() for bar in bars]  # type: ignore[attr-defined]


@pytest.mark.parametrize("made", ALL, ids=lambda made: made.subject.split(",")[0])
def test_plot_writes_a_picture(made: Report, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    plot(made, file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 5_000


def test_plot_of_operators_shows_times_over_the_bound() -> None:
    assert widths(plots._operators(OPERATORS)) == pytest.approx([2.0, 3.0, 0.5, 20.0, 1.5, 3.0])


def test_plot_of_optimizers_shows_the_bound_as_a_line() -> None:
    assert widths(pictures._optimizers(OPTIMIZERS)) == pytest.approx([1.1])


def test_plot_of_a_device_shows_rates_by_their_units() -> None:
    figure = plots._device(DEVICE)
    assert [axes.get_xlabel() for axes in figure.axes] == ["GB/s", "TFLOP/s"]
    assert (widths(figure), widths(figure, 1)) == (pytest.approx([3.0]), pytest.approx([0.1]))


def test_plot_of_training_shows_throughput_memory_and_goals() -> None:
    figure = pictures._training(TRAINING)
    assert widths(figure) == pytest.approx([1.0, 0.97, 0.95, 0.96])
    assert widths(figure, 1) == pytest.approx([700.0, 750.0, 690.0, 800.0])
    goals = [line for line in figure.axes[0].lines if line.get_marker() == "|"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in goals] == [(0.93, 2)]  # type: ignore[index]


def test_plot_of_collectives_has_a_panel_per_call_that_moves_bytes() -> None:
    figure = plots._collectives(COLLECTIVES)
    assert [axes.get_title() for axes in figure.axes] == ["all_reduce", "send"]
    ours = next(line for line in figure.axes[0].lines if line.get_label() == "ours")
    assert list(ours.get_xdata()) == [4, 1 << 20]
    assert list(ours.get_ydata()) == [0.1, 1.0]


def test_plot_of_another_subject_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no picture for weather; there are dispatch"):
        plot(report("weather", {}), tmp_path / "picture.png")


def test_report_with_slow_rows_is_in_milliseconds() -> None:
    headings, lines = TRAINING.cells()
    assert headings == ["what", "ms", "best ms", "x alone", "goal", "peak MB"]
    assert lines[2] == ["ZeRO-2", "20.00", "15.00", "0.95", "0.93", "690.00"]
    fast = Timing(name="fast", microseconds=1234.5, best_microseconds=0.012, facts={"n": 7})
    made = Report(subject="s", backend="b", device="d", threads=1, rows=[fast])
    assert made.cells() == (["what", "us", "best us", "n"], [["fast", "1234", "0.012", "7"]])


def test_bench_prints_and_writes_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: dict[str, Any] = {}

    def run(chip: Any, *, progress: Any, **options: Any) -> Report:
        given.update(options)
        return TRAINING

    monkeypatch.setattr(dispatch, "run", run)
    figures, picture = tmp_path / "r.json", tmp_path / "r.png"
    line = ["dispatch", "--backend", "cpu", "--rounds", "4"]
    result = CliRunner().invoke(command, [*line, "--json", str(figures), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert given == {"rounds": 4}
    assert "ZeRO-2" in result.output
    assert "[note]" in result.output  # not taken for markup
    written = json.loads(figures.read_text())
    assert written["schema"] == 1
    assert written["rows"][2] == {
        "name": "ZeRO-2", "microseconds": 20_000.0, "best_microseconds": 15_000.0,
        "facts": {"x alone": 0.95, "goal": 0.93, "peak MB": 690.0},
    }  # fmt: skip
    assert picture.exists()
    monkeypatch.setitem(record.SUBJECTS, "train", (4, run))
    line = ["train", "--backend", "cpu", "--steps", "2", "--folder", str(tmp_path / "pages")]
    result = CliRunner().invoke(record.main, line)
    assert result.exit_code == 0, result.output
    assert given == {"rounds": 4, "steps": 2}
    page = next((tmp_path / "pages").glob("train_*.md"))
    assert "| ZeRO-2 | 20.00 | 15.00 | 0.95 | 0.93 | 690.00 |" in page.read_text()
    assert json.loads(page.with_suffix(".json").read_text())["rows"] == written["rows"]
    assert page.with_suffix(".png").exists()


@pytest.mark.parametrize(("line", "message"), [
    (["device", "--dtype", "float16"], "--dtype is for bench ops, and this is bench device"),
    (["dispatch", "--no-compile"], "--no-compile is for bench ops, and this is bench dispatch"),
    (["dispatch", "--json", "none/x.json"], "none/x.json: there is no folder none"),
    (["dispatch", "--plot", "none/x.png"], "none/x.png: there is no folder none"),
    (["dispatch", "--plot", "x.jpg"], "x.jpg: a name in .png, .svg, .pdf expected"),
    (["ops", "--rounds", "2"], "2 is not in the range x>=3"),
    (["memory"], "'memory' is not one of 'device', 'dispatch', 'ops', 'collectives'"),
    (["train"], "'train' is not one of 'device', 'dispatch', 'ops', 'collectives'"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_bench_with_an_option_that_has_no_effect_is_wrong_use(
    line: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(dispatch, "run")  # nothing is measured
    result = CliRunner().invoke(command, line)
    assert result.exit_code == 2
    assert message in result.output
