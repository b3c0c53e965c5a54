"""Lightning's Trainer with anychip's optimizer, on any number of ranks and at any ZeRO stage.

    python examples/lightning_trainer.py
    ANYCHIP_BACKEND=cpu python examples/lightning_trainer.py 2

What is anychip's: ``strategy=ZeroStrategy()``, and the optimizer that ``configure_optimizers``
returns. Needs ``pip install 'anychip[lightning]'``.
"""

from __future__ import annotations

import sys
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import anychip
from anychip.integrations.lightning import ZeroStrategy
from anychip.train import optim, zero

STEPS = 40


class Regression(pl.LightningModule):
    """Learns a sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(32, 1)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.mse_loss(self.head(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = zero.Optimizer(self, optim.adamw(1e-2), anychip.use().communicator(), stage=3)
        scheduler = {"scheduler": CosineAnnealingLR(optimizer, STEPS), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def main(ranks: int = 1) -> list[float]:
    """Trains, and returns the losses of this rank."""
    model, inputs = Regression(), torch.randn(1024, 32)
    rows = TensorDataset(inputs, inputs[:, :4].sum(1, keepdim=True))
    trainer = pl.Trainer(
        accelerator="cpu", devices=ranks, strategy=ZeroStrategy(), max_steps=STEPS, logger=False,
        gradient_clip_val=1.0, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(rows, batch_size=16))
    if trainer.is_global_zero:
        print(f"loss {model.losses[0]:.4f} at the start, {model.losses[-1]:.4f} at the end")
    return model.losses


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
