"""Do a device's operators give the same training, bit for bit, when what they move is cut?

States, gradients, weights: stages 1 to 3.

Two ranks as threads that share the device, each with half of every batch, against one rank that
adds up in the tree that :class:`anychip.train.zero.Optimizer` documents: first the micro-batches
of each rank, then the ranks in order. Every stage has to give the bits of that one rank, in
parameters, norms and states; and each rank has to hold the bytes of its stage's formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from anychip.conformance import trainee
from anychip.conformance.case import Case, Context, check, check_equal_bits
from anychip.contract import Communicator
from anychip.train import optim, zero
from anychip.train.models import GPT
from anychip.train.optim.rule import BLOCK
from anychip.train.zero.layout import ALIGNMENT
from anychip.train.zero.tiers import Tier

if TYPE_CHECKING:
    from typing_extensions import Unpack

RANKS = 2
STEPS = 3
MICRO = 2
SIZES = trainee.Sizes(width=48)
"""So that the largest parameter has five blocks of the norms' grid, and a cut between them."""
CHUNK_NBYTES = 20_000
"""Several chunks of a block's weights, of what is elsewhere."""
BUCKET_NBYTES = 16_000
"""Several buckets, whose ends fall into the middle of parameters' blocks."""

RULES: dict[str, Callable[[], optim.Rule]] = {
    "adamw": lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2)),
    "adamw-8bit": lambda: optim.adamw(1e-2, states="8bit"),
    "momentum": lambda: optim.sgd(0.1, momentum=0.9, weight_decay=0.01),
    "lamb": lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.lamb(1e-2)),
    "lion": lambda: optim.lion(1e-3, weight_decay=0.1),
}
QUICK = ("adamw", "lamb")


class Trained(NamedTuple):
    """What training gives: parameters by name, norms, the whole state, and bytes."""

    params: dict[str, Tensor]
    norms: list[Tensor | None]
    states: dict[str, Tensor]
    memory: zero.MemoryUse


def cases(context: Context) -> Iterator[Case]:
    """Per stage and rule: parity; per stage: bytes; with all of stage 3 elsewhere: parity."""
    for stage in range(4):
        for name, rule in RULES.items():
            run = partial(parity, stage=stage, name=name, rule=rule)
            yield Case(id=f"zero/{stage}/{name}", run=run, full=name not in QUICK)
        yield Case(id=f"zero/{stage}/bytes", run=partial(nbytes, stage=stage))
    for tier in ("host", "file"):
        for name in ("adamw", "adamw-8bit"):
            run = partial(offloaded, tier=tier, name=name, rule=RULES[name])
            yield Case(id=f"zero/3/{tier}/{name}", run=run, full=name not in QUICK)


def offloaded(context: Context, *, tier: str, name: str, rule: Callable[[], optim.Rule]) -> None:
    """The same with states, gradients and weights in the host's memory, or in a file."""
    with TemporaryDirectory() as directory:
        where = directory if tier == "file" else tier
        offload: dict[str, str | Tier] = dict.fromkeys(("states", "gradients", "weights"), where)
        parity(context, stage=3, name=name, rule=rule, offload=offload, chunk_nbytes=CHUNK_NBYTES)


def parity(
    context: Context, *, stage: int, name: str, rule: Callable[[], optim.Rule],
    **how: Unpack[zero.ShardingOptions],
) -> None:  # fmt: skip
    """Bits of parameters, norms and states of every rank, against one rank."""
    away = f", {how['offload']}" if "offload" in how else ""
    context.call = (
        f"{STEPS} steps of {name}, stage {stage}{away}, {RANKS} ranks on {context.device}"
    )
    want = serial(context, rule())
    for rank, got in enumerate(sharded(context, stage, rule, **how)):
        for index, (norm, other) in enumerate(zip(got.norms, want.norms, strict=True)):
            if norm is not None and other is not None:
                check_equal_bits(f"rank {rank}: norm of step {index}", norm, other)
        for label, value in want.params.items():
            check_equal_bits(f"rank {rank}: {label}", got.params[label], value)
        for label, value in want.states.items():
            check_equal_bits(f"rank {rank}: {label}", got.states[label], value)


