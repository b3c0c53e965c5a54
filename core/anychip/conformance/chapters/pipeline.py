"""Do two stages, with their messages in between, give what one rank gives that accumulates?

GPipe and 1F1B on ranks as threads that share the device: loss and gradients have the bits of the
whole model over the same microbatches, one after the other. A weight that the first and the last
stage share is summed by each on its own: there, relative 1e-6 norm-wise. With data parallelism
and ZeRO beside it, what is reduced comes from the pipeline's backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from anychip.comm import alone
from anychip.conformance import trainee
from anychip.conformance.case import Case, Context, check, check_equal_bits
from anychip.contract import Communicator
from anychip.train import optim, zero
from anychip.train.models import GPT
from anychip.train.parallel import SCHEDULES, Pipeline, Schedule, make_stage

STAGES = 2
MICRO = 4
STEPS = 2
SIZES = trainee.Sizes(batch=8)
CUT = 2
"""Layers 0 and 1 (embedding, first block) are the first stage; the rest is the second."""
TIED_LIMIT = 1e-6


def cases(context: Context) -> Iterator[Case]:
    """Per schedule: gradients of one step, a few steps with an optimizer, and a tied weight."""
    for name, make in SCHEDULES.items():
        for label, run in RULES.items():
            yield Case(id=f"pipeline/{name}/{label}", run=partial(run, make=make))


def stage_layers(number: int, count: int) -> range:
    """Layers of a stage, of ``count`` in all."""
    return range(CUT) if number == 0 else range(CUT, count)


def serial_step(model: GPT, step: int, seed: int) -> Tensor:
    """Adds the gradients of all microbatches, one after the other; the mean loss."""
    device = next(model.parameters()).device
    tokens, targets = (part.to(device) for part in trainee.batch(SIZES, step, seed=seed))
    total = torch.zeros((), device=device)
    rows = SIZES.batch // MICRO
    for x, y in zip(tokens.split(rows), targets.split(rows), strict=True):
        loss = model(x, y) / MICRO
        loss.backward()
        total += loss.detach()
    return total


def staged(
    context: Context,
    make: Callable[[int, int], Schedule],
    *,
    tied: bool,
    rule: Callable[[], optim.Rule] | None,
) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """Per rank: losses, and gradients by name; with a rule, parameters after its steps."""
    models = [trainee.decoder(SIZES, context.device, tied=tied) for _ in range(STAGES)]

    def work(comm: Communicator) -> tuple[list[Tensor], dict[str, Tensor]]:
        layers = stage_layers(comm.rank, SIZES.layers + 2)
        part = make_stage(models[comm.rank], layers)
        pipe = Pipeline(part, comm, make(STAGES, MICRO), tied=part.tied if tied else ())
        solo = alone()
        solo.device = context.device.type
        opt = None if rule is None else zero.Optimizer(part, rule(), solo, model_comm=comm)
        losses = []
        for step in range(STEPS if opt else 1):
            text = trainee.batch(SIZES, step, seed=context.seed)
            tokens, targets = (x.to(context.device) for x in text)
            loss = pipe.run(tokens, targets)
            assert loss is not None
            losses.append(loss)
            if opt is not None:
                opt.step()
                opt.zero_grad()
        named = part.named_parameters()
        found = {n: (p.grad if rule is None else p.detach()) for n, p in named}
        return losses, {n: t.clone() for n, t in found.items() if t is not None}

    return trainee.run_on_device(context.device, STAGES, work)


def gradients(context: Context, *, make: Callable[[int, int], Schedule]) -> None:
    """Bits of the loss and of every gradient."""
    context.call = f"{make.__name__}: {STAGES} stages, {MICRO} microbatches on {context.device}"
    model = trainee.decoder(SIZES, context.device, tied=False)
    loss = serial_step(model, 0, context.seed)
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    results = staged(context, make, tied=False, rule=None)
    check_whole(results, wanted)
    for rank, (losses, grads) in enumerate(results):
        check_equal_bits(f"rank {rank}: loss", losses[0], loss)
        for name, grad in grads.items():
            check_equal_bits(f"rank {rank}: gradient of {name}", grad, wanted[name])


def check_whole(
    results: list[tuple[list[Tensor], dict[str, Tensor]]], wanted: dict[str, Tensor]
) -> None:
    """The stages' names together are the model's."""
    names = {name for _, found in results for name in found}
    check(names == set(wanted), f"stages hold {sorted(names)}, the model {sorted(wanted)}")


def steps(context: Context, *, make: Callable[[int, int], Schedule]) -> None:
    """Bits of the parameters after steps of AdamW, clipped by the norm over both stages."""
    context.call = f"{make.__name__} and {STEPS} steps of adamw on {context.device}"

    def rule() -> optim.Rule:
        return optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))

    model = trainee.decoder(SIZES, context.device, tied=False)
    solo = alone()
    solo.device = context.device.type
    opt = zero.Optimizer(model, rule(), solo)
    losses = []
    for step in range(STEPS):
        losses.append(serial_step(model, step, context.seed))
        opt.step()
        opt.zero_grad()
    wanted = {name: param.detach() for name, param in model.named_parameters()}
    results = staged(context, make, tied=False, rule=rule)
    check_whole(results, wanted)
    for rank, (found, params) in enumerate(results):
        for step, (got, want) in enumerate(zip(found, losses, strict=True)):
            check_equal_bits(f"rank {rank}: loss of step {step}", got, want)
        for name, param in params.items():
            check_equal_bits(f"rank {rank}: {name}", param, wanted[name])


def tied_weight(context: Context, *, make: Callable[[int, int], Schedule]) -> None:
    """The embedding's weight is the head's: both stages get first + last, with the same bits."""
    context.call = f"{make.__name__} with a tied embedding on {context.device}"
    model = trainee.decoder(SIZES, context.device, tied=True)
    serial_step(model, 0, context.seed)
    want = model.transformer.wte.weight.grad
    assert want is not None
    results = staged(context, make, tied=True, rule=None)
    found = [
        next(grad for name, grad in grads.items() if name.endswith(("wte.weight", "head.weight")))
        for _, grads in results
    ]
    check_equal_bits("the gradient on the last stage and on the first", found[1], found[0])
    off = float((found[0] - want).double().norm() / want.double().norm())
    check(off <= TIED_LIMIT, f"the tied gradient is off by {off:.3g}, limit {TIED_LIMIT:g}")


RULES: dict[str, Callable[..., None]] = {
    "gradients": gradients,
    "steps": steps,
    "tied": tied_weight,
}
