"""One rank of a job on two hosts: what passes between them while weights are gathered.

python cable_bytes.py OUT
"""

import json
import sys
import time
from pathlib import Path

import torch

import anychip
from anychip.contract import Communicator
from anychip.train import optim, zero
from tests.integration.train.zero_bytes import Rows
from tests.integration.two_hosts import cable_nbytes


def between_hosts(comm: Communicator) -> int:
    """The counter of the first host's end; where there is none, 0."""
    comm.barrier()
    time.sleep(0.05)
    count = cable_nbytes() if comm.rank == 0 else 0
    comm.barrier()
    return count


def main(out: str) -> None:
    """Forward and backward of a batch whose gradients stay; rank 0 writes what passed in each."""
    torch.set_num_threads(1)
    comm = anychip.use("cpu").communicator(timeout_s=60)
    found = {}
    for kept_by in (None, comm.world_size // 2):
        model = Rows()
        opt = zero.Optimizer(model, optim.sgd(0.1), comm, stage=3, secondary_group=kept_by)
        opt.backward(model(1.0))  # the first one also tells the order of the units
        opt.step()
        opt.zero_grad()
        with opt.no_sync():
            counts = [between_hosts(comm)]
            loss = model(1.0)
            counts.append(between_hosts(comm))
            opt.backward(loss)
            counts.append(between_hosts(comm))
        found[str(kept_by)] = [counts[1] - counts[0], counts[2] - counts[1]]
    if comm.rank == 0:
        Path(out).write_text(json.dumps(found))
    comm.barrier()
    comm.close()


if __name__ == "__main__":
    main(sys.argv[1])
