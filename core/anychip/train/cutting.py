"""How is a model cut for the ranks of a run, and what does each stage have and send? On paper.

Everything comes from the functions that build and run it, on a model without data: how layers are
cut, how buckets are laid out, in which order stages work.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from anychip.comm import gather_objects, wire_nbytes
from anychip.contract import HOST, Backend, Communicator
from anychip.train import models, optim, parallel, zero
from anychip.train.config import Config, ParallelConfig
from anychip.train.optim import Rule
from anychip.train.precision import PrecisionPolicy
from anychip.train.zero.layout import Layout, by_size, default_nbytes
from anychip.train.zero.layout import plan as plan_layout
from anychip.train.zero.tiers import in_text, tiers_of
from anychip.train.zero.units import divide, own_parameters
from anychip.train.zero.weights import STAGES


def make_schedule(config: Config) -> parallel.Schedule:
    """Of the stages that the settings describe.

    Raises:
        OSError, ValueError: it cannot be read, or made for so many micro-batches.
    """
    settings = config.parallel
    virtual = settings.stages // settings.pipeline
    schedule = parallel.make_schedule(
        settings.schedule, settings.pipeline, config.data.accumulation, virtual=virtual
    )
    if settings.whole_stages and config.optimizer.stage != 3:
        raise ValueError(
            f"parallel.whole_stages = {settings.whole_stages} is for optimizer.stage = 3, in which "
            f"weights come and go; got optimizer.stage = {config.optimizer.stage}"
        )
    whole = settings.whole_stages
    return parallel.add_weights(schedule, whole=whole) if whole else schedule


def measured_rates(config: Config, chip: Backend) -> parallel.Rates | None:
    """What ``parallel.rates`` names, of several files the one of this device, or None.

    Raises:
        ValueError: none is this device's.
    """
    named, wrong = config.parallel.rates, list[str]()
    for file in (named,) if isinstance(named, str) else named or ():
        try:
            return parallel.read_rates(Path(file), chip)
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("\n".join(wrong))
    return None


def gather_speeds(config: Config, chip: Backend, comm: Communicator) -> list[parallel.Speed]:
    """Of the chip of each rank of a pipeline; a collective call. The first rank's, where one chip
    serves all.

    Raises:
        OSError, ValueError: ``parallel.rates`` cannot be read, or has not this device.
    """
    mine = tuple(parallel.speed(chip, measured_rates(config, chip)))
    told = [parallel.Speed(*speed) for speed in gather_objects(comm, mine)]
    size = config.parallel.pipeline
    return told[:size] if has_chips(config) else told[:1] * size


def has_chips(config: Config) -> bool:
    """Whether the ranks of a pipeline have chips of their own."""
    return isinstance(config.run.backend, tuple) and len(config.run.backend) > 1


def chips_of_stages(names: Sequence[str], config: Config) -> tuple[str, ...]:
    """The name of each rank of a pipeline, for as many or fewer.

    Raises:
        ValueError: names that do not divide the ranks of a pipeline, or there is none.
    """
    size = config.parallel.pipeline
    if size % len(names):
        raise ValueError(
            f"run.backend: {len(names)} chips, {', '.join(names)}, do not divide the {size} "
            f"rank{'s' * (size > 1)} of parallel.pipeline = {size}; each takes as many of them, so "
            f"write parallel.pipeline={len(names)} or a multiple of it"
        )
    return tuple(names[place * len(names) // size] for place in range(size))


class Draft(NamedTuple):
    """A model on paper, in parts that any number of stages is made of.

    Attributes:
        whole: without data.
        costs: per rank of the pipeline, of one micro-batch in each layer: see
            :func:`layer_costs`.
        activations: of one micro-batch in each layer; what layers of one stage keep in common
            counts twice. Those of the reference implementations.
    """

    whole: models.Decoder
    costs: list[list[parallel.LayerCost]]
    activations: list[parallel.StageBytes]


def layer_costs(
    config: Config, whole: models.Decoder, speeds: Sequence[parallel.Speed]
) -> list[list[parallel.LayerCost]]:
    """What each layer costs on the chips of a pipeline's ranks; the model may be without data.

    Estimated operations; of chips that all say how fast they are, in those of the fastest. A model
    of another library that does not run without data is weighed.
    """
    tokens = _tokens(config, next(whole.parameters()).device)
    counted = {
        ratio: _estimated(whole, tokens, ratio) or parallel.weigh_costs(whole, tokens.numel())
        for ratio in {speed.flops_per_byte for speed in speeds}
    }
    fastest = max(speed.flops for speed in speeds)
    is_known = all(speed.flops for speed in speeds)
    slower = [fastest / speed.flops if is_known else 1.0 for speed in speeds]
    return [
        [parallel.LayerCost(c.forward * by, c.backward * by) for c in counted[s.flops_per_byte]]
        for s, by in zip(speeds, slower, strict=True)
    ]


def _estimated(
    whole: models.Decoder, tokens: Tensor, flops_per_byte: float = 0.0
) -> list[parallel.LayerCost] | None:
    try:
        return parallel.estimate_costs(whole, tokens, tokens, flops_per_byte=flops_per_byte)
    except (RuntimeError, AssertionError, TypeError, ValueError):
        if not isinstance(whole, models.Pretrained):
            raise
        return None  # what a library's code stumbles over is its own


def ideal_seconds(
    config: Config, chip: Backend, comm: Communicator, whole: models.Decoder, dtype: torch.dtype
) -> float | None:
    """What a step would take if all ranks computed at their rates all the time; a collective call.

    The operations are those of forward and backward, as specs of operators state them. None: the
    rate of products in a dtype is not known of some device, measured or by its properties; some
    weights are frozen, whose part of a backward is not told apart; or a model of another library
    does not run without data, or has no parts.

    Raises:
        OSError, ValueError: ``parallel.rates`` cannot be read, or has not this device.
    """
    rates = measured_rates(config, chip)
    told: list[float | None] = gather_objects(comm, (rates or chip.properties()).flops.get(dtype))
    found = [rate for rate in told if rate]
    is_counted = whole.parts.blocks and all(p.requires_grad for p in whole.parameters())
    if len(found) < len(told) or not is_counted:
        return None
    costs = _estimated(whole, _tokens(config, next(whole.parameters()).device))
    if costs is None:
        return None
    flops = sum(cost.total for cost in costs)
    microbatches = config.data.accumulation * comm.world_size // config.parallel.pipeline
    return flops * microbatches / math.fsum(found)


def cut(
    whole: models.Decoder,
    costs: Sequence[Sequence[parallel.LayerCost]],
    schedule: parallel.Schedule,
) -> list[range]:
    """The layers of each stage, by what they cost on the rank that has it."""
    owners = schedule.owners()
    rows = [costs[owners[number]] for number in range(len(owners))]
    return parallel.split_layers(whole, len(rows), rows)


def require_trained(stages: Sequence[nn.Module], owners: Mapping[int, int]) -> None:
    """Raises ValueError where a rank would have nothing to train: only adapters are, of some."""
    ranks = {*owners.values()}
    trains = {
        owners[number]
        for number, stage in enumerate(stages)
        if any(param.requires_grad for param in stage.parameters())
    }
    if idle := sorted(ranks - trains):
        raise ValueError(
            f"parallel.pipeline = {len(ranks)}: rank {idle[0]} would have no weight that is "
            "trained, only frozen ones; choose fewer ranks for the pipeline"
        )


def draft(config: Config, policy: PrecisionPolicy, speeds: Sequence[parallel.Speed]) -> Draft:
    """The model of a run; makes no weights.

    Raises:
        OSError, PretrainedError: a directory does not describe a model.
        UnsupportedError: a model of another library that has no parts.
    """
    whole = models.without_data(config.model)
    costs, tokens = layer_costs(config, whole, speeds), _tokens(config, torch.device(HOST))
    layers = [range(number, number + 1) for number in range(len(costs[0]))]
    autocast = replace(policy, device_type=HOST).autocast
    activations = parallel.estimate_bytes(whole, layers, tokens, tokens, autocast=autocast)
    return Draft(whole, costs, activations)


def _tokens(config: Config, device: torch.device) -> Tensor:
    shape = (config.data.batch_size, config.model.context)
    return torch.zeros(shape, dtype=torch.int64, device=device)


def mesh_sizes(settings: ParallelConfig, world_size: int) -> dict[str, int]:
    """Axis name to size, slowest first: the stages of a replica are neighbours.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks.
    """
    replicas = settings.data or max(1, world_size // settings.pipeline)
    if replicas * settings.pipeline != world_size:
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        needed = replicas * settings.pipeline
        raise ValueError(
            f"parallel.data = {settings.data or 'all'} and parallel.pipeline = "
            f"{settings.pipeline} do not multiply to the {ranks} of this job; start it with "
            f"--nproc {needed}, or write other sizes"
        )
    return {"data": replicas, "pipeline": settings.pipeline}


def rule_of(config: Config) -> optim.Rule:
    """The update rule that the settings describe, behind clipping by the global norm."""
    settings = config.optimizer
    clip = optim.clip_by_global_norm(settings.max_norm or math.inf)
    rule = settings.rule(config.schedule.rate(settings.lr, config.run.steps))
    if settings.ema_decay:
        rule = optim.averaged(rule, settings.ema_decay)
    return optim.chain(clip, rule)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One stage of a replica: the ranks that hold it.

    Attributes:
        rank: of the pipeline's, which may hold other stages too.
        layers: of the whole model.
        cost: of one micro-batch, as :func:`layer_costs` counts.
        num_parameters: with the copies of tied ones.
        memory: of the rank that has most of each; activations are not in it, frozen weights are
            among the parameters. Where the rank has other stages too, as if it had not.
        activations: that one micro-batch keeps, estimated.
        units: bytes of the weights that are gathered together, in ZeRO stage 3; the root's last.
        tiers: of each tier that is used, what of the memory is there.
        data_nbytes: that a rank sends to other replicas in a step: gradients and parameters.
        pipeline_nbytes: to other stages: outputs and gradients of all micro-batches, and those of
            tied parameters.
    """

    rank: int
    layers: range
    cost: parallel.LayerCost
    num_parameters: int
    memory: zero.MemoryUse
    tiers: dict[str, zero.MemoryUse]
    activations: parallel.StageBytes
    units: tuple[int, ...]
    data_nbytes: int
    pipeline_nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """A model in stages that work by a schedule.

    Attributes:
        timeline: with the estimated costs and free messages.
        memory: per rank of the pipeline a time, and the bytes in use from then on: parameters,
            gradients and states all the time, activations and whole weights as they come and go.
            Not in it: what a kernel takes while it runs, and messages.
    """

    stages: tuple[StagePlan, ...]
    schedule: parallel.Schedule
    timeline: parallel.Timeline
    memory: tuple[tuple[tuple[parallel.Time, int], ...], ...]

    @property
    def peaks(self) -> tuple[int, ...]:
        """Per rank, the most bytes in use."""
        return tuple(max(nbytes for _, nbytes in row) for row in self.memory)


