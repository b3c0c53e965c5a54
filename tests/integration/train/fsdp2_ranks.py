"""Four ranks of torch's own FSDP2: save a checkpoint of torch's, and load one of ours.

    python fsdp2_ranks.py DIRECTORY PORT

DIRECTORY/ours is read; DIRECTORY/theirs-MESH and titan-MESH (names as torchtitan has them) are
written, and DIRECTORY/*.pt, whole states: ``saved`` of what theirs has, ``loaded`` of ours.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORLD_SIZE = 4
MESHES = ("4", "2x2")
"""Shards, or replicas of shards."""


def make() -> nn.Module:
    """Sizes that no number of ranks divides, and a tied weight."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(53, 67), nn.LayerNorm(67), nn.Linear(67, 31, bias=False),
        nn.Linear(31, 53, bias=False), nn.Linear(53, 67, bias=False),
    )  # fmt: skip
    model[4].weight = model[0].weight
    model.register_buffer("mean", torch.arange(5.0))
    return model


def loss(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(6, 53, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


def work(rank: int, directory: Path, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    for mesh in MESHES:
        save_and_load(directory, mesh)
    dist.destroy_process_group()


def save_and_load(directory: Path, mesh: str) -> None:
    from anychip.train.checkpoint.dcp import Reader

    sizes = tuple(map(int, mesh.split("x")))
    names = ("shard",) if len(sizes) == 1 else ("replicate", "shard")
    model = make()
    fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=directory / f"theirs-{mesh}")
    dcp.save(
        {**weights, "optimizer": get_state_dict(model, optimizer, options=_FLAT)[1]},
        checkpoint_id=directory / f"titan-{mesh}",
    )
    keep(model, optimizer, directory / f"saved-{mesh}.pt")
    given: dict[str, Any] = {"model": weights, "optimizer": {"state": states["state"]}}
    dcp.load(given, storage_reader=Reader(directory / "ours"))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    keep(model, optimizer, directory / f"loaded-{mesh}.pt")


_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def keep(model: nn.Module, optimizer: torch.optim.Optimizer, file: Path) -> None:
    """Whole, as torch gathers it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, states = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "state": states["state"]}, file)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    given = (Path(sys.argv[1]), int(sys.argv[2]))
    torch.multiprocessing.start_processes(work, given, nprocs=WORLD_SIZE, start_method="fork")
