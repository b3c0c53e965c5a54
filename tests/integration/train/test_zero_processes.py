"""Stages 0, 1 and 2 between real processes, against one process, bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import anychip
from tests.integration.train import zero_rank
from tests.unit.train.zero_oracle import Trained, assert_equal, ragged, ragged_loss, serial

ROOT = Path(__file__).parents[3]


WORLD_SIZE = 2


@pytest.mark.grid
def test_twenty_steps_between_processes_equal_one_process_bit_for_bit(tmp_path: Path) -> None:
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "tests.integration.train.zero_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD_SIZE), str(tmp_path / "store"), str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    outputs = [process.communicate(timeout=200)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * WORLD_SIZE, "\n".join(outputs)
    anychip.use("cpu")
    want = serial(
        ragged, ragged_loss, zero_rank.rule(), world_size=WORLD_SIZE, steps=zero_rank.STEPS, micro=2
    )
    for rank in range(WORLD_SIZE):
        for trained in torch.load(tmp_path / f"rank{rank}.pt", weights_only=True):
            assert_equal([Trained(**trained)], want)