def arrange(config: Config, model: Draft, replicas: int, policy: PrecisionPolicy) -> Arrangement:
    """The stages that the settings describe.

    Raises:
        OSError, ValueError: as :func:`make_schedule`, or more stages than layers.
    """
    one = parallel.one_f_one_b(1, config.data.accumulation)
    schedule = make_schedule(config) if config.parallel.stages > 1 else one
    layers = cut(model.whole, model.costs, schedule)
    modules = [parallel.make_stage(model.whole, part) for part in layers]
    require_trained(modules, schedule.owners())
    stages = tuple(
        _stage(config, model, number, modules[number], layers, schedule, replicas, policy)
        for number in range(len(layers))
    )
    costs = parallel.Costs(
        forward=[stage.cost.forward for stage in stages],
        backward=[stage.cost.backward for stage in stages],
    )
    timeline = parallel.simulate(schedule, costs)
    return Arrangement(
        stages=stages,
        schedule=schedule,
        timeline=timeline,
        memory=_in_use(config, stages, schedule, timeline),
    )


def _in_use(
    config: Config,
    stages: Sequence[StagePlan],
    schedule: parallel.Schedule,
    timeline: parallel.Timeline,
) -> tuple[tuple[tuple[parallel.Time, int], ...], ...]:
    nbytes = parallel.Bytes(
        saved=[stage.activations.saved for stage in stages],
        kept=[stage.activations.kept for stage in stages],
        weights=[sum(stage.units) for stage in stages],
    )
    found = []
    for rank, steps in enumerate(timeline.memory(schedule, nbytes)):
        mine = [stage for stage in stages if stage.rank == rank]
        always = sum(sum(stage.memory) for stage in mine)
        if not config.parallel.whole_stages:
            always += _by_units(mine, is_split=schedule.has_split_backward)
        begin: tuple[parallel.Time, int] = (0, always)
        found.append((begin, *((time, always + held) for time, held in steps)))
    return tuple(found)


