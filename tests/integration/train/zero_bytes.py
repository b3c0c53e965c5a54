"""One rank of a job: steps at all stages, and the bytes that passed through the kernel meanwhile.

python zero_bytes.py OUT
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

import anychip
from anychip.contract import Communicator
from anychip.train import optim, zero
from anychip.train.zero.exchange import Flat
from tests.integration.collectives.cases import loopback_nbytes

NUMEL = 4 << 20
REPEATS = 5
"""Of which the least counts: on a busy machine the kernel sends some packets twice."""


SIZES = [NUMEL // 2, 997, NUMEL // 8, NUMEL // 8 - 1000, 3, NUMEL // 4]
"""Uneven ones; each a unit of stage 3, of which the last stays whole from forward to backward."""


class Row(nn.Module):
    """A parameter whose gradient is the factor."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, factor: float) -> Tensor:
        return self.weight.sum() * factor


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(map(Row, SIZES))

    def forward(self, factor: float) -> Tensor:
        return torch.stack([row(factor) for row in self.rows]).sum()


def step(model: nn.Module, opt: zero.Optimizer, factor: float) -> None:
    opt.backward(model(factor))
    opt.step()
    opt.zero_grad()


def nbytes_of_a_step(comm: Communicator, model: nn.Module, opt: zero.Optimizer) -> int:
    """What the loopback interface has seen, of both ranks."""
    comm.barrier()
    time.sleep(0.05)
    before = loopback_nbytes() if comm.rank == 0 else 0
    comm.barrier()
    step(model, opt, comm.rank + 1.0)
    comm.barrier()
    time.sleep(0.05)
    after = loopback_nbytes() if comm.rank == 0 else 0
    comm.barrier()
    return after - before


def asked(comm: Communicator, opt: zero.Optimizer) -> Counter[str]:
    """Bytes by call so far; stage 3 gathers over a communicator of its own."""
    assert opt.sharded is not None
    exchange = opt.sharded.exchange
    assert isinstance(exchange, Flat)
    comms = {comm, exchange.gather_comm}
    return sum((c.traffic.nbytes for c in comms), Counter[str]())


def main(out: str) -> None:
    """Counts; rank 0 writes a file."""
    torch.set_num_threads(1)
    chip = anychip.use("cpu")
    comm = chip.communicator(timeout_s=60)
    found = []
    for stage in (0, 1, 2, 3):
        model = Rows()
        rule = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
        opt = zero.Optimizer(model, rule, comm, stage=stage)
        step(model, opt, 1.0)  # the first one also tells the order of the buckets
        before = asked(comm, opt)
        seen = [nbytes_of_a_step(comm, model, opt) for _ in range(REPEATS)]
        told = {c: nbytes // REPEATS for c, nbytes in (asked(comm, opt) - before).items()}
        found.append({"seen": seen, "told": told})
    if comm.rank == 0:
        Path(out).write_text(json.dumps(found))
    comm.barrier()
    comm.close()


if __name__ == "__main__":
    main(sys.argv[1])
