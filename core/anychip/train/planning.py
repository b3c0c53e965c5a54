"""What will a run be like, before it is one? Sizes, stages, bytes and waiting, without training.

Everything comes from the functions that build and run it, on a model without data: how layers are
cut, how buckets are laid out, in which order stages work. Not looked at: the data, and activations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn

from anychip.comm import wire_nbytes
from anychip.contract import Backend
from anychip.train import models, parallel, precision, zero
from anychip.train.config import Config
from anychip.train.optim import Rule
from anychip.train.run import measured_rates, mesh_sizes, rule_of, stage_layers
from anychip.train.zero import checks, partition


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One stage of a replica: the ranks that hold it.

    Attributes:
        layers: of the whole model.
        cost: of one micro-batch, in estimated operations.
        num_parameters: with the copies of tied ones.
        memory: of the rank that has most of each; activations are not in it.
        data_nbytes: that a rank sends to other replicas in a step: gradients and parameters.
        pipeline_nbytes: to other stages: outputs and gradients of all micro-batches, and those of
            tied parameters.
    """

    layers: range
    cost: parallel.LayerCost
    num_parameters: int
    memory: zero.MemoryUse
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
        timeline: of one step with the estimated costs and free messages; None with one stage.
    """

    config: Config
    num_parameters: int
    sizes: dict[str, int]
    policy: precision.PrecisionPolicy
    stages: tuple[StagePlan, ...]
    rates: parallel.Rates | None
    flops_per_byte: float
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
    with torch.device("meta"):
        whole = models.build(config.model)
    rates = measured_rates(config, chip)
    ratio = parallel.flops_per_byte(chip, rates)
    costs, layers = stage_layers(config, whole, ratio)
    per_stage = parallel.stage_costs(costs, layers)
    stages = tuple(
        _stage(config, parallel.make_stage(whole, part), part, cost, sizes["data"], policy)
        for part, cost in zip(layers, per_stage, strict=True)
    )
    return RunPlan(
        config=config,
        num_parameters=sum(param.numel() for param in whole.parameters()),
        sizes=sizes,
        policy=policy,
        stages=stages,
        rates=rates,
        flops_per_byte=ratio,
        timeline=_timeline(config, per_stage) if len(stages) > 1 else None,
    )


def _timeline(config: Config, costs: Sequence[parallel.LayerCost]) -> parallel.Timeline:
    schedule = parallel.SCHEDULES[config.parallel.schedule](len(costs), config.data.accumulation)
    forward, backward = [c.forward for c in costs], [c.backward for c in costs]
    return parallel.simulate(schedule, parallel.Costs(forward=forward, backward=backward))


def _stage(
    config: Config,
    module: nn.Module,
    layers: range,
    cost: parallel.LayerCost,
    replicas: int,
    policy: precision.PrecisionPolicy,
) -> StagePlan:
    decay = config.optimizer.weight_decay
    groups = [group["params"] for group in models.parameter_groups(module, decay)]
    rule = rule_of(config)
    ranks = [_memory(groups, rule, config.optimizer.stage, replicas, r) for r in range(replicas)]
    return StagePlan(
        layers=layers,
        cost=cost,
        num_parameters=sum(param.numel() for group in groups for param in group),
        memory=zero.MemoryUse(*(max(column) for column in zip(*ranks, strict=True))),
        data_nbytes=_data_nbytes(groups, config.optimizer.stage, replicas, policy.reduce_dtype),
        pipeline_nbytes=_pipeline_nbytes(config, module, layers),
    )


def _layouts(group: Sequence[Tensor], replicas: int) -> list[partition.Layout]:
    max_numel = zero.BUCKET_NBYTES // torch.float32.itemsize
    return partition.plan([param.numel() for param in group], replicas, max_numel=max_numel)


def _memory(
    groups: Sequence[Sequence[Tensor]], rule: Rule, stage: int, replicas: int, rank: int
) -> zero.MemoryUse:
    """As :meth:`.zero.Optimizer.memory` will say."""
    whole = owned = states = 0
    for group in groups:
        shards = list(group)
        if stage and replicas > 1:
            shards = [
                group[member].reshape(-1)[: layout.piece(position, rank).numel]
                for layout in _layouts(group, replicas)
                for position, member in enumerate(layout.members)
            ]
        whole += sum(param.nbytes for param in group)
        owned += sum(shard.nbytes for shard in shards)
        states += sum(t.nbytes for shard in shards for t in rule.init(shard).values())
        states += torch.float32.itemsize  # the step count
    return zero.MemoryUse(whole, owned if stage == 2 else whole, states)


def _data_nbytes(
    groups: Sequence[Sequence[Tensor]], stage: int, replicas: int, dtype: torch.dtype
) -> int:
    """Buckets of gradients, and of parameters where they are partitioned."""
    total = Fraction(0)
    for group in groups:
        for layout in _layouts(group, replicas):
            gradients = layout.numel * dtype.itemsize
            if stage:
                total += wire_nbytes("reduce_scatter", gradients, replicas)
                total += wire_nbytes("all_gather", layout.numel * 4, replicas)
            else:
                total += wire_nbytes("all_reduce", gradients, replicas)
    return math.ceil(total)


def _pipeline_nbytes(config: Config, module: nn.Module, layers: range) -> int:
    """To the next stage outputs, to the one before gradients: vectors of float32."""
    if not isinstance(module, parallel.Stage):
        return 0
    neighbours = (layers.start > 0) + (layers.stop < module.num_layers)
    numel = config.data.batch_size * config.model.context * config.model.width
    messages = neighbours * config.data.accumulation * numel * torch.float32.itemsize
    return messages + sum(param.nbytes for param in module.tied)
