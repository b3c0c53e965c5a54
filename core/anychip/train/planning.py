"""What will a run be like, before it is one? Sizes, stages, bytes and waiting, without training.

Everything comes from the functions that build and run it, on a model without data. Not looked at:
the data.
"""

from dataclasses import dataclass

from anychip.contract import Backend
from anychip.train import parallel, precision
from anychip.train.choosing import Proposal, choose, is_open, memory_limit
from anychip.train.config import Config
from anychip.train.cutting import (
    Arrangement,
    StagePlan,
    arrange,
    draft,
    measured_rates,
    mesh_sizes,
    rule_of,
)
from anychip.train.zero import checks
from anychip.train.zero.tiers import in_text


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """A run on paper.

    Attributes:
        config: its settings, with the schedule that was chosen.
        num_parameters: of the whole model.
        num_trained: of them, that are not frozen beside adapters.
        sizes: axis name to number of ranks, as in the mesh.
        policy: of precision.
        arrangement: stages, their schedule, and what is in use when; one stage without a pipeline.
        candidates: that the schedule was chosen from; none where the settings name one.
        memory_limit: bytes of a device that candidates had to fit.
        rates: that the costs of the first stage come from; None: from the device's properties.
        speeds: per rank of the pipeline, by those.
    """

    config: Config
    num_parameters: int
    num_trained: int
    sizes: dict[str, int]
    policy: precision.PrecisionPolicy
    arrangement: Arrangement
    candidates: tuple[Proposal, ...]
    memory_limit: int
    rates: parallel.Rates | None
    speeds: tuple[parallel.Speed, ...]

    @property
    def flops_per_byte(self) -> float:
        """What the first stage's device computes in the time of a byte."""
        return self.speeds[0].flops_per_byte

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """In order; one without a pipeline."""
        return self.arrangement.stages

    @property
    def schedule(self) -> parallel.Schedule | None:
        """Of one step; None with one stage."""
        return self.arrangement.schedule if len(self.stages) > 1 else None

    @property
    def timeline(self) -> parallel.Timeline | None:
        """Of the schedule; None with one stage."""
        return self.arrangement.timeline if len(self.stages) > 1 else None


def plan(config: Config, chip: Backend, nproc: int | None = None, *more: Backend) -> RunPlan:
    """What ``build`` would make, without its data and weights.

    Args:
        chip: of all ranks, or of the first one of a pipeline.
        nproc: ranks of the job; None: as many as the parallel sizes multiply to.
        more: chips of the other ranks of a pipeline.

    Raises:
        ValueError: sizes that do not fit, or rates of another device; the messages are those of a
            run.
        UnsupportedError: a precision or stage that this chip or version does not have.
    """
    settings = config.parallel
    if nproc is None:
        nproc = max(1, settings.data) * settings.pipeline
    sizes = mesh_sizes(settings, nproc)
    chips = (chip, *more) if more else (chip,) * settings.pipeline
    policy = precision.common_policy(
        config.run.precision, chip, [precision.policy(config.run.precision, c).name for c in chips]
    )
    checks.check_stage(config.optimizer.stage)
    offload = {"offload": in_text(config.optimizer.offload)}
    checks.check_offload(offload, config.optimizer.stage, rule_of(config), has_masters=False)
    measured = [measured_rates(config, each) for each in chips]
    speeds = tuple(map(parallel.speed, chips, measured))
    model = draft(config, policy, speeds)
    limits = filter(None, (memory_limit(config, each) for each in chips))
    limit, candidates = min(limits, default=0), list[Proposal]()
    if is_open(config):
        config, candidates = choose(config, model, sizes["data"], policy, limit)
    params = list(model.whole.parameters())
    return RunPlan(
        config=config, sizes=sizes, policy=policy, rates=measured[0], speeds=speeds,
        num_parameters=sum(param.numel() for param in params),
        num_trained=sum(param.numel() for param in params if param.requires_grad),
        arrangement=arrange(config, model, sizes["data"], policy),
        candidates=tuple(candidates), memory_limit=limit,
    )  # fmt: skip
