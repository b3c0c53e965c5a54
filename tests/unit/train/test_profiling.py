"""A profile sees each call of an operator in the steps that it is asked for, and changes no bit."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import anychip
from anychip import ops
from anychip.cli import group
from anychip.cli.exit_codes import WRONG_USE
from anychip.dispatch import selection
from anychip.dispatch.operator import registered
from anychip.train import loop, profiling
from anychip.train.watching import PARTS, Clock
from tests.unit.train.small_runs import build, nothing, tiny

TINY = tiny("run.steps=6", "eval.fraction=0.01", "eval.every=1", "eval.batches=1")


def trained(out: Path, count: int = 0) -> tuple[loop.Run, profiling.Profile | None]:
    run, chip = build(*TINY), anychip.backend()
    out.mkdir()
    if not count:
        loop.train(run, out, nothing)
        return run, None
    with profiling.profiled(run, chip, count, out) as profile:
        ticks = itertools.count()
        # Each look at the clock is a second after the one before.
        profile.clock = Clock(lambda: next(ticks), lambda start, end: float(end - start))
        profile.bandwidth, profile.flops = 1.0, {torch.float32: 1.0}
        loop.train(run, out, nothing)
    return run, profile


def test_profile_counts_the_calls_of_its_steps_and_leaves_the_bits_alone(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path / "plain")
    run, profile = trained(tmp_path / "out", 2)
    assert profile is not None
    for one, other in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        assert one.detach().numpy().tobytes() == other.detach().numpy().tobytes()
    found = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert found == profile.result
    assert (found["first_step"], found["steps"], found["rank"]) == (4, 2, 0)
    calls = {(row["operator"], row["direction"]): row["calls"] for row in found["operators"]}
    # Of two steps, and none of the evaluation behind each: 4 products in a block, and the head.
    assert calls["linear", "forward"] == calls["linear", "backward"] == 2 * (4 * 2 + 1)
    assert calls["attention", "backward"] == 2 * 2
    assert calls["layer_norm", "forward"] == 2 * (2 + 1)
    assert calls["add_layer_norm", "forward"] == 2 * 2
    assert all(row["provider"] == "cpu" for row in found["operators"])
    assert selection.current.observer is None


def test_table_has_seconds_by_the_clock_and_cost_by_the_spec(tmp_path: Path) -> None:
    _, profile = trained(tmp_path / "out", 1)
    assert profile is not None
    assert profile.result is not None
    rows = {(row["operator"], row["direction"]): row for row in profile.result["operators"]}
    total = profile.result["step_s"]
    for row in rows.values():
        assert row["seconds"] == row["calls"]  # from one look at the clock to the next
        assert row["share"] == row["calls"] / total
    # (2 * 16, 16) by (48, 16), (16, 16), (64, 16), (16, 64) in each block, (256, 16) at last.
    tokens, products = 2 * 16, 2 * (48 + 16 + 64 + 64) * 16 + 256 * 16
    got = rows["linear", "forward"]
    assert got["flops_per_s"] == pytest.approx(2 * tokens * products / 9, rel=0.02)  # and biases
    assert got["of_roofline"] >= got["flops_per_s"]
    assert rows["linear", "backward"]["flops_per_s"] >= 1.9 * got["flops_per_s"]
    lines = str(profile).splitlines()
    assert lines[1].split() == [
        "operator", "calls", "ms", "share", "TFLOP/s", "GB/s", "roofline", "served", "by",
    ]  # fmt: skip
    assert sum(line.startswith("linear ") for line in lines) == 2
    assert lines[-1].startswith("all else")


def test_trace_has_parts_and_calls_one_within_the_other(tmp_path: Path) -> None:
    _, profile = trained(tmp_path / "out", 1)
    assert profile is not None
    assert profile.result is not None
    found = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    bars = [event for event in found if event["ph"] == "X"]
    assert {event["name"] for event in found if event["ph"] == "M"} == {
        "process_name", "thread_name",
    }  # fmt: skip
    parts = [event for event in bars if event["cat"] == "part"]
    assert {event["name"] for event in parts} == {*PARTS}
    calls = [event for event in bars if event["cat"] == "operator"]
    assert len(calls) == sum(row["calls"] for row in profile.result["operators"])

    def part_of(call: dict[str, Any]) -> str:
        # Microseconds since 1970 are exact to a quarter in float64; a second apart is clear.
        inside = [p for p in parts if p["ts"] <= call["ts"] + 1 < p["ts"] + p["dur"]]
        (part,) = (p["name"] for p in inside)
        return str(part)

    where = Counter((part_of(call), call["name"]) for call in calls)
    assert where["forward", "linear forward"] == where["backward", "linear backward"] == 9
    assert all(call["args"]["served by"].startswith("anychip_cpu.") for call in calls)
    assert {call["args"]["step"] for call in calls} == {4}


def test_more_steps_than_are_left_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--backend", "cpu", *TINY, "--profile", "4", "--out", str(tmp_path / "out")]
    assert group.run(words) == WRONG_USE
    assert "3 steps to warm up and 4 to look at expected, and 6 are left" in capsys.readouterr().err


def test_ranks_of_a_job_have_a_file_each(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["train", "--backend", "cpu", *TINY, "--nproc", "2", "--out", str(out), "--json"]
    assert group.run([*words, "--profile", "1"]) == 0
    told = json.loads(capfd.readouterr().out)["profile"]
    files = [json.loads((out / f"profile{rank}.json").read_text()) for rank in ("", "1")]
    assert [file["rank"] for file in files] == [0, 1]
    assert told == files[0]
    traces = [json.loads((out / f"trace{r}.json").read_text())["traceEvents"] for r in ("", "1")]
    assert [{event["pid"] for event in trace} for trace in traces] == [{0}, {1}]


def test_observer_is_called_in_the_place_of_whichever_row_serves_and_calls_are_counted_once() -> (
    None
):
    seen: list[tuple[str, str]] = []

    def observer(row: Any, provider: Any) -> Any:
        def function(*args: Any, **attrs: Any) -> Any:
            seen.append((row.operator, provider.name))
            return row.function(*args, **attrs)

        return function

    anychip.use("cpu")
    x = torch.randn(3, 8)
    wanted = ops.silu(x)
    before = anychip.provenance().to_json()
    with selection.observed(observer), anychip.policy(pin={"silu": "reference"}):
        ops.silu(x)
    with selection.observed(observer):
        assert torch.equal(ops.silu(x), wanted)
    ops.silu(x)
    assert seen == [("silu", "reference"), ("silu", "cpu")]
    after = anychip.provenance().to_json()

    def count(of: dict[str, Any]) -> int:
        return sum(row["calls"] for row in of["operators"] if row["operator"] == "silu")

    assert count(after) - count(before) == 3


def test_cost_of_a_backward_is_that_of_the_forward_call_it_belongs_to() -> None:
    operator = registered()["rms_norm"]
    x, weight = torch.randn(5, 8), torch.randn(8)
    row = next(r for r in anychip.use("cpu").operators.rows("rms_norm", "backward"))
    assert operator.gradient is not None
    named = {"x": x, "weight": weight, "grad0": x, "rstd": torch.randn(5, 1), "y": x}
    args = [named[name] for name in operator.gradient.kernel.names]
    assert operator.spec.backward_cost is not None
    wanted = operator.spec.backward_cost(x, weight, eps=1e-6)
    assert profiling.cost_of(row, args, {"eps": 1e-6, "needs": (True, True)}) == wanted
