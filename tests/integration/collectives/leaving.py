"""What the others are told when a rank closes in good order and they go on."""

import time

import torch

from anychip.contract import Communicator


def leaves(comm: Communicator, absent: int) -> None:
    """The others make a call with it."""
    comm.barrier()
    if comm.rank == absent:
        time.sleep(0.2)
        return
    comm.barrier()


def leaves_apart(comm: Communicator, absent: int) -> None:
    """The others make calls without it, for two seconds."""
    others = [rank for rank in range(comm.world_size) if rank != absent]
    group = comm.split([[absent], others], name="others")
    comm.barrier()
    if comm.rank != absent:
        for _ in range(20):
            group.all_reduce(torch.ones(1))
            time.sleep(0.1)
