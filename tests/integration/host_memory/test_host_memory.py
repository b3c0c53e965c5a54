"""Are torch's tensors of the host in blocks that are used again, where the user asks for it?"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)], env={**os.environ, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_cases_hold_in_a_process_that_keeps() -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / "kept_cases.py")
    assert done.returncode == 0, done.stdout[-6000:]


def test_variable_keeps_and_the_suite_trusts_the_memory() -> None:
    words = ("-m", "anychip", "conformance", "--backend", "cpu", "--chapter", "memory")
    done = run(*words, ANYCHIP_HOST_MEMORY="kept")
    assert done.returncode == 0, done.stdout + done.stderr
    code = "import anychip; from anychip import host_memory as h; anychip.use('cpu'); " \
        "import torch; torch.ones(1 << 20); print(h.statistics().taken)"  # fmt: skip
    for value, taken in (("kept", "1"), ("torch", "0"), ("", "0")):
        done = run("-c", code, ANYCHIP_HOST_MEMORY=value)
        assert done.stdout.split() == [taken], done.stderr


@pytest.mark.parametrize(("environment", "sentence"), [
    ({"ANYCHIP_HOST_MEMORY": "keep"}, "ANYCHIP_HOST_MEMORY: kept or torch expected, got"),
    ({"ANYCHIP_HOST_MEMORY": "kept", "PATH": "/nowhere", "ANYCHIP_CACHE_DIR": "{folder}"},
     "the allocator of host memory for torch has to be built, and there is no C++ compiler"),
])  # fmt: skip
def test_what_cannot_be_done_is_said_in_a_sentence(
    environment: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    there = {name: value.format(folder=tmp_path) for name, value in environment.items()}
    done = run("-m", "anychip", "train", "--steps", "1", "--out", tmp_path / "run", **there)
    assert done.returncode in (2, 3), done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
