"""A loop as torchtitan has it: FSDP2 cuts the model and reduces; anychip's rule updates the shards.

    ANYCHIP_BACKEND=cpu torchrun --standalone --nproc-per-node 2 examples/fsdp2_loop.py

DDP in place of ``fully_shard`` needs no other line. Checkpoints are torch's (``get_state_dict``).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR

import anychip
from anychip.comm import alone
from anychip.train import optim, zero

STEPS = 40


def main() -> list[float]:
    """Trains, and returns the losses of this rank."""
    if not dist.is_initialized():
        dist.init_process_group()
    chip = anychip.use()
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))
    model = nn.Sequential(*blocks, nn.Linear(32, 1)).to(chip.device())
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    # Nobody else: FSDP2 reduces gradients. Of a norm the optimizer adds up all shards.
    optimizer = zero.Optimizer(model, optim.adamw(1e-2), alone(device=chip.device_type))
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    losses = []
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(STEPS):
        x = torch.randn(16, 32, device=chip.device())
        loss = nn.functional.mse_loss(model(x), x[:, :4].sum(1, keepdim=True))
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} at the start, {losses[-1]:.4f} at the end")
    return losses


if __name__ == "__main__":
    main()
