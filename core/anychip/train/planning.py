"""What will a run be like, before it is one? Sizes, stages, bytes and waiting, without training.

Everything comes from the functions that build and run it, on a model without data: how layers are
cut, how buckets are laid out, in which order stages work. Not looked at: the data, and activations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn

from anychip.comm import wire_nbytes
from anychip.contract import Backend
from anychip.train import models, parallel, precision, zero
from anychip.train.config import Config
from anychip.train.optim import Rule
from anychip.train.run import make_schedule, measured_rates, mesh_sizes, rule_of, stage_layers
from anychip.train.zero import checks
from anychip.train.zero.layout import Layout, by_size, default_nbytes
from anychip.train.zero.layout import plan as plan_layout
from anychip.train.zero.tiers import in_text, tiers_of
from anychip.train.zero.units import divide, own_parameters
from anychip.train.zero.weights import STAGES


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One stage of a replica: the ranks that hold it.

    Attributes:
        rank: of the pipeline's, which may hold other stages too.
        layers: of the whole model.
        cost: of one micro-batch, in estimated operations.
        num_parameters: with the copies of tied ones.
        memory: of the rank that has most of each; activations are not in it. Where the rank has
            other stages too, as if it had not.
        tiers: of each tier that is used, what of that is there.
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
    data_nbytes: int
    pipeline_nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """A run on paper.

    Attributes:
        config: its settings.
        num_parameters: of the whole model.
        sizes: axis name to number of ranks, as in the mesh.
        policy: of precision.
        stages: in order; one without a pipeline.
        rates: that the costs come from; None: from the device's properties.
        flops_per_byte: what the device computes in the time of a byte, by those.
        schedule: of one step; None with one stage.
        timeline: of it with the estimated costs and free messages; None with one stage.
    """

    config: Config
    num_parameters: int
    sizes: dict[str, int]
    policy: precision.PrecisionPolicy
    stages: tuple[StagePlan, ...]
    rates: parallel.Rates | None
    flops_per_byte: float
    schedule: parallel.Schedule | None
    timeline: parallel.Timeline | None


def plan(config: Config, chip: Backend, nproc: int | None = None) -> RunPlan:
    """What ``build`` would make, without its data and weights.

    Args:
        nproc: ranks of the job; None: as many as the parallel sizes multiply to.

    Raises:
        ValueError: sizes that do not fit, or rates of another device; the messages are those of a
            run.
        UnsupportedError: a precision or stage that this chip or version does not have.
    """
    settings = config.parallel
    if nproc is None:
        nproc = max(1, settings.data) * settings.pipeline
    sizes = mesh_sizes(settings, nproc)
    policy = precision.policy(config.run.precision, chip)
    checks.check_stage(config.optimizer.stage)
    offload = in_text(config.optimizer.offload)
    checks.check_offload(
        {"offload": offload}, config.optimizer.stage, rule_of(config), has_masters=False
    )
    with torch.device("meta"):
        whole = models.build(config.model)
    rates = measured_rates(config, chip)
    ratio = parallel.flops_per_byte(chip, rates)
    costs, layers = stage_layers(config, whole, ratio)
    per_stage = parallel.stage_costs(costs, layers)
    schedule = make_schedule(config) if len(layers) > 1 else None
    owners = schedule.owners() if schedule else {0: 0}
    stages = tuple(
        _stage(config, whole, number, layers, per_stage[number], owners, sizes["data"], policy)
        for number in range(len(layers))
    )
    return RunPlan(
        config=config,
        num_parameters=sum(param.numel() for param in whole.parameters()),
        sizes=sizes,
        policy=policy,
        stages=stages,
        rates=rates,
        flops_per_byte=ratio,
        schedule=schedule,
        timeline=_timeline(schedule, per_stage) if schedule else None,
    )


def _timeline(
    schedule: parallel.Schedule, costs: Sequence[parallel.LayerCost]
) -> parallel.Timeline:
    forward, backward = [c.forward for c in costs], [c.backward for c in costs]
    return parallel.simulate(schedule, parallel.Costs(forward=forward, backward=backward))


def _stage(
    config: Config,
    whole: models.Decoder,
    number: int,
    layers: Sequence[range],
    cost: parallel.LayerCost,
    owners: Mapping[int, int],
    replicas: int,
    policy: precision.PrecisionPolicy,
) -> StagePlan:
    module = parallel.make_stage(whole, layers[number])
    decay = config.optimizer.weight_decay
    groups = [group["params"] for group in models.parameter_groups(module, decay)]
    rule, zero_stage = rule_of(config), config.optimizer.stage
    buffers = _buffers(module, groups, zero_stage, replicas)
    ranks = [_memory(groups, buffers, rule, zero_stage, replicas, r) for r in range(replicas)]
    memory = zero.MemoryUse(*(max(column) for column in zip(*ranks, strict=True)))
    return StagePlan(
        rank=owners[number],
        layers=layers[number],
        cost=cost,
        num_parameters=sum(param.numel() for group in groups for param in group),
        memory=memory,
        tiers=_in_tiers(memory, config.optimizer.offload, len(groups)),
        data_nbytes=_data_nbytes(config, buffers, replicas, policy.reduce_dtype),
        pipeline_nbytes=_pipeline_nbytes(config, module, number, owners),
    )


@dataclass(frozen=True, slots=True)
class _Buffer:
    """What is sent together: parameters and their layout; how often it is gathered per batch."""

    params: Sequence[Tensor]
    layout: Layout
    num_gathers: int = 0


def _buffers(
    module: nn.Module, groups: Sequence[Sequence[Tensor]], stage: int, replicas: int
) -> list[_Buffer]:
    """As :class:`.zero.Optimizer` will make them."""
    if replicas == 1:
        return []
    parts = replicas if STAGES[stage].states else 1
    if STAGES[stage].weights:
        units = divide(module, "blocks")
        owned = [list(params.values())[::-1] for params in own_parameters(module, units)]
        # Before forward and before backward; the last block and the root stay in between.
        again = [2] * (len(units) - 2) + [1] * min(2, len(units))
        return [
            _Buffer(params, plan_layout([p.numel() for p in params], parts), num)
            for params, num in zip(owned, again, strict=True)
            if params
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
    buffers: Sequence[_Buffer],
    rule: Rule,
    stage: int,
    replicas: int,
    rank: int,
) -> zero.MemoryUse:
    """As :meth:`.zero.Optimizer.memory` will say."""
    shards = [param for group in groups for param in group]
    whole = sum(param.nbytes for param in shards)
    partition = STAGES[stage]
    if partition.states and replicas > 1:
        shards = [
            param.reshape(-1)[: buffer.layout.piece(index, rank).numel]
            for buffer in buffers
            for index, param in enumerate(buffer.params)
        ]
    owned = sum(shard.nbytes for shard in shards)
    states = sum(t.nbytes for shard in shards for t in rule.init(shard).values())
    states += len(groups) * torch.float32.itemsize  # the step counts
    weights = owned if partition.weights else whole
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
        gathers = buffer.num_gathers * config.data.accumulation if partition.weights else 1
        total += wire_nbytes("reduce_scatter", gradients, replicas)
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
