"""The suite that anychip brings: the same one for every chip."""

from __future__ import annotations

from anychip import conformance


def test_toy_passes_the_conformance_suite() -> None:
    report = conformance.run("toy", level="quick")
    assert report.passed, str(report)
