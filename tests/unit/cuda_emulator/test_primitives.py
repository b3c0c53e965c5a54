"""Are the operations of warps and blocks what CUDA's manual says, in every order of threads?"""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.cuda_emulator.programs import ROOT, SOURCES, made, run

pytestmark = pytest.mark.grid


@pytest.mark.parametrize("order", ["forward", "reverse", "random", "warp"])
def test_primitives_are_the_manuals_formulas(order: str) -> None:
    found = run("plain", "primitives", order=order)
    assert found.status == 0, found.output
    assert found.output == "38 checks of 112 threads, 0 wrong"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: install the CUDA toolkit")
@pytest.mark.parametrize("program", ["primitives.cu", "seeded_bugs.cu"])
def test_program_compiles_for_a_device_too(program: str) -> None:
    def make(folder: Path) -> None:
        words = ("nvcc", "-std=c++17", "-arch=sm_90", "-DANYCHIP_IS_EMULATED=0", "-c")
        where = ("-I", ROOT / "csrc" / "cuda", SOURCES / program, "-o", folder / "program.o")
        done = subprocess.run([*words, *where], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    assert (made(f"{program.removesuffix('.cu')}_of_nvcc", make) / "program.o").stat().st_size
