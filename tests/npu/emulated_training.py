"""What test_emulated_training.py runs: ``emulated_training.py cpu|npu alone|ddp|fsdp``.

Prints ``loss VALUE`` for each step, the mean over the ranks, on rank 0.
"""

import os
import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as f

VOCABULARY, LENGTH, WIDTH, HEADS = 67, 16, 32, 2


class Block(nn.Module):
    """Attention and a feed-forward layer, both after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        # CANN's gelu is this one, whatever is asked for.
        return x + self.down(f.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Gpt(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids[:, :-1]) + self.places(torch.arange(LENGTH, device=ids.device))
        for block in self.blocks:
            x = block(x)
        return f.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids[:, 1:].flatten())


def main() -> None:
    device, way = sys.argv[1:]
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    gpt = Gpt()
    ids = torch.randint(0, VOCABULARY, (4, LENGTH + 1)).chunk(ranks)[rank]
    if device == "npu":
        torch.accelerator.set_device_index(rank)
    gpt, ids = gpt.to(device), ids.to(device)
    model: nn.Module = gpt
    if way != "alone":
        torch.distributed.init_process_group("hccl")
    if way == "ddp":
        model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    if way == "fsdp":
        for block in gpt.blocks:
            fully_shard(block)
        fully_shard(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, weight_decay=0.1)
    for _ in range(4):
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if way != "alone":
            torch.distributed.all_reduce(mean)
        if rank == 0:
            print("loss", mean.item() / ranks, flush=True)
    if way != "alone":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
