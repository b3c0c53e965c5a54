"""A training loop of one's own on several ranks: data parallel with ZeRO-2, on any chip.

    torchrun --standalone --nproc-per-node 2 examples/own_loop_ranks.py [BACKEND [DIRECTORY]]

Under torchrun the backend is named, or ANYCHIP_BACKEND is set; alone it is a run with one rank.
Started again it goes on from its last checkpoint, also on another chip or with other ranks.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import anychip
from anychip import ops
from anychip.train import checkpoint, data, optim, precision, random, zero

STEPS, CONTEXT, WIDTH = 60, 32, 64


class Recurrent(nn.Module):
    """Predicts the next byte: a GRU of torch between operators that the chip may have."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(data.VOCAB_SIZE, WIDTH)
        self.recurrence = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, data.VOCAB_SIZE)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss; both arguments are (B, S) int64."""
        x = self.embedding(tokens)
        x = x + ops.dropout(self.recurrence(x)[0], random.draw(x.device), p=0.1)
        logits = self.head(ops.rms_norm(x, self.norm, eps=1e-6))
        return ops.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(backend: str | None = None, out: str = "runs/own_loop_ranks", steps: int = STEPS) -> None:
    """Trains to a step, with a checkpoint every ten; the first rank prints the losses."""
    chip = anychip.use(backend)
    torch.manual_seed(0)
    model = Recurrent().to(chip.device())
    comm, policy = chip.communicator(), precision.policy("fp32", chip)
    torch.manual_seed(1 + comm.rank)  # other dropout on every rank
    loader = data.Loader(
        data.python_documentation(),
        context=CONTEXT,
        batch_size=8,
        device=chip.device(),
        num_batches=steps,
        rank=comm.rank,
        world_size=comm.world_size,
    )
    rule = optim.chain(
        optim.clip_by_global_norm(1.0), optim.adamw(lr=optim.warmup_cosine(1e-2, 10, STEPS))
    )
    opt = zero.Optimizer(model, rule, comm, stage=2, precision=policy)
    state = checkpoint.resume(out, model=model, optimizer=opt, data=loader, comm=comm)
    for step, (x, y) in enumerate(loader, state.step):
        with policy.autocast():
            loss = model(x, y)
        opt.backward(loss)
        result = opt.step()
        opt.zero_grad()
        mean = loss.detach().clone()
        comm.all_reduce(mean, "avg")
        if comm.rank == 0:
            print(f"step {step + 1}: loss {mean.item():.9g}, learning rate {result.lr:.2e}")
        if (step + 1) % 10 == 0:
            parts = {"model": model, "optimizer": opt, "data": loader}
            checkpoint.save(out, step=step + 1, **parts, comm=comm)
    if comm.rank == 0:
        print(anychip.provenance())


if __name__ == "__main__":
    main(*sys.argv[1:3], steps=int((sys.argv[3:] or [STEPS])[0]))
