"""A plan against the run that it is of: its stages, its memory, and what its ranks send."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import anychip
from anychip.cli.group import run as anychip_command
from anychip.comm import wire_nbytes
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.train import config, loop, models, parallel, planning, zero
from anychip.train.zero.exchange import Flat

TINY = [
    *("run.sample_tokens=5", "data.prefetch=0", "model.layers=3", "model.heads=2"),
    *("model.width=64", "model.context=16", "data.batch_size=2"),
]


class Seen(NamedTuple):
    """Of one rank of a run."""

    stage: int
    layers: range
    num_parameters: int
    num_tensors: int
    memory: zero.MemoryUse
    tiers: dict[str, zero.MemoryUse]
    data: Counter[str]
    pipeline: Counter[str]


def trained(comm: Communicator, settings: list[str], out: Path, steps: int) -> Seen:
    configuration = config.load(None, [*settings, f"run.steps={steps}"])
    run = loop.build(configuration, anychip.use("cpu"), comm)
    loop.train(run, out, lambda row: None)
    params = list(run.model.parameters())
    model, everything = run.model, range(configuration.model.layers + 2)
    data, pipeline = run.mesh.axis("data"), run.mesh.axis("pipeline")
    return Seen(
        stage=pipeline.rank,
        layers=model.layers if isinstance(model, parallel.Stage) else everything,
        num_parameters=sum(param.numel() for param in params), num_tensors=len(params),
        memory=run.optimizer.memory(),
        tiers={tier: run.optimizer.memory(tier) for tier in ("device", "host")},
        data=data.traffic.nbytes + gathered(run.optimizer),
        pipeline=pipeline.traffic.nbytes,
    )  # fmt: skip


def gathered(opt: zero.Optimizer) -> Counter[str]:
    """What stage 3 brings over a communicator of its own."""
    if opt.sharded is None or opt.stage < 3:
        return Counter()
    assert isinstance(opt.sharded.exchange, Flat)
    return opt.sharded.exchange.gather_comm.traffic.nbytes


@pytest.mark.grid
@pytest.mark.parametrize(("world_size", "settings"), [
    (1, ["optimizer.kind=lion"]),
    (2, ["optimizer.stage=0", "optimizer.kind=sgd"]),
    (3, ["optimizer.stage=1", "model.kind=llama"]),
    (2, ["optimizer.stage=2", "optimizer.states=8bit"]),
    (2, ["optimizer.stage=3", "data.accumulation=2"]),
    (4, ["optimizer.stage=3", "parallel.pipeline=2", "data.accumulation=2"]),
    (2, ["optimizer.stage=3", "optimizer.offload=states=host, gradients=host, weights=host"]),
    (2, ["parallel.pipeline=2", "data.accumulation=3", "run.precision=bf16"]),
    (4, ["parallel.pipeline=2", "optimizer.stage=2", "data.accumulation=2"]),
    (2, ["parallel.pipeline=2", "optimizer.offload=states=host", "data.accumulation=2"]),
], ids=[
    "one", "replicas", "stage1", "states_8bit", "stage3", "stage3_of_stages", "offload", "pipeline",
    "replicas_of_stages", "offload_of_stages",
])  # fmt: skip
def test_plan_is_what_the_run_is(tmp_path: Path, world_size: int, settings: list[str]) -> None:
    settings = [*TINY, *settings]
    plan = planning.plan(config.load(None, settings), anychip.use("cpu"), world_size)
    found: dict[int, list[Seen]] = {}
    for steps in (1, 3):
        (tmp_path / f"{steps}").mkdir()
        out = tmp_path / f"{steps}"
        found[steps] = run_ranks(
            world_size, lambda comm, out=out, steps=steps: trained(comm, settings, out, steps)
        )
    replicas = plan.sizes["data"]
    assert plan.num_parameters == sum(
        param.numel() for param in models.build(plan.config.model).parameters()
    )
    for number, stage in enumerate(plan.stages):
        pairs = zip(found[1], found[3], strict=True)
        ranks = [(one, three) for one, three in pairs if one.stage == number]
        assert len(ranks) == replicas
        memory = [one.memory for one, _ in ranks]
        assert stage.memory == tuple(max(column) for column in zip(*memory, strict=True))
        for tier in stage.tiers:
            there = [one.tiers[tier] for one, _ in ranks]
            assert stage.tiers[tier] == tuple(max(column) for column in zip(*there, strict=True))
        for one, three in ranks:
            assert (stage.layers, stage.num_parameters) == (one.layers, one.num_parameters)
            assert stage.data_nbytes == sent_to_replicas(plan, one, three)
            assert stage.pipeline_nbytes == (three.pipeline - one.pipeline)["send"] // 2


def sent_to_replicas(plan: planning.RunPlan, one: Seen, three: Seen) -> float:
    """Bytes of gradients and parameters in a step, from runs of one and three."""
    replicas, step = plan.sizes["data"], three.data - one.data
    calls: tuple[str, ...] = ("reduce_scatter", "all_gather")
    if plan.config.optimizer.stage == 0 and replicas > 1:
        calls = ("all_reduce",)
        # Of each parameter whether it has a gradient, and of each rank the loss and a signal.
        step["all_reduce"] -= 2 * (one.num_tensors + 8 * replicas)
    return float(sum(wire_nbytes(call, step[call] // 2, replicas) for call in calls))


@pytest.mark.parametrize(("settings", "message"), [
    (["parallel.pipeline=9"], "from 1 to 6 stages of 6 layers, got 9"),
    (["parallel.pipeline=2", "--nproc", "3"], "do not multiply to the 3 ranks of this job"),
    (["optimizer.offload=states"], "offload must be like 'states=host, "),
    (["optimizer.offload=weights=host"], "whole on each rank before stage 3"),
    (["optimizer.stage=4"], "stage must be 0, 1, 2 or 3, got 4"),
    (["model.heads=3"], "width must be a multiple of heads"),
    (["model.widht=3"], "widht"),
], ids=["stages", "ranks", "offload", "tier", "zero", "model", "name"])  # fmt: skip
def test_plan_of_what_cannot_be_says_what_training_says(
    capsys: pytest.CaptureFixture[str], settings: list[str], message: str
) -> None:
    assert anychip_command(["plan", "--backend", "cpu", *settings]) == 2
    assert message in capsys.readouterr().err


def test_plan_on_the_command_line_shows_the_same_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text("[parallel]\npipeline = 2\n[optimizer]\nstage = 1\n")
    args = ["plan", str(tmp_path / "config.toml"), "--backend", "cpu", "data.accumulation=4"]
    args += ["parallel.data=2", "optimizer.offload=states=host"]
    assert anychip_command([*args, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    plan = planning.plan(config.load(Path(args[1]), args[4:]), anychip.use("cpu"))
    assert plan.timeline is not None
    assert (answer["schema"], answer["ranks"]) == (1, {"data": 2, "pipeline": 2})
    assert answer["bubble"] == float(plan.timeline.bubble_ratio)
    assert [stage["nbytes"] for stage in answer["stages"]] == [
        stage.memory._asdict() for stage in plan.stages
    ]
    assert sum(stage["cost"] for stage in answer["stages"]) == pytest.approx(1.0)
    assert anychip_command(args) == 0
    shown = capsys.readouterr().out
    assert plan.timeline.grid() in shown
    assert f"{answer['parameters']:,} parameters" in shown
    for stage in answer["stages"]:
        assert all(f"{value:,}" in shown for value in stage["nbytes"].values())
        assert stage["tiers"].keys() == {"device", "host"}
        assert (
            f"host: parameters 0, gradients 0, states {stage['tiers']['host']['states']:,}" in shown
        )
        assert all(f"{value:,}" in shown for value in stage["sent_nbytes"].values())
