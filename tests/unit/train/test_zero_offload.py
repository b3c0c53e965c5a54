"""What is not on the device: the bits of training with all on it, bytes, and files that go."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.train import optim, zero
from tests.unit.train.zero_oracle import (
    assert_equal,
    ragged,
    ragged_loss,
    sharded,
)

CHUNK_NBYTES = 10_000
"""About two blocks of the norms' grid: parameters lie in several chunks."""

RULES = {
    "adamw": lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2)),
    "adamw-8bit": lambda: optim.adamw(1e-2, states="8bit"),
    "momentum": lambda: optim.sgd(0.1, momentum=0.9),
    "lion": lambda: optim.lion(1e-3),
}


def trained(
    world_size: int, stage: int, rule: str, offload: Mapping[str, Any], micro: int = 2, **how: Any
) -> list[Any]:
    if offload:
        how |= {"offload": offload, "chunk_nbytes": CHUNK_NBYTES}
    return sharded(
        ragged, ragged_loss, RULES[rule], world_size=world_size, stage=stage, steps=3, micro=micro,
        **how,
    )  # fmt: skip


def everything(tier: Any, stage: int, *, has_masters: bool = False) -> dict[str, Any]:
    kinds = ["states", *["gradients"] * (stage >= 2), *["weights"] * (stage == 3)]
    return dict.fromkeys([*kinds, *["masters"] * has_masters], tier)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tier", ["host", "file"])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (1, 3), (2, 1), (2, 2), (2, 3), (3, 3)])
def test_offload_changes_no_bit(
    world_size: int, stage: int, tier: str, rule: str, tmp_path: Path
) -> None:
    where = str(tmp_path) if tier == "file" else tier
    want = trained(world_size, stage if world_size > 1 else 0, rule, {})
    assert_equal(trained(world_size, stage, rule, everything(where, stage)), want[0])
    assert not list(tmp_path.iterdir())
