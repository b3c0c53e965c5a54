"""What is measured when two processes train: ours, cut over them in each way that we have.

All train one decoder on one batch: a candidate differs in how ranks share the work, and in nothing
else. Each is made in a pair of processes of its own, so that its peak memory is its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anychip.bench.rank import Place
from anychip.comm import alone
from anychip.train import optim, parallel, zero
from anychip.train.models import GPT, GPTConfig
from benchmarks.late_link import Clock, late

LEARNING_RATE = 3e-4
LATE_MS = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of the decoder, and of the batch over both ranks.

    Attributes:
        microbatches: into which a pipeline cuts the batch.
    """

    vocab: int = 8192
    context: int = 256
    layers: int = 4
    heads: int = 4
    width: int = 256
    batch: int = 16
    microbatches: int = 8


@dataclass(slots=True)
class Trainee:
    """A candidate on one rank.

    Attributes:
        step: one update; returns the loss where this rank knows it.
        facts: what is to be said of it.
        clock: that knows how long it has slept for a late link.
    """

    step: Callable[[], Tensor | None]
    facts: dict[str, Any]
    clock: Clock = field(default_factory=Clock)


def decoder(sizes: Sizes, device: torch.device) -> GPT:
    """The decoder, with the same weights on every rank; the head is not tied, so that it can be
    on another stage than the embedding."""
    torch.manual_seed(1)
    model = GPT(
        GPTConfig(
            vocab_size=sizes.vocab,
            context=sizes.context,
            layers=sizes.layers,
            heads=sizes.heads,
            width=sizes.width,
        )
    )
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model.to(device)


def batch(sizes: Sizes, place: Place, *, whole: bool) -> tuple[Tensor, Tensor]:
    """Tokens and targets (B, S): all rows, or this rank's part of them."""
    generator = torch.Generator().manual_seed(2)
    shape = (2, sizes.batch, sizes.context)
    rows = torch.randint(sizes.vocab, shape, generator=generator)
    if not whole:
        rows = rows.chunk(place.world_size, 1)[place.rank]
    tokens, targets = rows.to(place.device).contiguous()
    return tokens, targets


def stage_of(model: GPT, sizes: Sizes, place: Place) -> parallel.Stage:
    """This rank's layers, cut by cost as ``anychip train`` cuts them on a host."""
    tokens = torch.zeros(sizes.batch // sizes.microbatches, sizes.context, dtype=torch.int64)
    costs = parallel.estimate_costs(model.cpu(), tokens, tokens, flops_per_byte=10.0)
    layers = parallel.split_layers(model, place.world_size, costs)
    stage = parallel.make_stage(model, layers[place.rank])
    assert isinstance(stage, parallel.Stage)
    return stage.to(place.device)


def _alone(sizes: Sizes, place: Place) -> Trainee:
    """Each rank trains its part of the batch; nobody communicates."""
    model = decoder(sizes, place.device)
    tokens, targets = batch(sizes, place, whole=False)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)

    def step() -> Tensor:
        loss: Tensor = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainee(step, {})


def _rule() -> optim.Rule:
    return optim.adamw(LEARNING_RATE, weight_decay=0.01)


def _stage(number: int, late_ms: float = 0.0) -> Callable[[Sizes, Place], Trainee]:
    def make(sizes: Sizes, place: Place) -> Trainee:
        model = decoder(sizes, place.device)
        tokens, targets = batch(sizes, place, whole=False)
        comm, clock = place.chip.communicator(), Clock()
        if late_ms:
            comm = late(comm, late_ms / 1e3, clock)
        optimizer = zero.Optimizer(model, _rule(), comm, stage=number)

        def step() -> Tensor:
            loss: Tensor = model(tokens, targets)
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Trainee(step, {}, clock)

    return make


def _one_f_one_b(sizes: Sizes, place: Place) -> Trainee:
    stage = stage_of(decoder(sizes, torch.device("cpu")), sizes, place)
    tokens, targets = batch(sizes, place, whole=True)
    schedule = parallel.one_f_one_b(place.world_size, sizes.microbatches)
    comm = place.chip.communicator()
    pipeline = parallel.Pipeline(stage, comm, schedule)
    optimizer = zero.Optimizer(stage, _rule(), alone(), model_comm=comm)

    def step() -> Tensor | None:
        loss = pipeline.run(tokens, targets, optimizer=optimizer, share_loss=False)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Trainee(step, {"layers": f"{stage.layers.start}-{stage.layers.stop - 1}"})


ALONE = "no communication"
CANDIDATES: dict[str, Callable[[Sizes, Place], Trainee]] = {
    ALONE: _alone,
    "data parallel": _stage(0),
    "ZeRO-1": _stage(1),
    "ZeRO-2": _stage(2),
    "ZeRO-3": _stage(3),
    f"ZeRO-3, {LATE_MS} ms late": _stage(3, LATE_MS),
    "1F1B": _one_f_one_b,
}
