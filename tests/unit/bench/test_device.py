"""Rates of a device: what is measured, and what the estimate of costs takes from the report."""

import json
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import anychip
from anychip.bench import device
from anychip.bench.timing import Samples
from anychip.cli.group import run as anychip_command
from anychip.contract import Backend, DeviceProperties
from anychip.train import config, parallel, planning

TINY = ("model.width=16", "model.layers=4", "model.heads=2", "model.context=8")
STAGES = ("parallel.pipeline=2", "data.accumulation=2")
BYTES, WIDTH = 1 << 14, 32


@pytest.fixture
def cpu() -> Backend:
    return anychip.use("cpu")


def run(chip: Any, **given: Any) -> Any:
    given = {"copy_nbytes": BYTES, "width": WIDTH, "window": 1e-3, **given}
    return device.run(chip, rounds=3, progress=lambda _: None, **given)


def test_device_is_asked_for_a_copy_and_a_product_in_each_dtype(cpu: Backend) -> None:
    report = run(cpu)
    names = ["copy", *(f"product, {name}" for name in ("bfloat16", "float16", "float32"))]
    assert [row.name for row in report.rows] == names
    assert (report.backend, report.device) == ("cpu", cpu.identity())
    # The cpu backend's properties have no rates to compare with.
    assert all(set(row.facts) <= {"GB/s", "TFLOP/s"} for row in report.rows)


