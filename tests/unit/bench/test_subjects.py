"""The subjects run on the cpu backend and report what they say. No figure is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import anychip
from anychip.bench import dispatch, operators
from anychip.cli.bench_command import command
from anychip.contract import SampleMaker
from anychip.dispatch.operator import registered


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and rounds at which a subject takes a second."""
    anychip.use("cpu")
    for name, size in (("_TOKENS", 64), ("_HIDDEN", 128), ("_VOCABULARY", 64)):
        monkeypatch.setattr(operators, name, size)
    monkeypatch.setattr(operators, "_COPY_BYTES", 1 << 16)
    for module in (dispatch, operators):
        real = module.interleave
        monkeypatch.setattr(
            module, "interleave", lambda calls, real=real, **k: real(calls, **{**k, "window": 1e-3})
        )


def test_bench_dispatch_reports_both_doors_and_their_peers(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = CliRunner().invoke(
        command, ["dispatch", "--backend", "cpu", "--rounds", "3", "--json", str(file)]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert report["schema"] == 1
    assert (report["backend"], report["threads"]) == ("cpu", 1)
    peers = {"torch.library.custom_op", "pluggy hook, one plugin", "torch.add", "direct call"}
    assert peers <= rows.keys()
    assert all(0 < row["best_microseconds"] <= row["microseconds"] for row in rows.values())
    assert rows["ops, no gradient"]["facts"]["over"] == "direct call"
    assert rows["ops, no gradient"]["facts"]["goal us"] == dispatch.LIMIT_PLAIN_US
    assert "ops, gradient" in result.output


def test_bench_dispatch_leaves_threads_and_policy_as_they_were() -> None:
    threads = torch.get_num_threads()
    dispatch.run(anychip.backend(), rounds=3, progress=lambda _: None)
    assert torch.get_num_threads() == threads
    assert "anychip_bench" not in str(anychip.provenance().fallbacks())


@pytest.mark.parametrize("name", operators._cases())
def test_bench_ops_has_a_row_per_direction(name: str) -> None:
    report = operators.run(
        anychip.backend(), rounds=3, progress=lambda _: None, names=(name,), dtype=torch.bfloat16
    )
    directions = 1 if registered()[name].gradient is None else 2
    assert [row.name.split()[0] for row in report.rows] == [name] * directions
    for row in report.rows:
        assert {"GB/s", "x bound", "x reference", "x torch"} <= row.facts.keys()


@pytest.mark.parametrize("name", sorted(operators._cases().keys() - {"dropout"}))
def test_bench_ops_compares_with_the_same_computation(name: str) -> None:
    # A peer that computes something else would make the ratio worthless.
    maker = SampleMaker(torch.device("cpu"), torch.float32)
    case = operators._cases()[name](maker)
    assert case.eager is not None
    if name == "adamw":
        copy = operators._cases()[name](SampleMaker(torch.device("cpu"), torch.float32))
        case.eager(*case.args)
        registered()[name](*copy.args)
        ours, theirs = copy.args[0], case.args[0]
    else:
        ours = operators._listed(registered()[name](*case.args, **case.attrs))
        theirs = operators._listed(case.eager(*case.args, **case.attrs))
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_bench_ops_for_an_operator_without_a_case_is_refused() -> None:
    with pytest.raises(ValueError, match="no benchmark for clip; there are rms_norm"):
        operators.run(anychip.backend(), rounds=3, progress=lambda _: None, names=("clip",))
