"""Which schedule is the quickest that fits? What ``parallel.schedule = "auto"`` comes to.

Every known schedule, with every number of stages per rank that the model, the micro-batches and the
ranks allow, is simulated with the estimated costs of layers; those that need more memory than there
is are left out.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from anychip.comm import gather_objects
from anychip.contract import Backend, Communicator
from anychip.train import parallel
from anychip.train.config import AUTO, Config
from anychip.train.cutting import Draft, arrange, draft, gather_speeds, mesh_sizes
from anychip.train.precision import PrecisionPolicy


class Proposal(NamedTuple):
    """A schedule that is possible.

    Attributes:
        name: of the schedule.
        virtual: stages per rank.
        makespan: of a step, in the operations that layers are estimated in.
        idle: the part of all ranks' time in which they wait.
        nbytes: in use at most, on the rank that has most.
        fits: it is not more than there is.
    """

    name: str
    virtual: int
    makespan: float
    idle: float
    nbytes: int
    fits: bool


def is_open(config: Config) -> bool:
    """Whether a schedule is to be chosen."""
    return config.parallel.schedule == AUTO and config.parallel.pipeline > 1


def memory_limit(config: Config, chip: Backend) -> int:
    """Bytes of a device that a run may use: ``parallel.memory``, or all that the device has."""
    return config.parallel.memory or chip.properties().total_memory


def choose(
    config: Config, model: Draft, replicas: int, policy: PrecisionPolicy, limit: int
) -> tuple[Config, list[Proposal]]:
    """The settings with the quickest schedule that fits, of these candidates.

    Of two that are as quick the one that needs less memory.

    Args:
        limit: bytes of a device; 0: there is no limit.

    Raises:
        ValueError: none fits, or none is possible.
    """
    found = []
    for name, virtual in _possible(config, len(model.costs[0])):
        try:
            made = arrange(_with(config, name, virtual), model, replicas, policy)
        except ValueError:  # microbatches that this schedule cannot have
            continue
        nbytes, line = max(made.peaks), made.timeline
        fits = nbytes <= limit or not limit
        numbers = float(line.makespan), float(line.bubble_ratio), nbytes, fits
        found.append(Proposal(name, virtual, *numbers))
    if not found:
        raise ValueError(
            f"parallel.schedule = auto: no schedule has {config.parallel.pipeline} ranks with "
            f"{config.parallel.virtual or 'any number of'} stages each and "
            f"{config.data.accumulation} micro-batches of {len(model.costs[0])} layers; take other "
            "numbers"
        )
    fitting = [candidate for candidate in found if candidate.fits]
    if not fitting:
        least = min(found, key=lambda candidate: candidate.nbytes)
        raise ValueError(
            f"parallel.schedule = auto: none of {len(found)} schedules fits into {limit:,} bytes; "
            f"{least.name} with {least.virtual} stages per rank needs least, {least.nbytes:,}: "
            "take more ranks, a higher optimizer.stage or smaller batches, or raise parallel.memory"
        )
    best = min(fitting, key=lambda candidate: (candidate.makespan, candidate.nbytes))
    return _with(config, best.name, best.virtual), found


def settle(config: Config, chip: Backend, comm: Communicator, policy: PrecisionPolicy) -> Config:
    """The settings of a run with the schedule that all ranks choose. A collective call.

    By the costs that :func:`gather_speeds` gives, and the memory of the rank that has least.
    """
    if not is_open(config):
        return config
    speeds = gather_speeds(config, chip, comm)
    limit = min(filter(None, gather_objects(comm, memory_limit(config, chip))), default=0)
    replicas = mesh_sizes(config.parallel, comm.world_size)["data"]
    return choose(config, draft(config, policy, speeds), replicas, policy, limit)[0]


def _possible(config: Config, num_layers: int) -> Iterator[tuple[str, int]]:
    """Names and stages per rank for which there are layers."""
    asked, most = config.parallel.virtual, num_layers // config.parallel.pipeline
    for name in parallel.NAMES:
        least = parallel.stages_per_rank(name)
        for virtual in range(least, most + 1) if name in parallel.LOOPS else (least,):
            if virtual <= most and asked in (0, virtual):
                yield name, virtual


def _with(config: Config, name: str, virtual: int) -> Config:
    return replace(config, parallel=replace(config.parallel, schedule=name, virtual=virtual))
