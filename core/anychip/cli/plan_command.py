"""``anychip plan``: what ``anychip train`` would do with the same settings, without doing it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from anychip.cli.backends_command import WIDE
from anychip.cli.settings import SettingsCommand
from anychip.cli.train_command import chip_names, split

if TYPE_CHECKING:
    from anychip.train.choosing import Proposal
    from anychip.train.cutting import StagePlan
    from anychip.train.planning import RunPlan

SCHEMA = 1


@click.command("plan", cls=SettingsCommand)
@click.argument("arguments", nargs=-1, metavar="[CONFIG.toml] [key=value ...]")
@click.option(
    "--backend", metavar="NAME[,NAME...]",
    help="The chip to plan for, or one for each part of a pipeline; chosen when not given.",
)  # fmt: skip
@click.option(
    "--nproc", type=click.IntRange(min=1),
    help="Ranks of the job.  [default: what the parallel sizes multiply to]",
)  # fmt: skip
@click.option(
    "--timeline", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.svg",
    help="Draw who does what when, and the memory in use.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON; docs/cli.md has the schema.")
def command(
    arguments: tuple[str, ...],
    backend: str | None,
    nproc: int | None,
    timeline: Path | None,
    as_json: bool,
) -> None:
    """Show what a training run would be like: parameters, stages, memory, messages, waiting.

    Takes the settings of anychip train. Reads no data and makes no weights.
    """
    import anychip
    from anychip import registry
    from anychip.train import config, cutting, planning

    path, _, settings = split(arguments, ())
    configuration = config.load(path, settings, note=lambda text: click.echo(text, err=True))
    names = chip_names(backend, configuration)
    if len(names) > 1:
        names = cutting.chips_of_stages(names, configuration)
        configuration = replace(configuration, run=replace(configuration.run, backend=names))
        chips = [registry.choose(name) for name in names]
    else:
        chips = [anychip.use(backend, config=next(iter(names), None))]
    if timeline is not None and timeline.suffix != ".svg":
        raise click.UsageError(f"--timeline: a file that ends in .svg expected, got {timeline}")
    plan = planning.plan(configuration, chips[0], nproc, *chips[1:])
    if timeline is not None:
        timeline.write_text(_picture(plan), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(_to_json(plan), indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)
    console.print(_head(plan), markup=False, soft_wrap=True)
    console.print()
    console.print(_table(plan))
    if plan.candidates:
        console.print()
        console.print(_candidates(plan))
    if plan.config.optimizer.offload:
        console.print(f"\n{_tiers(plan)}", markup=False, soft_wrap=True)
    if plan.timeline is not None:
        console.print(f"\n{_waiting(plan)}\n{plan.timeline.grid()}", markup=False, soft_wrap=True)


def _head(plan: RunPlan) -> str:
    config, (replicas, ranks_of_replica) = plan.config, plan.sizes.values()
    kind = getattr(config.model, "family", type(config.model).__name__.removesuffix("Config"))
    tokens = config.data.batch_size * config.data.accumulation * config.model.context * replicas
    ranks = replicas * ranks_of_replica
    are_frozen = plan.num_trained < plan.num_parameters
    trained = f", of which {plan.num_trained:,} are trained," if are_frozen else ""
    return (
        f"{kind} with {plan.num_parameters:,} parameters{trained} in {plan.policy.name} "
        f"({plan.policy.why})\n"
        f"{config.run.steps} steps of {tokens:,} tokens on {ranks} rank{'s' * (ranks > 1)}: "
        f"data {replicas} x pipeline {ranks_of_replica}, ZeRO stage {config.optimizer.stage}\n"
        f"Costs: {plan.flops_per_byte:.3g} operations in the time of a byte, {_source(plan)}"
        f"{_speeds(plan)}"
    )


def _speeds(plan: RunPlan) -> str:
    """Of chips that are not alike; without a rate of each they count as equally fast."""
    if len({*plan.speeds}) == 1:
        return ""
    rates = (f"{speed.flops / 1e9:.3g}" if speed.flops else "unknown" for speed in plan.speeds)
    return f"\nChips of the pipeline's ranks, in Gflop/s of float32: {', '.join(rates)}"


def _source(plan: RunPlan) -> str:
    """Where the ratio comes from."""
    if plan.rates is None:
        return "by the device's properties, or 10 where they do not say"
    return f"measured {plan.rates.date} on {plan.rates.device}"


def _table(plan: RunPlan) -> Table:
    """A row per stage: what one of its ranks has and sends."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("stage", "rank", "layers"):
        table.add_column(title)
    for title in ("cost", "parameters", "bytes: parameters", "gradients", "states", "activations"):
        table.add_column(title, justify="right")
    for title in ("sent per step: replicas", "stages"):
        table.add_column(title, justify="right")
    for number, stage in enumerate(plan.stages):
        table.add_row(
            str(number), str(stage.rank), f"{stage.layers.start} to {stage.layers.stop - 1}",
            f"{_share(plan, stage):.1%}",
            *(f"{n:,}" for n in (stage.num_parameters, *stage.memory, stage.activations.saved)),
            f"{stage.data_nbytes:,}", f"{stage.pipeline_nbytes:,}",
        )  # fmt: skip
    return table