def test_rates_are_work_over_the_median_time(cpu: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds per copy, half a second per product, as far as the benchmark can see."""

    def timed(calls: Mapping[str, Callable[[], Any]], **_: Any) -> dict[str, Samples]:
        seconds = {name: 2.0 if name == "copy" else 0.5 for name in calls}
        return {n: Samples(name=n, seconds=(9.0, s, s / 2)) for n, s in seconds.items()}

    monkeypatch.setattr(device, "interleave", timed)
    said = DeviceProperties(
        name="chip", total_memory=1 << 30, dtypes=frozenset({torch.float32}),
        flops={torch.float32: 8.0 * WIDTH**3}, bandwidth=4.0 * BYTES,
    )  # fmt: skip
    chip = SimpleNamespace(
        name="acme", properties=lambda: said, device=cpu.device, identity=lambda: "chip",
        synchronize=cpu.synchronize,
    )  # fmt: skip
    copy, product = run(chip).rows
    assert copy.facts == {"GB/s": BYTES / 1e9, "of properties": 0.25}
    assert product.facts == {"TFLOP/s": 4.0 * WIDTH**3 / 1e12, "of properties": 0.5}


def test_width_grows_until_a_product_takes_long(
    cpu: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter([0.0, 0.004, 1.0, 1.02, 2.0, 2.5])
    monkeypatch.setattr(device, "_WIDTHS", (8, 16, 32))
    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert device._busy_width(cpu) == 16
    monkeypatch.setattr(device, "_LONG_S", 100.0)
    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    assert device._busy_width(cpu) == 32


def written(path: Path, **changed: Any) -> Path:
    """A report as the command writes it, of a device that takes 100 flops per byte."""
    rows = {
        "copy": {"GB/s": 20.0}, "product, float32": {"TFLOP/s": 2.0},
        "product, bfloat16": {"TFLOP/s": 8.0},
    }  # fmt: skip
    found = {
        "schema": 1, "date": "2026-01-31T12:00:00+00:00", "subject": "device", "backend": "cpu",
        "device": anychip.use("cpu").identity(),
        "rows": [{"name": name, "facts": facts} for name, facts in rows.items()], **changed,
    }  # fmt: skip
    path.write_text(json.dumps(found))
    return path


def test_rates_are_read_in_bytes_and_flops_per_second(tmp_path: Path, cpu: Backend) -> None:
    rates = parallel.read_rates(written(tmp_path / "rates.json"), cpu)
    assert rates.bandwidth == 20e9
    assert rates.flops == {torch.float32: 2e12, torch.bfloat16: 8e12}
    assert rates.date == "2026-01-31T12:00:00+00:00"
    assert parallel.speed(cpu, rates).flops_per_byte == 100.0


def test_report_of_a_run_can_be_read_back(tmp_path: Path, cpu: Backend) -> None:
    file, report = tmp_path / "rates.json", run(cpu)
    file.write_text(json.dumps(report.to_json()))
    rates = parallel.read_rates(file, cpu)
    assert rates.bandwidth == pytest.approx(2 * BYTES / report.rows[0].microseconds * 1e6)
    assert set(rates.flops) == cpu.properties().dtypes


@pytest.mark.parametrize(("changed", "message"), [
    ({"device": "another"}, r"rates of another \(backend 'cpu'\), and this is"),
    ({"backend": "acme"}, r"backend 'acme'"), ({"rows": []}, "KeyError: 'copy'"),
    ({"rows": [{"name": "copy", "facts": {"GB/s": 0.0}}]}, "above 0, got 0.0"),
    ({"rows": None}, "is not a report of anychip bench device"),
], ids=["device", "backend", "no copy", "zero", "no rows"])  # fmt: skip
def test_rates_of_something_else_are_refused(
    tmp_path: Path, cpu: Backend, changed: dict[str, Any], message: str
) -> None:
    file = written(tmp_path / "rates.json", **changed)
    with pytest.raises(ValueError, match=message) as raised:
        parallel.read_rates(file, cpu)
    assert "anychip bench device --backend cpu --json" in str(raised.value)


def test_rates_default_to_the_properties(cpu: Backend) -> None:
    assert parallel.speed(cpu).flops_per_byte == 10.0
    known = SimpleNamespace(flops={torch.float32: 6e12}, bandwidth=2e12)
    chip: Any = SimpleNamespace(properties=lambda: known)
    assert parallel.speed(chip).flops_per_byte == 3.0


def test_plan_takes_costs_from_measured_rates(tmp_path: Path, cpu: Backend) -> None:
    file = written(tmp_path / "rates.json")
    given = f"parallel.rates={file}"
    plans = [planning.plan(config.load(None, [*TINY, *STAGES, *s]), cpu) for s in ([], [given])]
    costs = [[stage.cost.total for stage in plan.stages] for plan in plans]
    # Ten times the flops of the default per byte: what moves more than it computes costs more.
    assert all(new > old for old, new in zip(*costs, strict=True))
    assert [plan.flops_per_byte for plan in plans] == [10.0, 100.0]
    # The second rank's chip is four times slower, says the other one of two files.
    rates = {"copy": {"GB/s": 5.0}, "product, float32": {"TFLOP/s": 0.5}}
    rows = [{"name": name, "facts": facts} for name, facts in rates.items()]
    slow = written(tmp_path / "slow.json", backend="acme", rows=rows)
    acme: Any = copy(cpu)
    acme.name = "acme"
    both = config.load(None, [*TINY, *STAGES, f"parallel.rates=['{file}', '{slow}']"])
    plan = planning.plan(both, cpu, None, acme)
    assert [speed.flops for speed in plan.speeds] == [2e12, 0.5e12]
    alike = [len(stage.layers) for stage in plans[1].stages]
    assert len(plan.stages[0].layers) > alike[0]
    layers = [len(stage.layers) for stage in plan.stages]
    assert sum(layers) == sum(alike)
    written(file, device="another")
    with pytest.raises(ValueError, match="rates of another"):
        planning.plan(config.load(None, [*TINY, *STAGES, given]), cpu)


def test_plan_says_when_its_rates_were_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["plan", "--backend", "cpu", *TINY, *STAGES]
    measured = [*given, f"parallel.rates={written(tmp_path / 'rates.json')}"]
    assert anychip_command(given) == 0
    assert "Costs: 10 operations in the time of a byte, by the device's" in capsys.readouterr().out
    assert anychip_command(measured) == 0
    said = "Costs: 100 operations in the time of a byte, measured 2026-01-31T12:00:00+00:00 on "
    assert said in capsys.readouterr().out
    assert anychip_command([*measured, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["flops_per_byte"], answer["rates_date"]) == (100.0, "2026-01-31T12:00:00+00:00")
