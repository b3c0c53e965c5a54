"""Can a person read the page of runs? Of three that have trained, wide and narrow, light and dark.

``tests.browser`` is the browser; where there is none the tests are skipped.
"""

from pathlib import Path

import pytest

from anychip.cli import group
from tests.browser import SCHEMES, check_legible, laid_out

TINY = [
    *("model.layers=1", "model.heads=2", "model.width=16", "model.context=16", "eval.every=2"),
    *("eval.fraction=0.01", "eval.batches=1", "data.batch_size=2", "run.sample_tokens=40"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    names = ["first", "with-a-name-that-is-long-and-says-everything", "third"]
    for number, name in enumerate(names, 3):
        words = ["train", "--backend", "cpu", "--steps", str(number), *TINY]
        assert group.run([*words, "--out", str(folder / name)]) == 0
    outs = [str(folder / name) for name in names]
    assert group.run(["report", *outs, "-o", str(folder / "page.html")]) == 0
    return (folder / "page.html").read_text(encoding="utf-8")


@pytest.mark.grid
@pytest.mark.parametrize("scheme", SCHEMES)
def test_page_of_runs_is_legible_at_both_widths(page: str, scheme: str, tmp_path: Path) -> None:
    answers = laid_out(page, scheme, tmp_path)
    check_legible(answers, scheme)
    for answer in answers:
        assert answer["sections"] == [
            "runs", "curves", "throughput", "memory", "time", "differences", "samples",
            "provenance", "settings",
        ]  # fmt: skip
