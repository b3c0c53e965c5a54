"""Can a person read the report's page? Laid out by a browser, wide and narrow, light and dark.

``tests.browser`` is the browser; where there is none the tests are skipped.
"""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from anychip.conformance import CHAPTERS
from anychip.conformance.bounds import Measurement
from anychip.conformance.case import Curve
from anychip.conformance.hashes import suite_hash
from anychip.conformance.must_pass import declared_list
from anychip.conformance.page import PARTS, to_html
from anychip.conformance.priorities import next_to_fix
from anychip.conformance.report import Identity, KernelPack, Report, Result
from tests.browser import SCHEMES, check_legible, laid_out

FORMATS = ("fp32", "bf16", "fp16")


def measurement(format: str, largest: float) -> Measurement:
    counts = [2**place + 1 for place in range(20, 0, -1)][: max(1, math.ceil(20 * largest))]
    return Measurement(
        name="gradient of a_tensor_with_a_long_name", format=format, count=sum(counts),
        median=largest / 8, p999=largest / 2, max=largest, rms=0.3, quantile=0.5,
        max_ulp=412.5, where=(3, 1023, 151_999), failure=None, histogram=tuple(counts[:21]),
    )  # fmt: skip


def result_of(number: int, case: str) -> Result:
    """Every 300th case fails, every 301st is an expected failure, the rest passed."""
    fields: dict[str, Any] = {"call": "f(x: float32[3, 17])", "served_by": "acme: acme.kernels.f"}
    parts = case.split("/")
    if len(parts) > 2 and parts[2] in FORMATS:
        fields["measurements"] = (measurement(parts[2], (number % 97) / 100),)
    if parts[0] == "collectives" and parts[-1] == "int8":
        fields["note"] = "not claimed"
    if parts[0] == "training":
        exact = tuple(4.0 * math.exp(-step / 50) + 1.0 for step in range(200))
        losses = tuple(value + 1e-6 * math.sin(step) for step, value in enumerate(exact))
        fields["curve"] = Curve(losses, exact, (1e-6,) * 200, 0.7, 1.4)
    if number % 300 == 0:
        words = "wrong at [3, 1023, 151999]: got 1.00000012, want 1\n" + "unbroken" * 40
        return Result(case=case, outcome="failed", reason=words, **fields)
    if number % 301 == 0:
        return Result(case=case, outcome="expected failure", reason="partial sums", **fields)
    return Result(case=case, outcome="passed", **fields)


@pytest.fixture(scope="module")
def page() -> str:
    """Of a long run with everything in it: failures, packs, long names, all types and ranks."""
    capabilities = {"memory_stats": 1, "memory_peak": 1, "pinned_memory": 1}
    listed = declared_list("acme", capabilities, FORMATS, "quick")
    results = [result_of(number, case) for number, case in enumerate(listed.ids)]
    for case, missing in listed.capabilities.items():
        words = f"{missing} is not declared"
        results.append(Result(case=case, outcome="unsupported", reason=words, capability=missing))
    row = {
        "operator": "linear_cross_entropy", "direction": "backward", "kind": "reference",
        "implementation": "anychip_acme.kernels.with_a_long_name._and_a_longer_function_name",
        "provider": "reference", "distribution": "anychip", "version": "0.1.0", "calls": 123456,
        "fallback_reason": "anychip_acme.kernels.linear_cross_entropy: accepts() said no",
    }  # fmt: skip
    report = Report(
        identity=Identity(
            backend="acme_with_a_name", device_type="acme", device="ACME Accelerator 9000 (rev. B)",
            num_devices=8, distribution="anychip-acme", version="1.2.3.post45", api=(2, 0),
            capabilities=capabilities, dtypes=FORMATS, plugin_hash="0a" * 32,
            suite_hash=suite_hash(), kernel_packs=(KernelPack("acme-pack", "0.3", "f0" * 32),),
        ),
        level="quick", chapters=tuple(CHAPTERS), select="", seed=7, isolated=True,
        results=tuple(results), must_pass=(len(listed.ids), listed.hash),
        started="2026-11-21T12:00:00+00:00", seconds=432.1, next_to_fix=next_to_fix(results),
        references=("acme_norm",),
        provenance={"schema": 1, "operators": [row, {**row, "kind": "native", "calls": 7}]},
    )  # fmt: skip
    return to_html(report)


@pytest.mark.grid
@pytest.mark.parametrize("scheme", SCHEMES)
def test_page_is_legible_at_both_widths(page: str, scheme: str, tmp_path: Path) -> None:
    answers = laid_out(page, scheme, tmp_path)
    check_legible(answers, scheme)
    for answer in answers:
        assert answer["shown"] > 500
        parts = [part for part in PARTS if part != "coverage"]
        assert answer["sections"] == ["next", "failures", *parts]
        assert len(answer["charts"]) == 3 + 2 * 2
        assert all(100 < height < 300 for height in answer["charts"])


def test_page_needs_nothing_from_elsewhere(page: str) -> None:
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(|https?:", page)
