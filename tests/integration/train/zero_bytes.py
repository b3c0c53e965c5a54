"""One rank of a job, and the bytes that passed through the kernel meanwhile: rank 0 writes them.

python zero_bytes.py loopback OUT: steps at all stages.
python zero_bytes.py cable OUT: between two hosts, while weights are gathered.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import anychip
from anychip.contract import Communicator
from anychip.train import optim, zero
from anychip.train.zero.exchange import Flat
from tests.integration.collectives.cases import loopback_nbytes
from tests.integration.two_hosts import cable_nbytes
from tests.unit.train.zero_oracle import descend

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


def seen(comm: Communicator, counter: Callable[[], int]) -> int:
    """What a counter of the kernel's has seen, when all ranks have come here; 0 but on rank 0."""
    comm.barrier()
    time.sleep(0.05)
    count = counter() if comm.rank == 0 else 0
    comm.barrier()
    return count


def nbytes_of_a_step(comm: Communicator, model: nn.Module, opt: zero.Optimizer) -> int:
    """What the loopback interface has seen, of both ranks."""
    before = seen(comm, loopback_nbytes)
    descend(opt, model(comm.rank + 1.0))
    return seen(comm, loopback_nbytes) - before


def asked(comm: Communicator, opt: zero.Optimizer) -> Counter[str]:
    """Bytes by call so far; stage 3 gathers over a communicator of its own."""
    assert opt.sharded is not None
    exchange = opt.sharded.exchange
    assert isinstance(exchange, Flat)
    comms = {comm, exchange.gather_comm}
    return sum((c.traffic.nbytes for c in comms), Counter[str]())


def loopback(comm: Communicator) -> Any:
    found = []
    for stage in (0, 1, 2, 3):
        model = Rows()
        rule = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
        opt = zero.Optimizer(model, rule, comm, stage=stage)
        descend(opt, model(1.0))  # the first one also tells the order of the buckets
        before = asked(comm, opt)
        nbytes = [nbytes_of_a_step(comm, model, opt) for _ in range(REPEATS)]
        told = {c: nbytes // REPEATS for c, nbytes in (asked(comm, opt) - before).items()}
        found.append({"seen": nbytes, "told": told})
    return found


def cable(comm: Communicator) -> Any:
    """Forward and backward of a batch whose gradients stay: what passed in each."""
    found = {}
    for kept_by in (None, comm.world_size // 2):
        model = Rows()
        opt = zero.Optimizer(model, optim.sgd(0.1), comm, stage=3, secondary_group=kept_by)
        descend(opt, model(1.0))  # the first one also tells the order of the units
        with opt.no_sync():
            counts = [seen(comm, cable_nbytes)]
            loss = model(1.0)
            counts.append(seen(comm, cable_nbytes))
            opt.backward(loss)
            counts.append(seen(comm, cable_nbytes))
        found[str(kept_by)] = [counts[1] - counts[0], counts[2] - counts[1]]
    return found


def main(what: str, out: str) -> None:
    torch.set_num_threads(1)
    comm = anychip.use("cpu").communicator(timeout_s=60)
    found = {"loopback": loopback, "cable": cable}[what](comm)
    if comm.rank == 0:
        Path(out).write_text(json.dumps(found))
    comm.barrier()
    comm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
