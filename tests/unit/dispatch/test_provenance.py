"""Counts: exact, also under threads and right after a reset, with the reason of every fallback."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import anychip
from anychip import OperatorTable, ops
from tests.unit.dispatch.calls import SPECS
from tests.unit.dispatch.tables import Install

X, W = torch.ones(2, 8), torch.ones(8)
NUM_THREADS, NUM_CALLS = 4, 1000


def _counts() -> dict[tuple[str, str, str], int]:
    return {(r.operator, r.direction, r.kind): r.calls for r in anychip.provenance().rows()}


def test_counts_under_threads_are_exact() -> None:
    start = threading.Barrier(NUM_THREADS)

    def work(_: int) -> None:
        start.wait()
        for step in range(NUM_CALLS):
            ops.rms_norm(X, W)
            if step % 4 == 0:
                torch.ops.anychip.gelu(X)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(work, range(NUM_THREADS)))
    assert _counts() == {
        ("rms_norm", "forward", "native"): NUM_THREADS * NUM_CALLS,
        ("gelu", "forward", "native"): NUM_THREADS * NUM_CALLS // 4,
    }


def test_counts_around_resets_under_threads_lose_and_double_nothing() -> None:
    done = threading.Event()

    def work(_: int) -> None:
        for _ in range(NUM_CALLS):
            ops.gelu(X)

    total = 0
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        futures = [pool.submit(work, i) for i in range(NUM_THREADS)]
        while not done.is_set():
            total += sum(r.calls for r in anychip.provenance(reset=True).rows())
            if all(f.done() for f in futures):
                done.set()
        [f.result() for f in futures]
    total += sum(r.calls for r in anychip.provenance(reset=True).rows())
    assert total == NUM_THREADS * NUM_CALLS
    assert str(anychip.provenance()) == "no operator was called"


def test_counts_right_after_a_reset_start_at_zero() -> None:
    for _ in range(3):
        ops.gelu(X)
    assert _counts() == {("gelu", "forward", "native"): 3}
    assert sum(r.calls for r in anychip.provenance(reset=True).rows()) == 3
    assert not anychip.provenance().rows()
    ops.gelu(X)
    assert _counts() == {("gelu", "forward", "native"): 1}


def test_counts_survive_a_change_of_policy() -> None:
    ops.gelu(X)
    with anychip.policy(pin={"gelu": "reference"}):
        ops.gelu(X)
    ops.gelu(X)
    assert _counts() == {("gelu", "forward", "native"): 2, ("gelu", "forward", "reference"): 1}


def test_both_directions_through_both_doors_are_counted() -> None:
    for rms_norm in (ops.rms_norm, torch.ops.anychip.rms_norm):
        x = X.clone().requires_grad_()
        rms_norm(x, W).sum().backward()
    assert _counts() == {
        ("rms_norm", "forward", "native"): 2, ("rms_norm", "backward", "native"): 2,
    }  # fmt: skip


def test_paired_row_is_counted_in_both_directions(install: Install) -> None:
    table, spec = OperatorTable(), SPECS["gelu"]
    table.pair(
        "gelu",
        forward=lambda x, *, approximate: (spec.forward(x, approximate=approximate), x.clone()),
        backward=lambda grad, x, copy, *, approximate, needs: spec.backward(  # type: ignore[misc]
            grad, copy, approximate=approximate, needs=needs
        ),
        num_residuals=1,
        fake_residuals=lambda x, *, approximate: torch.empty_like(x),
    )
    install(table)
    for gelu in (ops.gelu, torch.ops.anychip.gelu):
        gelu(X.clone().requires_grad_()).sum().backward()
    found = {
        (r.direction, r.provider, r.distribution): r.calls for r in anychip.provenance().rows()
    }
    pack = ("pack0", "anychip-pack0")
    assert found == {("forward", *pack): 2, ("backward", *pack): 2}


def test_refused_call_is_not_counted() -> None:
    with pytest.raises(ValueError, match="weight"):
        ops.rms_norm(X, torch.ones(3))
    assert not anychip.provenance().rows()


def test_fallback_has_the_reasons_of_all_rows(install: Install) -> None:
    table = OperatorTable()

    @table.forward("rms_norm", dtypes={torch.float16})
    def half(x: Tensor, weight: Tensor, *, eps: float) -> None:
        raise AssertionError("not for float32")

    @table.forward("rms_norm", contiguous=True)
    def dense(x: Tensor, weight: Tensor, *, eps: float) -> None:
        raise AssertionError("not for strided tensors")

    install(table, alone=True)
    ops.rms_norm(torch.ones(8, 2).t(), W)
    ops.gelu(X)
    by_name = {r.operator: r for r in anychip.provenance().fallbacks()}
    reason = str(by_name["rms_norm"].fallback_reason)
    assert "half: x is torch.float32" in reason
    assert "dense: x is not contiguous" in reason
    assert by_name["gelu"].fallback_reason == "no row in 'pack0'"


def test_reference_that_was_asked_for_is_no_fallback() -> None:
    with anychip.policy(pin={"gelu": "reference"}):
        ops.gelu(X)
    (row,) = anychip.provenance().rows()
    assert row.kind == "reference"
    assert not anychip.provenance().fallbacks()


def test_report_as_text_and_json_say_the_same() -> None:
    ops.rms_norm(X, W)
    report = anychip.provenance()
    data = json.loads(json.dumps(report.to_json()))
    assert data["schema"] == 1
    (row,) = data["operators"]
    assert row["operator"] == "rms_norm"
    assert row["calls"] == 1
    assert row["implementation"] == "anychip_cpu.norm.rms_norm"
    assert (row["provider"], row["distribution"]) == ("cpu", "anychip")
    assert row["version"] == anychip.__version__
    head, line = str(report).splitlines()
    assert head.split() == ["operator", "direction", "calls", "kind", "from", "fallback"]
    assert line.split()[:4] == ["rms_norm", "forward", "1", "native"]