def loss_of(model: GPT, *index: int, seed: int) -> Tensor:
    """The mean loss of one batch."""
    device = next(model.parameters()).device
    tokens, targets = (part.to(device) for part in trainee.batch(SIZES, *index, seed=seed))
    loss: Tensor = model(tokens, targets)
    return loss / MICRO


def serial(context: Context, rule: optim.Rule) -> Trained:
    """One rank, which computes the batches of all ranks."""
    device = context.device
    model = trainee.decoder(SIZES, device)
    params = list(model.parameters())
    opt = zero.Optimizer(model, rule, trainee.alone_on(device))
    norms = []
    for step in range(STEPS):
        sums: list[Tensor] = []
        for rank in range(RANKS):
            model.zero_grad()
            for micro in range(MICRO):
                loss_of(model, step, rank, micro, seed=context.seed).backward()
            found = [p.grad for p in params if p.grad is not None]
            sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
        for param, joined in zip(params, sums, strict=True):
            param.grad = joined / RANKS
        norms.append(opt.step().grad_norm)
    return trained(model, opt, norms)


def sharded(
    context: Context,
    stage: int,
    rule: Callable[[], optim.Rule],
    **how: Unpack[zero.ShardingOptions],
) -> list[Trained]:
    """The ranks, each with its own batches."""
    device = context.device
    models = [trainee.decoder(SIZES, device, seed=1 + 50 * rank) for rank in range(RANKS)]

    def work(comm: Communicator) -> Trained:
        model, norms = models[comm.rank], []
        opt = zero.Optimizer(model, rule(), comm, stage=stage, bucket_nbytes=BUCKET_NBYTES, **how)
        for step in range(STEPS):
            with opt.no_sync():
                opt.backward(loss_of(model, step, comm.rank, 0, seed=context.seed))
            opt.backward(loss_of(model, step, comm.rank, 1, seed=context.seed))
            norms.append(opt.step().grad_norm)
            opt.zero_grad()
        return trained(model, opt, norms)

    return trainee.run_on_device(device, RANKS, work)


def trained(model: GPT, opt: zero.Optimizer, norms: list[Tensor | None]) -> Trained:
    """What there is afterwards; a collective call."""
    with opt.whole():
        params = {name: p.detach().clone() for name, p in model.named_parameters()}
    states = {
        f"{name} of parameter {index}": value
        for index, entry in opt.state_dict()["state"].items()
        for name, value in entry.items()
    }
    return Trained(params, norms, states, opt.memory())


def nbytes(context: Context, *, stage: int) -> None:
    """Parameters 4 Psi, gradients 4 Psi, states 8 Psi; / N from stages 3, 2 and 1 on.

    A part may be larger by two blocks of the grid, and by the gaps that align parameters.
    """
    device = context.device
    context.call = f"bytes of adamw, stage {stage}, {RANKS} ranks on {device}"
    models = [trainee.decoder(SIZES, device) for _ in range(RANKS)]
    psi = sum(p.numel() for p in models[0].parameters())
    count = sum(1 for _ in models[0].parameters())

    def work(comm: Communicator) -> tuple[zero.MemoryUse, int]:
        opt = zero.Optimizer(
            models[comm.rank], optim.adamw(1e-2), comm, stage=stage, bucket_nbytes=BUCKET_NBYTES
        )
        held = {t.data_ptr(): t for entry in opt.state.values() for t in entry.values()}
        return opt.memory(), sum(t.nbytes for t in held.values())

    num_buffers = -(-4 * psi // BUCKET_NBYTES) + count
    slack = 4 * (2 * BLOCK * num_buffers + ALIGNMENT * count)
    for rank, (found, held) in enumerate(trainee.run_on_device(device, RANKS, work)):
        wanted = {
            "parameters": (found.parameters, 4 * psi, stage >= 3),
            "gradients": (found.gradients, 4 * psi, stage >= 2),
            "states": (found.states, 8 * psi, stage >= 1),
            "states in its tensors": (held, 8 * psi, stage >= 1),
        }
        for name, (got, whole, is_cut) in wanted.items():
            want, room = (whole / RANKS, 2 * slack) if is_cut else (whole, 4 * count)
            check(
                abs(got - want) <= room,
                f"rank {rank}, stage {stage}: {want:g} bytes of {name} within {room} expected, "
                f"got {got}",
            )