def _by_units(stages: Sequence[StagePlan], *, is_split: bool) -> int:
    """At most so many bytes of weights are whole, where blocks come and go with each use."""
    busy, waiting = [], []
    for stage in stages:
        *blocks, root = stage.units or (0,)
        busy.append(root + sum(blocks if is_split else sorted(blocks)[-2:]))
        waiting.append(root + sum(blocks[-1:]))
    return max(b - w for b, w in zip(busy, waiting, strict=True)) + sum(waiting)


def _stage(
    config: Config, model: Draft, number: int, module: nn.Module, layers: Sequence[range],
    schedule: parallel.Schedule, replicas: int, policy: PrecisionPolicy,
) -> StagePlan:  # fmt: skip
    decay = config.optimizer.weight_decay
    groups = [group["params"] for group in models.parameter_groups(module, decay)]
    rule, zero_stage = rule_of(config), config.optimizer.stage
    buffers = _buffers(module, groups, zero_stage, replicas, _gathers(schedule, number))
    owners = schedule.owners()
    frozen = [param for param in module.parameters() if not param.requires_grad]
    given = groups, frozen, buffers, rule, zero_stage, replicas
    ranks = [_memory(*given, rank) for rank in range(replicas)]
    saved = [model.activations[layer] for layer in layers[number]]
    is_cut = STAGES[zero_stage].weights
    memory = zero.MemoryUse(*(max(column) for column in zip(*ranks, strict=True)))
    return StagePlan(
        rank=owners[number],
        layers=layers[number],
        cost=parallel.stage_costs(model.costs[owners[number]], layers)[number],
        num_parameters=sum(param.numel() for param in module.parameters()),
        memory=memory,
        tiers=_in_tiers(memory, config.optimizer.offload, len(groups)),
        activations=parallel.StageBytes(*map(sum, zip(*saved, strict=True))),
        units=_units(buffers) if is_cut else (),
        data_nbytes=_data_nbytes(config, buffers, replicas, policy.reduce_dtype),
        pipeline_nbytes=_pipeline_nbytes(config, module, number, owners),
    )


