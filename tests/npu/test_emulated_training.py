"""A small GPT trains on the emulated CANN as on the CPU: alone, by DDP and by FSDP2 on hccl."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch_npu")

STEPS = 4
RUN = Path(__file__).with_name("emulated_training.py")


def losses(*arguments: str, processes: int = 1) -> list[float]:
    """The losses that the script prints, from rank 0."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else []), str(RUN), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [float(line.split()[1]) for line in run.stdout.splitlines() if line.startswith("loss")]


@pytest.fixture(scope="module")
def on_cpu() -> list[float]:
    return losses("cpu", "alone")


def test_cpu_curve_falls(on_cpu: list[float]) -> None:
    assert len(on_cpu) == STEPS
    assert on_cpu[-1] < on_cpu[0] / 2


@pytest.mark.parametrize(
    ("way", "processes"), [("alone", 1), ("ddp", 2), ("fsdp", 2)], ids=["alone", "ddp", "fsdp2"]
)
def test_training_on_emulated_chip_follows_the_cpu(
    way: str, processes: int, on_cpu: list[float]
) -> None:
    # Float32 sums in another order, carried through four steps of AdamW.
    assert losses("npu", way, processes=processes) == pytest.approx(on_cpu, rel=1e-5)
