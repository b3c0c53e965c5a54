"""Do stages, with their messages in between, give what one rank gives that accumulates?

Every schedule, on two ranks as threads that share the device, with one and two stages per rank:
loss and gradients have the bits of the whole model over the same microbatches, one after the other.
A weight that the first and the last stage share is summed by each on its own: there, relative 1e-6
norm-wise. With data parallelism and ZeRO beside it, what is reduced comes from the pipeline's
backwards, and weights in parts are whole when the rows say so.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from anychip.conformance import trainee
from anychip.conformance.case import Case, Context, check, check_equal_bits
from anychip.contract import Communicator
from anychip.train import optim, zero
from anychip.train.models import GPT
from anychip.train.parallel import (
    NAMES,
    Mesh,
    Pipeline,
    Schedule,
    Stage,
    Stages,
    add_weights,
    make_schedule,
    make_stage,
    partition,
    stages_per_rank,
)

RANKS = 2
MICRO = 4
STEPS = 2
SIZES = trainee.Sizes(batch=4, width=16)
TIED_LIMIT = 1e-6
TIED = ("1f1b", "zbv")
"""Both copies of a tied weight on two ranks, and on one."""
STEPPED = "interleaved-zb"
SHARDED = {"zb1p": 1, "zbv": 2}
"""With ZeRO stage 3, and so many stages of a rank whole at once."""


def cases(context: Context) -> Iterator[Case]:
    """Per schedule the gradients of one step, or a few steps of weights in parts; a tied weight."""
    for name in (name for name in NAMES if name not in {*SHARDED, STEPPED}):
        yield Case(id=f"pipeline/{name}/gradients", run=partial(gradients, name=name))
    for name in TIED:
        yield Case(id=f"pipeline/{name}/tied", run=partial(tied_weight, name=name))
    yield Case(id=f"pipeline/{STEPPED}/steps", run=partial(steps, schedule=schedule_of(STEPPED)))
    for name, whole in SHARDED.items():
        schedule = add_weights(schedule_of(name), whole=whole)
        run = partial(steps, schedule=schedule, replicas=2)
        yield Case(id=f"pipeline/{name}/stage3", run=run)


def schedule_of(name: str) -> Schedule:
    """With as few stages per rank as it has."""
    return make_schedule(name, RANKS, MICRO, virtual=stages_per_rank(name))


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
    context: Context, schedule: Schedule, *, tied: bool, rule: Callable[[], optim.Rule] | None,
    replicas: int = 1,
) -> list[tuple[list[Tensor], dict[str, Tensor]]]:  # fmt: skip
    """Per rank: losses, and gradients by name; with a rule, parameters after its steps.

    Several replicas see the same data, and have weights in parts.
    """
    models = [trainee.decoder(SIZES, context.device, tied=tied) for _ in range(RANKS * replicas)]
    layers, owners = partition([1] * (SIZES.layers + 2), schedule.num_stages), schedule.owners()

    def work(world: Communicator) -> tuple[list[Tensor], dict[str, Tensor]]:
        mesh = Mesh(world, {"data": replicas, "pipeline": RANKS})
        comm, data = mesh.axis("pipeline"), mesh.axis("data")
        made = [
            make_stage(models[world.rank], part)
            for number, part in enumerate(layers)
            if owners[number] == comm.rank
        ]
        parts = [part for part in made if isinstance(part, Stage)]
        whole = Stages(parts)
        pipe = Pipeline(parts, comm, schedule, tied=whole.tied if tied else ())
        if replicas == 1:
            data = trainee.alone_on(context.device)
        opt = None
        if rule is not None:
            stage = 3 if replicas > 1 else 0
            opt = zero.Optimizer(whole, rule(), data, stage=stage, model_comm=comm, roots=parts)
        losses = []
        for step in range(STEPS if opt else 1):
            text = trainee.batch(SIZES, step, seed=context.seed)
            tokens, targets = (x.to(context.device) for x in text)
            loss = pipe.run(tokens, targets, optimizer=opt)
            assert loss is not None
            losses.append(loss)
            if opt is not None:
                opt.step()
                opt.zero_grad()
        named = [item for part in parts for item in part.named_parameters()]
        if opt is None:
            return losses, {n: p.grad.clone() for n, p in named if p.grad is not None}
        with opt.whole():
            return losses, {n: p.detach().clone() for n, p in named}

    return trainee.run_on_device(context.device, RANKS * replicas, work)


def gradients(context: Context, *, name: str) -> None:
    """Bits of the loss and of every gradient."""
    context.call = f"{name}: {RANKS} ranks, {MICRO} microbatches on {context.device}"
    model = trainee.decoder(SIZES, context.device, tied=False)
    loss = serial_step(model, 0, context.seed)
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    results = staged(context, schedule_of(name), tied=False, rule=None)
    check_same(results, [loss], wanted)


def check_same(
    results: list[tuple[list[Tensor], dict[str, Tensor]]],
    losses: list[Tensor],
    wanted: dict[str, Tensor],
) -> None:
    """The stages' names together are the model's; bits of losses and of what is named."""
    names = {name for _, found in results for name in found}
    check(names == set(wanted), f"stages hold {sorted(names)}, the model {sorted(wanted)}")
    for rank, (found, tensors) in enumerate(results):
        for step, (got, want) in enumerate(zip(found, losses, strict=True)):
            check_equal_bits(f"rank {rank}: loss of step {step}", got, want)
        for name, tensor in tensors.items():
            check_equal_bits(f"rank {rank}: {name}", tensor, wanted[name])


def steps(context: Context, *, schedule: Schedule, replicas: int = 1) -> None:
    """Bits of the parameters after steps of AdamW, clipped by the norm over all stages."""
    context.call = f"{STEPS} steps of adamw, {replicas} replicas on {context.device}: {schedule}"

    def rule() -> optim.Rule:
        return optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))

    model = trainee.decoder(SIZES, context.device, tied=False)
    opt = zero.Optimizer(model, rule(), trainee.alone_on(context.device))
    losses = []
    for step in range(STEPS):
        losses.append(serial_step(model, step, context.seed))
        opt.step()
        opt.zero_grad()
    wanted = {name: param.detach() for name, param in model.named_parameters()}
    check_same(staged(context, schedule, tied=False, rule=rule, replicas=replicas), losses, wanted)


def tied_weight(context: Context, *, name: str) -> None:
    """The embedding's weight is the head's: both stages get first + last, with the same bits."""
    context.call = f"{name} with a tied embedding on {context.device}"
    model = trainee.decoder(SIZES, context.device, tied=True)
    serial_step(model, 0, context.seed)
    want = model.transformer.wte.weight.grad
    assert want is not None
    results = staged(context, schedule_of(name), tied=True, rule=None)
    found = [
        grad
        for _, grads in results
        for name, grad in grads.items()
        if name.endswith(("wte.weight", "head.weight"))
    ]
    check_equal_bits("the gradient on the last stage and on the first", found[1], found[0])
    off = float((found[0] - want).double().norm() / want.double().norm())
    check(off <= TIED_LIMIT, f"the tied gradient is off by {off:.3g}, limit {TIED_LIMIT:g}")
