"""A loop for Accelerate with anychip's optimizer, on any number of ranks and at any ZeRO stage.

    python examples/accelerate_loop.py
    ANYCHIP_BACKEND=cpu torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py

What is anychip's: the import of ``Accelerator``, and the optimizer.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import anychip
from anychip.integrations.accelerate import Accelerator
from anychip.train import optim, zero

STEPS = 40


def main() -> list[float]:
    """Trains, and returns the losses, each the mean over the ranks."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    chip = anychip.use()
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))
    model = nn.Sequential(*blocks, nn.Linear(32, 1))
    optimizer = zero.Optimizer(model, optim.adamw(1e-2), chip.communicator(), stage=2)
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    inputs = torch.randn(1024, 32)
    rows = TensorDataset(inputs, inputs[:, :4].sum(1, keepdim=True))
    loader = DataLoader(rows, batch_size=16)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses: list[float] = []
    while len(losses) < STEPS:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.print(f"loss {losses[0]:.4f} at the start, {losses[-1]:.4f} at the end")
    return losses


if __name__ == "__main__":
    main()