@dataclass(frozen=True, slots=True)
class _Buffer:
    """What is sent together: parameters and their layout; how often it is gathered in a step, and
    with which others."""

    params: Sequence[Tensor]
    layout: Layout
    num_gathers: int = 0
    unit: int = 0

    @property
    def is_trained(self) -> bool:
        """Frozen ones are in buffers of their own."""
        return self.params[0].requires_grad


def _units(buffers: Sequence[_Buffer]) -> tuple[int, ...]:
    """Bytes that are whole together."""
    found: dict[int, int] = {}
    for buffer in buffers:
        nbytes = buffer.layout.numel * torch.float32.itemsize
        found[buffer.unit] = found.get(buffer.unit, 0) + nbytes
    return tuple(found.values())


def _gathers(schedule: parallel.Schedule, number: int) -> tuple[int, int]:
    """In a step, of a stage's blocks; and of its root and last block, which wait for a backward."""
    row = schedule.unpaired().rows[schedule.owners()[number]]
    kinds = [action.kind for action in row if action.stage == number]
    if "UNSHARD" in kinds:
        return kinds.count("UNSHARD"), kinds.count("UNSHARD")
    uses = [kind for kind in kinds if kind in parallel.HANDS_ON]
    return len(uses), sum(before != "F" for before in (None, *uses[:-1]))


