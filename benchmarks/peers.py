"""How torch and DeepSpeed train the decoder on several ranks, set up as their documentation says.

torch: DistributedDataParallel, FSDP2 (``fully_shard`` of each block and of the whole), and 1F1B of
torch.distributed.pipelining with the stages that ours has. All with the fused AdamW.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anychip import ops
from anychip.bench.rank import Place
from benchmarks.trainees import LEARNING_RATE, Sizes, Trainee, batch, decoder, stage_of


def missing(candidate: str) -> str | None:
    """Why a candidate cannot run here, as far as its packages go."""
    if candidate.startswith("DeepSpeed") and find_spec("deepspeed") is None:
        return "deepspeed is not installed (pip install anychip[bench])"
    return None


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)


def _trainee(model: nn.Module, sizes: Sizes, place: Place) -> Trainee:
    tokens, targets = batch(sizes, place, whole=False)
    optimizer = _adamw(model)

    def step() -> Tensor:
        loss: Tensor = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainee(step, {})


def _ddp(sizes: Sizes, place: Place) -> Trainee:
    model = decoder(sizes, place.device)
    return _trainee(nn.parallel.DistributedDataParallel(model), sizes, place)


def _fsdp2(sizes: Sizes, place: Place) -> Trainee:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = decoder(sizes, place.device)
    mesh = init_device_mesh(place.device.type, (place.world_size,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _trainee(model, sizes, place)


def _one_f_one_b(sizes: Sizes, place: Place) -> Trainee:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    layers = stage_of(decoder(sizes, torch.device("cpu")), sizes, place)
    stage = PipelineStage(layers, place.rank, place.world_size, place.device)
    schedule = Schedule1F1B(stage, sizes.microbatches, loss_fn=ops.cross_entropy)
    tokens, targets = batch(sizes, place, whole=True)
    optimizer = _adamw(layers)

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        if stage.is_first:
            schedule.step(tokens)
        else:
            schedule.step(target=targets if stage.is_last else None, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None

    return Trainee(step, {"layers": f"{layers.layers.start}-{layers.layers.stop - 1}"})


def _zero_of_deepspeed(sizes: Sizes, place: Place, *, stage: int) -> Trainee:
    deepspeed = importlib.import_module("deepspeed")
    os.environ.setdefault("LOCAL_RANK", str(place.rank))  # it wants to be started by its launcher
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)
    model = decoder(sizes, place.device)
    config: dict[str, Any] = {
        "train_batch_size": sizes.batch,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model), config=config)
    tokens, targets = batch(sizes, place, whole=False)

    def step() -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Trainee(step, {})


DDP = "torch DDP"
CANDIDATES: dict[str, Callable[[Sizes, Place], Trainee]] = {
    DDP: _ddp,
    "torch FSDP2": _fsdp2,
    "torch 1F1B": _one_f_one_b,
    "DeepSpeed ZeRO-2": partial(_zero_of_deepspeed, stage=2),
    "DeepSpeed ZeRO-3": partial(_zero_of_deepspeed, stage=3),
}
