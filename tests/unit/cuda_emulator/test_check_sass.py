"""Does benchmarks/check_sass.py see a spill, float64, narrow accesses and a low occupancy?"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import check_sass
from benchmarks.check_sass import Usage
from tests.unit.cuda_emulator.programs import ROOT, made

pytestmark = pytest.mark.grid

CASES = Path(__file__).with_name("sass_cases.cu")
has_tools = shutil.which("nvcc") and (
    shutil.which("cuobjdump") or check_sass.in_wheels("cuobjdump")
)
needs_tools = pytest.mark.skipif(
    not has_tools, reason="needs nvcc and cuobjdump: install the CUDA toolkit"
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, object]]:
    """What the command writes about the cases, by kernel and architecture."""

    def make(folder: Path) -> None:
        codes = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in (80, 90)]
        subprocess.run(["nvcc", "-O3", *codes, "-c", CASES, "-o", folder / "cases.o"], check=True)

    compiled = made("sass", make) / "cases.o"
    report = tmp_path_factory.mktemp("sass") / "report.json"
    words = [ROOT / "benchmarks" / "check_sass.py", compiled, "--json", report]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "10 kernels, 8 not as they should be" in done.stdout
    return {(row["name"], row["architecture"]): row for row in json.loads(report.read_text())}


@needs_tools
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("kernel", "problems"), [
    ("good_vector_kernel", []),
    ("narrow_vector_kernel", ["no load of 16 bytes", "no store of 16 bytes"]),
    ("double_kernel", ["float64 instructions"]),
    ("spilling_kernel", ["bytes of stack", "accesses of local memory"]),
    ("crowded_kernel", ["occupancy 0."]),
])  # fmt: skip
def test_kernel_with_one_mistake_is_reported_for_that_alone(
    rows: dict[tuple[str, str], dict[str, object]], kernel: str, problems: list[str],
    architecture: str,
) -> None:  # fmt: skip
    found = rows[kernel, architecture]["problems"]
    assert isinstance(found, list)
    assert len(found) == len(problems)
    assert all(words in sentence for words, sentence in zip(problems, found, strict=True))


@needs_tools
def test_launch_bound_and_shared_memory_are_read_from_the_code(
    rows: dict[tuple[str, str], dict[str, object]],
) -> None:
    crowded, spilling = rows["crowded_kernel", "sm_90"], rows["spilling_kernel", "sm_90"]
    assert (crowded["max_threads"], spilling["max_threads"]) == (64, 1024)
    assert crowded["shared"] == 40 * 1024 + 1024, "with what the system takes per block"
    assert spilling["registers"] == 32


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "part"),
    [
        (32, 0, 1024, 1.0), (33, 0, 1024, 0.5), (32, 0, 32, 0.5), (64, 0, 256, 0.5),
        (65, 0, 256, 0.375), (255, 0, 256, 0.125), (16, 100 * 1024, 512, 0.5), (16, 0, 48, 1.0),
        (120, 0, 32, 0.25),
    ],
)  # fmt: skip
def test_occupancy_is_what_the_occupancy_calculator_says(
    registers: int, shared: int, threads: int, part: float
) -> None:
    """By hand from the limits: 65536 registers, 2048 threads, 32 blocks, 228 KiB."""
    assert check_sass.occupancy("sm_90", Usage(registers, 0, shared), threads) == part


def test_command_without_the_program_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_sass, "in_wheels", lambda program: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["check_sass", "module.so"])
    assert check_sass.main() == 2
    assert "pip install nvidia-cuda-cuobjdump" in capsys.readouterr().err
