"""One rank of a job: trains the ragged model at all stages and saves what came out.

python zero_rank.py RANK WORLD_SIZE STORE OUT
"""

import sys

import torch
import torch.distributed as dist

import anychip
from anychip.train import optim, zero
from tests.unit.train.zero_oracle import ragged, ragged_loss, units_of, values_of

STEPS = 20


def rule() -> optim.Rule:
    return optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, weight_decay=0.1))


def main(rank: int, world_size: int, store: str, out: str) -> None:
    """Trains; every rank writes a file of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    comm = anychip.use("cpu").communicator(timeout_s=60)
    found = []
    for stage in (0, 1, 2, 3):
        model = ragged()
        units = units_of(model)
        opt = zero.Optimizer(model, rule(), comm, stage=stage, bucket_nbytes=12_000, units=units)
        norms = []
        for step in range(STEPS):
            with opt.no_sync():
                opt.backward(ragged_loss(model, step, rank, 0))
            opt.backward(ragged_loss(model, step, rank, 1))
            norms.append(opt.step().grad_norm)
            opt.zero_grad()
        found.append({"params": values_of(model, opt), "norms": norms, "state": opt.state_dict()})
    torch.save(found, f"{out}/rank{rank}.pt")
    comm.barrier()
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