def _tiers(plan: RunPlan) -> str:
    """A line per stage and tier: what is where."""
    return "\n".join(
        f"stage {number}, {tier}: "
        + ", ".join(f"{name} {value:,}" for name, value in use._asdict().items())
        for number, stage in enumerate(plan.stages)
        for tier, use in stage.tiers.items()
    )


def _share(plan: RunPlan, stage: StagePlan) -> float:
    """The part of a micro-batch's work that a stage does."""
    return stage.cost.total / sum(other.cost.total for other in plan.stages)


def _waiting(plan: RunPlan) -> str:
    from anychip.train import parallel

    assert plan.timeline is not None
    assert plan.schedule is not None
    alike = parallel.simulate(plan.schedule).bubble_ratio
    count = plan.config.data.accumulation
    return (
        f"{plan.config.parallel.schedule}, {count} micro-batches: ranks wait "
        f"{float(plan.timeline.bubble_ratio):.1%} of the time; with stages that cost alike "
        f"{float(alike):.1%}\n"
        f"bytes in use at most, per rank: {', '.join(f'{n:,}' for n in plan.arrangement.peaks)}"
    )


def _picture(plan: RunPlan) -> str:
    from anychip.train import parallel

    made, settings = plan.arrangement, plan.config.parallel
    ranks, count = len(made.timeline.rows), plan.config.data.accumulation
    name = f"{settings.schedule}, " if ranks > 1 else ""
    title = (
        f"{name}{ranks} rank{'s' * (ranks > 1)}, {len(plan.stages)} stages, {count} micro-batches: "
        f"ranks wait {float(made.timeline.bubble_ratio):.1%} of the time"
    )
    return parallel.draw(made.timeline, made.memory, title=title)


def _candidates(plan: RunPlan) -> Table:
    """What the schedule was chosen from."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("schedule")
    for title in ("stages per rank", "time", "idle", "bytes at most", "fits"):
        table.add_column(title, justify="right")
    table.add_column("")
    quickest = min(candidate.makespan for candidate in plan.candidates)
    for each in plan.candidates:
        table.add_row(
            each.name, str(each.virtual), f"{each.makespan / quickest:.3f}", f"{each.idle:.1%}",
            f"{each.nbytes:,}", "yes" if each.fits else "no",
            "chosen" if _is_chosen(plan, each) else "",
        )  # fmt: skip
    return table


def _is_chosen(plan: RunPlan, candidate: Proposal) -> bool:
    settings = plan.config.parallel
    return (candidate.name, candidate.virtual) == (settings.schedule, settings.virtual)


def _to_json(plan: RunPlan) -> dict[str, Any]:
    timeline = plan.timeline
    return {
        "schema": SCHEMA, "parameters": plan.num_parameters, "trained": plan.num_trained,
        "precision": plan.policy.name, "ranks": plan.sizes,
        "zero_stage": plan.config.optimizer.stage,
        "schedule": plan.config.parallel.schedule if timeline else None,
        "flops_per_byte": plan.flops_per_byte, "rates_date": plan.rates and plan.rates.date,
        "microbatches": plan.config.data.accumulation,
        "bubble": float(timeline.bubble_ratio) if timeline else 0.0,
        "peak_nbytes": plan.arrangement.peaks, "memory_limit": plan.memory_limit,
        "candidates": [
            {
                "schedule": each.name, "stages_per_rank": each.virtual, "makespan": each.makespan,
                "idle": each.idle, "nbytes": each.nbytes, "fits": each.fits,
                "chosen": _is_chosen(plan, each),
            }
            for each in plan.candidates
        ],
        "grid": timeline.grid().splitlines() if timeline else [],
        "stages": [
            {
                "rank": stage.rank, "layers": [stage.layers.start, stage.layers.stop - 1],
                "cost": _share(plan, stage), "parameters": stage.num_parameters,
                "nbytes": {
                    **stage.memory._asdict(),
                    "activations_of_a_microbatch": stage.activations.saved,
                },
                "tiers": {tier: use._asdict() for tier, use in stage.tiers.items()},
                "sent_nbytes": {"replicas": stage.data_nbytes, "stages": stage.pipeline_nbytes},
            }
            for stage in plan.stages
        ],
    }  # fmt: skip
