"""Kernels that memory bounds, at training sizes: bytes of the specification over time.

Next to a copy in the same rounds, torch, torch.compile, Liger-Kernel and QuACK.

Each call takes other tensors than the one before it, so that none is found in the L2 cache.
"""

from __future__ import annotations

from functools import partial

import click
import torch
from torch import Tensor

from anychip.bench import operators
from anychip.bench.case import Make
from anychip.contract import SampleMaker
from benchmarks.cuda.cases import LISTS, MAKES
from benchmarks.cuda.stage import Stage, main, stage

ROTATE_NBYTES = 1 << 30
"""Five times the largest L2 of a device so far and more."""
NORMS = ((8192, 1024), (8192, 4096), (16384, 8192), (8192, 16384), (65536, 4096))
GATES = ((8192, 4096), (8192, 14336), (65536, 4096))
LOGITS = ((8192, 32000), (8192, 50257), (8192, 128256), (4096, 152064))
SUMS = ((8192, 4096), (16384, 8192))
ROWS = ((16384, 4096),)
TINY = ((64, 128),)


class OnDevice(SampleMaker):
    """Draws on the device: a host needs minutes for such sizes."""

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, device=self.device, dtype=torch.float32)
        return (x * scale).to(dtype or self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=self.device)


@stage(seconds=120.0)
@click.option("--only", multiple=True, metavar="OP", help="Operators; all when not given.")
@click.option("--no-compile", is_flag=True, help="Without torch.compile.")
def command(stage: Stage, only: tuple[str, ...], no_compile: bool) -> None:
    """Measure bandwidth of memory-bound operators in bfloat16."""
    maker = OnDevice(stage.chip.device(), torch.bfloat16)
    for name, make in cases(stage).items():
        if only and name.partition(" ")[0] not in only:
            continue
        if not stage.has_time(name):
            break
        stage.attempt(name, measure, stage, name, make, maker, not (no_compile or stage.tiny))


def measure(stage: Stage, name: str, make: Make | None, maker: SampleMaker, compiled: bool) -> None:
    """One operator at one size; without a maker of cases, the case of anychip.bench."""
    report = operators.run(
        stage.chip,
        rounds=3 if stage.tiny else 9,
        progress=lambda _: None,
        dtype=torch.bfloat16,
        compiled=compiled,
        reference=False,
        window=0.002 if stage.tiny else 0.02,
        names=(name,),
        cases=None if make is None else {name: make},
        maker=maker,
        rotate_nbytes=1 << 16 if stage.tiny else ROTATE_NBYTES,
    )
    stage.reports.append(report)


def cases(stage: Stage) -> dict[str, Make | None]:
    """By operator and sizes; those in the largest part of a training step come first."""
    sizes = {"norms": NORMS, "gates": GATES, "logits": LOGITS, "sums": SUMS, "rows": ROWS}
    found: dict[str, Make | None] = {}
    for kind, makes in MAKES.items():
        for rows, width in TINY if stage.tiny else sizes[kind]:
            for name, make in makes.items():
                found[f"{name} {rows} x {width}"] = partial(make, stage, rows, width)
    return found | dict.fromkeys(LISTS)


if __name__ == "__main__":
    main(command)
