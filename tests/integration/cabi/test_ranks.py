"""Do ranks on chips that are C libraries communicate, by the library or by way of the host?

The cases are in ``rank_cases.py``, in one run of two processes for each chip.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TORCHS = ["ddp", "fsdp2", "dtensor"]


@pytest.mark.parametrize(("chip", "cases"), [
    ("minichip", ["calls", "zero_3"]), ("sharechip", ["calls", "zero_3", "wrong"]),
    pytest.param("minichip", TORCHS, marks=pytest.mark.grid),
    pytest.param("sharechip", TORCHS, marks=pytest.mark.grid),
])  # fmt: skip
def test_two_ranks_get_what_one_process_gets(
    libraries: dict[str, Path], tmp_path: Path, chip: str, cases: list[str]
) -> None:
    command = [sys.executable, HERE / "rank_cases.py", libraries[chip], tmp_path, *cases]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for rank in range(2):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text(encoding="utf-8"))
        assert told == dict.fromkeys(cases, ""), told[list(told)[-1]] + done.stderr[-2000:]


@pytest.mark.grid
def test_library_with_collectives_passes_their_chapter(libraries: dict[str, Path]) -> None:
    words = ["--backend", libraries["sharechip"], "--chapter", "collectives"]
    command = [sys.executable, "-m", "anychip", "conformance", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
