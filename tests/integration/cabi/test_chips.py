"""Do chips that are C libraries work as torch devices, and does training run on one?

One process for each chip and file of cases: torch has one private-use device type per process.
Do ranks on them communicate, by the library or by way of the host?
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm_python

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SMALL = ("model.width=32", "model.layers=1", "model.context=16", "data.batch_size=4")
# Two devices of PoCL's; other drivers do not know the name.
ENVIRONMENT = {**os.environ, "POCL_DEVICES": "pthread pthread"}


@pytest.mark.parametrize(("chip", "cases"), [
    ("minichip", "device_cases.py"), ("asyncchip", "kernel_cases.py stream_cases.py"),
    ("opencl", "opencl_cases.py"),
    pytest.param("asyncchip", "device_cases.py", marks=pytest.mark.grid),
    pytest.param("opencl", "device_cases.py", marks=pytest.mark.grid),
    pytest.param("minichip", "compare_cases.py", marks=pytest.mark.grid),
])  # fmt: skip
def test_device_of_a_library_does_what_torch_asks(
    libraries: dict[str, Path], chip: str, cases: str
) -> None:
    files = [str(HERE / file) for file in cases.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    own = {**ENVIRONMENT, "ANYCHIP_TEST_CHIP": str(libraries[chip])}
    done = subprocess.run(command, env=own, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def trained(out: Path, *words: str) -> list[float]:
    """The losses of a small run."""
    command = ["-m", "anychip", "train", *SMALL, *words, "--json", "--out", str(out)]
    done = warm_python.run(*command, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()
    ]
    return [row["loss"] for row in rows]


@pytest.mark.grid
def test_comparison_stops_at_the_first_call_that_differs(
    libraries: dict[str, Path], tmp_path: Path
) -> None:
    """On two ranks: a sum that the chip gets wrong for one shape, in one element."""
    library = libraries["wrongchip"]
    python, out = [sys.executable, "-m"], tmp_path / "out"
    words = ["train", *SMALL, "--backend", library, "--compare", "cpu", "--steps", "3"]
    command = [*python, "anychip", *words, "--nproc", "2", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "step 1: aten.add.Tensor(self=float32[4, 16, 32], other=float32[" in done.stderr
    assert "result 0 at (3, 15, 30): got" in done.stderr
    assert "1 of 2048 elements" in done.stderr
    again = [*python, "anychip.train.comparing", out / "difference.pt", library, "cpu"]
    done = subprocess.run(again, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "step 0: aten.add.Tensor(self=float32[4, 16, 32]" in done.stderr


def losses(library: Path, tmp_path: Path, *words: str) -> tuple[list[float], list[float]]:
    """Of a run on a library and of the same one on the host."""
    on_chip = trained(tmp_path / "chip", *words, "--backend", str(library))
    return on_chip, trained(tmp_path / "host", *words, "--backend", "cpu")


@pytest.mark.parametrize(("name", "offload"), [
    ("minichip", ""), *(
        pytest.param(*case, marks=pytest.mark.grid) for case in (
            ("minichip", "host"), ("opencl", ""), ("asyncchip", ""), ("asyncchip", "host"),
            ("asyncchip", "file"),
        )
    ),
])  # fmt: skip
def test_training_on_a_library_follows_the_hosts_losses(
    libraries: dict[str, Path], tmp_path: Path, name: str, offload: str
) -> None:
    place = tmp_path if offload == "file" else offload
    tiers = ", ".join(f"{kind}={place}" for kind in ("states", "gradients", "weights"))
    words = ("optimizer.stage=3", f"optimizer.offload={tiers}") if offload else ()
    chip, host = losses(libraries[name], tmp_path, "--steps", "50", *words)
    assert len(chip) == len(host)
    assert chip[-1] < chip[0] - 1
    # Both compute in float32; the order of sums differs, and functions' last digits.
    assert chip == pytest.approx(host, rel=1e-4)


@pytest.mark.grid
@pytest.mark.parametrize("name", ["minichip", "opencl", "asyncchip"])
@pytest.mark.parametrize("stage", range(4))
def test_zero_on_two_ranks_of_a_library_follows_the_hosts_losses(
    libraries: dict[str, Path], tmp_path: Path, stage: int, name: str
) -> None:
    words = ("--steps", "8", "--nproc", "2", f"optimizer.stage={stage}")
    chip, host = losses(libraries[name], tmp_path, *words)
    assert chip == pytest.approx(host, rel=1e-4)


WRONG = {
    "event-done-early": "streams/event.query", "event-never-waits": "streams/event.wait",
    "stream-always-idle": "streams/stream.query",
    "operator-on-default-stream": "streams/operators.apart",
    "copy-returns-early": "memory/allocate/apart", "copy-drops-tail": "memory/copy_async/bytes",
    "free-above-total": "memory/info", "ignores-strides": "operators/gelu/design",
    "one-device-too-many": "device/index/memory.allocate.every",
    "writes-before-enotsup": "operators/clip/design",
}  # fmt: skip
"""Mistakes that no check of a table can refuse, and the case that has to find each."""


@pytest.mark.grid
@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_wrong_library_is_found_by_the_suite(libraries: dict[str, Path], wrong: str | None) -> None:
    cases = [WRONG[wrong]] if wrong else sorted({*WRONG.values()})
    suite = [sys.executable, "-m", "anychip", "conformance", "--jobs", "1"]
    command = [*suite, "--backend", libraries["mistakenchip"], "-k", " or ".join(cases)]
    environment = {**os.environ, "WRONG_CHIP": wrong or "", "ASYNCCHIP_DELAY_US": "5000"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert bool(done.returncode) == bool(wrong), done.stdout[-3000:] + done.stderr[-2000:]
    # Who reads the host's memory too late may end the process before the case does.
    has_crashed = wrong == "copy-returns-early" and done.returncode < 0
    assert not wrong or has_crashed or f"FAILED {cases[0]}" in done.stdout


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