def _buffers(
    module: nn.Module,
    groups: Sequence[Sequence[Tensor]],
    stage: int,
    replicas: int,
    gathers: tuple[int, int],
) -> list[_Buffer]:
    """As :class:`.zero.Optimizer` will make them."""
    if replicas == 1:
        return []
    parts = replicas if STAGES[stage].states else 1
    if STAGES[stage].weights:
        units = divide(module, "blocks")
        owned = [list(params.values())[::-1] for params in own_parameters(module, units)]
        again = [gathers[0]] * (len(units) - 2) + [gathers[1]] * min(2, len(units))
        return [
            _Buffer(params, plan_layout([p.numel() for p in params], parts), again[unit], unit)
            for unit, every in enumerate(owned)
            for is_trained in (True, False)
            if (params := [param for param in every if param.requires_grad is is_trained])
        ]
    max_numel = default_nbytes(replicas) // torch.float32.itemsize
    members = [
        [group[index] for index in indices]
        for group in groups
        for indices in by_size([param.numel() for param in group], max_numel)
    ]
    return [_Buffer(params, plan_layout([p.numel() for p in params], parts)) for params in members]


def _memory(
    groups: Sequence[Sequence[Tensor]],
    frozen: Sequence[Tensor],
    buffers: Sequence[_Buffer],
    rule: Rule,
    stage: int,
    replicas: int,
    rank: int,
) -> zero.MemoryUse:
    """As :meth:`.zero.Optimizer.memory` will say, and the weights that are frozen."""

    def pieces(*, is_trained: bool) -> list[Tensor]:
        return [
            param.reshape(-1)[: buffer.layout.piece(index, rank).numel]
            for buffer in buffers
            for index, param in enumerate(buffer.params)
            if buffer.is_trained is is_trained
        ]

    shards = [param for group in groups for param in group]
    whole = sum(param.nbytes for param in shards)
    partition = STAGES[stage]
    if partition.states and replicas > 1:
        shards = pieces(is_trained=True)
    if partition.weights and replicas > 1:
        frozen = pieces(is_trained=False)
    owned = sum(shard.nbytes for shard in shards)
    states = sum(t.nbytes for shard in shards for t in rule.init(shard).values())
    states += len(groups) * torch.float32.itemsize  # the step counts
    weights = (owned if partition.weights else whole) + sum(param.nbytes for param in frozen)
    return zero.MemoryUse(weights, owned if partition.gradients else whole, states)


def _in_tiers(memory: zero.MemoryUse, offload: str, num_groups: int) -> dict[str, zero.MemoryUse]:
    """What of a rank's bytes is in which tier; step counts stay on the device."""
    kinds = tiers_of(in_text(offload))
    steps = num_groups * torch.float32.itemsize
    places = [str(kinds[kind]) for kind in ("weights", "gradients", "states")]
    used = ["device", *sorted({*places} - {"device"})]
    found = {}
    for tier in used:
        here = [n if place == tier else 0 for n, place in zip(memory, places, strict=True)]
        if places[2] != "device":
            here[2] += steps if tier == "device" else -steps if tier == places[2] else 0
        found[tier] = zero.MemoryUse(*here)
    return found


def _data_nbytes(
    config: Config, buffers: Sequence[_Buffer], replicas: int, dtype: torch.dtype
) -> int:
    """Gradients, and weights where they or their states are partitioned."""
    partition = STAGES[config.optimizer.stage]
    total = Fraction(0)
    for buffer in buffers:
        gradients = buffer.layout.numel * dtype.itemsize
        weights = buffer.layout.numel * torch.float32.itemsize
        if not partition.states:
            total += wire_nbytes("all_reduce", gradients, replicas)
            continue
        gathers = buffer.num_gathers if partition.weights else 1
        total += buffer.is_trained * wire_nbytes("reduce_scatter", gradients, replicas)
        total += gathers * wire_nbytes("all_gather", weights, replicas)
    return math.ceil(total)


def _pipeline_nbytes(
    config: Config, module: nn.Module, number: int, owners: Mapping[int, int]
) -> int:
    """To the next stage outputs, to the one before gradients: vectors of float32.

    Stages on one rank send each other nothing, and join what they have tied there.
    """
    if not isinstance(module, parallel.Stage):
        return 0
    here, last = owners[number], len(owners) - 1
    neighbours = sum(owners.get(other, here) != here for other in (number - 1, number + 1))
    numel = config.data.batch_size * config.model.context * config.model.width
    messages = neighbours * config.data.accumulation * numel * torch.float32.itemsize
    tied = module.tied if owners[0] != owners[last] else ()
    return messages + sum(param.nbytes for param in tied)
