"""A training loop of one's own: any ``nn.Module``, any chip, and anychip's parts for the rest.

    python examples/own_loop.py [BACKEND] [DIRECTORY]

The model is plain PyTorch. Interrupt it and start it again: it goes on from its last checkpoint.
``own_loop_ranks.py`` is the same with several ranks.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import anychip
from anychip.train import checkpoint, data, optim, precision, zero

STEPS, CONTEXT = 60, 64


class Recurrent(nn.Module):
    """Predicts the next byte with a GRU."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(data.VOCAB_SIZE, width)
        self.recurrence = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, data.VOCAB_SIZE)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss; both arguments are (B, S) int64."""
        states, _ = self.recurrence(self.embedding(tokens))
        return nn.functional.cross_entropy(self.head(states).flatten(0, 1), targets.flatten())


def main(backend: str | None = None, out: str = "runs/own_loop") -> float:
    """Trains, and returns the last loss."""
    chip = anychip.use(backend)
    print(chip.decision)
    torch.manual_seed(0)
    model = Recurrent().to(chip.device())
    loader = data.Loader(
        data.python_documentation(),
        context=CONTEXT,
        batch_size=16,
        device=chip.device(),
        num_batches=STEPS,
    )

    comm, policy = chip.communicator(), precision.policy("auto", chip)
    rule = optim.chain(
        optim.clip_by_global_norm(1.0), optim.adamw(lr=optim.warmup_cosine(1e-2, 10, STEPS))
    )
    opt = zero.Optimizer(model, rule, comm, stage=2, precision=policy)
    state = checkpoint.resume(out, model=model, optimizer=opt, data=loader)
    loss = torch.tensor(float("nan"))
    for step, (x, y) in enumerate(loader, state.step):
        with policy.autocast():
            loss = model(x, y)
        opt.backward(loss)
        result = opt.step()
        opt.zero_grad()
        if (step + 1) % 20 == 0:
            checkpoint.save(out, step=step + 1, model=model, optimizer=opt, data=loader)
            print(f"step {step + 1}: loss {loss.item():.4f}, learning rate {result.lr:.2e}")
    return loss.item()


if __name__ == "__main__":
    main(*sys.argv[1:])
