"""``benchmarks/ascend.sh --small`` on the emulator: all stages run, and the report says where."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch_npu")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "ascend.sh"


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), "--python", sys.executable, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True,
        timeout=1500, check=False,
    )  # fmt: skip


@pytest.mark.grid
@pytest.mark.timeout(1500)
def test_every_stage_ends_well_and_the_page_says_emulated(tmp_path: Path) -> None:
    done = run("--small", "--folder", str(tmp_path / "report"))

    assert done.returncode == 0, done.stdout
    with tarfile.open(tmp_path / "report.tar.gz") as archive:
        names = set(archive.getnames())
    page = (tmp_path / "report" / "report.md").read_text()
    assert "EMULATED: this ran on an emulated CANN, not on Ascend silicon." in page
    for stage in ("doctor", "conformance", "train", "cpu", "ranks", "bench"):
        assert f"| {stage} | 0 |" in page
        assert f"./{stage}.txt" in names
    wanted = {"report.md", "conformance.json", "train/metrics.jsonl", "ops-float32.json"}
    assert {f"./{name}" for name in wanted} <= names
    assert not [name for name in names if name.endswith(".pt")]


def test_failing_stage_is_in_the_page_and_in_the_status(tmp_path: Path) -> None:
    done = run("--small", "--folder", str(tmp_path / "report"), "doctor", ANYCHIP_CANN_DEVICES="0")

    assert done.returncode == 1
    page = (tmp_path / "report" / "report.md").read_text()
    assert "No device could be used" in page
    assert "| doctor | 3 |" in page
    assert "EMULATED" not in page


def test_unknown_word_is_refused() -> None:
    done = run("--tiny")

    assert done.returncode == 2
    assert "--tiny is no stage and no option" in done.stdout
