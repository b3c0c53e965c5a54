"""Small decoders on two ranks, for the tests of ZeRO stage 3."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anychip.contract import Communicator
from anychip.train import models, optim, zero
from anychip.train.models import GPTConfig, LlamaConfig
from tests.unit.train.zero_oracle import on_models

SIZES = {"vocab_size": 97, "context": 16, "layers": 4, "heads": 2, "width": 48}


def rule() -> optim.Rule:
    return optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, weight_decay=0.1))


def decoder(kind: str = "gpt", how: str = "plain") -> nn.Module:
    """With a position embedding and a matrix of a block frozen; ``how`` its blocks run."""
    torch.manual_seed(7)
    model: nn.Module = models.build(
        GPTConfig(**SIZES) if kind == "gpt" else LlamaConfig(**SIZES)  # type: ignore[arg-type]
    )
    params = list(model.named_parameters())
    frozen = [name for name, _ in params if name.endswith(("wpe.weight", "1.mlp.c_fc.weight"))]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    if how.startswith("checkpoint"):
        reentrant = how == "checkpoint reentrant"
        again = partial(checkpoint, model.run_block, use_reentrant=reentrant)
        model.run_block = again  # type: ignore[assignment]
    if how == "compiled":
        for block in model.blocks():  # type: ignore[operator]
            block.forward = torch.compile(block.forward, backend="aot_eager")
    return model


def decoder_loss(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    tokens = torch.randint(0, 97, (2, 17), generator=generator)
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
    return loss


def on_two(work: Callable[[Communicator, nn.Module], Any], build: Any = decoder) -> list[Any]:
    """On two ranks, each with a model of its own."""
    return on_models(2, build, work)


def optimizer(model: nn.Module, comm: Communicator, **options: Any) -> zero.Optimizer:
    return zero.Optimizer(model, rule(), comm, stage=3, **options)


def parts(opt: zero.Optimizer) -> zero.ShardedModel:
    assert opt.sharded is not None
    return opt.sharded
