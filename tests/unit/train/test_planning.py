"""A plan against the run that it is of: its stages, its memory, and what its ranks send."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import nn

import anychip
from anychip.cli.group import run as anychip_command
from anychip.comm import wire_nbytes
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.train import choosing, config, loop, models, parallel, planning, precision, zero
from anychip.train.zero.exchange import Flat
from tests.unit.train.small_runs import nothing, tiny

TINY = tiny("model.layers=4", "model.width=64")
ZERO_OF_STAGES = [
    "optimizer.stage=3", "parallel.pipeline=2", "data.accumulation=4",
]  # fmt: skip


class Seen(NamedTuple):
    """Of one rank of a run."""

    rank: int
    layers: list[range]
    num_parameters: int
    num_tensors: int
    frozen: int
    memory: zero.MemoryUse
    tiers: dict[str, zero.MemoryUse]
    data: Counter[str]
    pipeline: Counter[str]


def trained(comm: Communicator, settings: list[str], out: Path, steps: int) -> Seen:
    configuration = config.load(None, [*settings, f"run.steps={steps}"])
    run = loop.build(configuration, anychip.use("cpu"), comm)
    loop.train(run, out, nothing)
    params = list(run.model.parameters())
    stages = list(run.pipeline.stages.values()) if run.pipeline else []
    layers = [s.layers for s in stages if isinstance(s, parallel.Stage)]
    if isinstance(run.model, models.Decoder) and not layers:
        with run.optimizer.whole():  # how a library's blocks are called is tried out
            layers = [range(parallel.num_layers(run.model))]
    data, pipeline = run.mesh.axis("data"), run.mesh.axis("pipeline")
    return Seen(
        rank=pipeline.rank, layers=layers, num_parameters=sum(param.numel() for param in params),
        num_tensors=sum(param.requires_grad for param in params),
        frozen=frozen_nbytes(run.optimizer, params), memory=run.optimizer.memory(),
        tiers={tier: run.optimizer.memory(tier) for tier in ("device", "host")},
        data=data.traffic.nbytes + gathered(run.optimizer), pipeline=pipeline.traffic.nbytes,
    )  # fmt: skip


def frozen_nbytes(opt: zero.Optimizer, params: list[nn.Parameter]) -> int:
    """What this rank has of weights that are not trained."""
    frozen = [param for param in params if not param.requires_grad]
    places = {} if opt.sharded is None else opt.sharded.places
    return sum(
        places[p].weights.values[places[p].index].nbytes if p in places else p.nbytes
        for p in frozen
    )


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
    (4, [*ZERO_OF_STAGES, "parallel.schedule=interleaved"]),
    (4, [*ZERO_OF_STAGES, "parallel.schedule=zbv"]),
    (4, [*ZERO_OF_STAGES, "parallel.schedule=dualpipev", "parallel.whole_stages=1"]),
    (4, [*ZERO_OF_STAGES, "parallel.schedule=zb1p", "parallel.whole_stages=1"]),
    (2, ["optimizer.stage=3", "optimizer.offload=states=host, gradients=host, weights=host"]),
    (2, ["parallel.pipeline=2", "data.accumulation=3", "run.precision=bf16"]),
    (4, ["parallel.pipeline=2", "optimizer.stage=2", "data.accumulation=2"]),
    (2, ["parallel.pipeline=2", "optimizer.offload=states=host", "data.accumulation=2"]),
], ids=[
    "one", "replicas", "stage1", "states_8bit", "stage3", "stage3_of_stages", "stage3_in_a_loop",
    "stage3_in_a_V", "stage3_stage_by_stage", "stage3_once", "offload", "pipeline",
    "replicas_of_stages", "offload_of_stages",
])  # fmt: skip
def test_plan_is_what_the_run_is(tmp_path: Path, world_size: int, settings: list[str]) -> None:
    assert_plan_is_run(tmp_path, world_size, [*TINY, *settings])


def assert_plan_is_run(tmp_path: Path, world_size: int, settings: list[str]) -> None:
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
    for rank in range(plan.sizes["pipeline"]):
        stages = [stage for stage in plan.stages if stage.rank == rank]
        pairs = zip(found[1], found[3], strict=True)
        ranks = [(one, three) for one, three in pairs if one.rank == rank]
        assert len(ranks) == replicas
        memory = [sum(column) for column in zip(*(s.memory for s in stages), strict=True)]
        # Each stage has the step counts of its groups, which one optimizer has once.
        memory[-1] -= 2 * 4 * (len(stages) - 1)
        held = [
            one.memory._replace(parameters=one.memory.parameters + one.frozen) for one, _ in ranks
        ]
        most = [max(column) for column in zip(*held, strict=True)]
        # Of several stages, the replica that has most of one may not be that of another.
        assert memory == (pytest.approx(most, rel=5e-3) if len(stages) > 1 else most)
        assert all(planned >= seen for planned, seen in zip(memory, most, strict=True))
        for tier in stages[0].tiers if len(stages) == 1 and not ranks[0][0].frozen else ():
            there = [one.tiers[tier] for one, _ in ranks]
            most_there = tuple(max(column) for column in zip(*there, strict=True))
            assert stages[0].tiers[tier] == most_there
        for one, three in ranks:
            assert [s.layers for s in stages] == one.layers
            assert sum(s.num_parameters for s in stages) == one.num_parameters
            assert sum(s.data_nbytes for s in stages) == sent_to_replicas(plan, one, three)
            sent = (three.pipeline - one.pipeline)["send"] // 2
            assert sum(s.pipeline_nbytes for s in stages) == sent


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
    (["model.widht=3"], "widht"),
], ids=["stages", "ranks", "offload", "tier", "name"])  # fmt: skip
def test_plan_of_what_cannot_be_says_what_training_says(
    capsys: pytest.CaptureFixture[str], settings: list[str], message: str
) -> None:
    assert anychip_command(["plan", "--backend", "cpu", *settings]) == 2
    assert message in capsys.readouterr().err


AUTO = [
    "parallel.schedule=auto", "parallel.pipeline=2", "data.accumulation=4", "model.layers=4",
    "model.width=64", "model.context=16", "data.batch_size=2", "model.heads=2",
]  # fmt: skip


def test_auto_takes_the_quickest_of_all_schedules_that_fit() -> None:
    chip = anychip.use("cpu")
    plan = planning.plan(config.load(None, AUTO), chip)
    found = {(each.name, each.virtual): each for each in plan.candidates}
    # 6 layers on 2 ranks: up to 3 stages each.
    loops = {(name, virtual) for name in parallel.LOOPS for virtual in (2, 3)}
    assert found.keys() == {
        *loops, *((n, 1) for n in parallel.SCHEDULES), *((n, 2) for n in parallel.VS)
    }  # fmt: skip
    for (name, virtual), each in list(found.items())[::6]:
        named = [f"parallel.schedule={name}", f"parallel.virtual={virtual}", *AUTO[1:]]
        alone = planning.plan(config.load(None, named), chip)
        assert alone.candidates == ()
        assert alone.timeline is not None
        assert each.makespan == float(alone.timeline.makespan)
        assert each.nbytes == max(alone.arrangement.peaks)
    best = min(found.values(), key=lambda each: (each.makespan, each.nbytes))
    settings = plan.config.parallel
    assert (settings.schedule, settings.virtual) == (best.name, best.virtual)
    # With room for all but the dearest, one that fits; with none, a sentence that says the least.
    least = min(each.nbytes for each in found.values())
    tight = planning.plan(config.load(None, [*AUTO, f"parallel.memory={least}"]), chip)
    assert max(tight.arrangement.peaks) == least
    assert [each.fits for each in tight.candidates] == [e.nbytes <= least for e in found.values()]
    with pytest.raises(ValueError, match=rf"none of 11 schedules fits .* needs least, {least:,}:"):
        planning.plan(config.load(None, [*AUTO, f"parallel.memory={least - 1}"]), chip)
    with pytest.raises(ValueError, match="no schedule has 2 ranks with 5 stages each and 4 micro"):
        planning.plan(config.load(None, [*AUTO, "parallel.virtual=5"]), chip)


def test_ranks_choose_by_the_one_that_has_least_memory() -> None:
    """Threads of one machine have the same; here each says another limit."""
    chip, configuration = anychip.use("cpu"), config.load(None, AUTO)
    policy = precision.policy("fp32", chip)
    least = min(each.nbytes for each in planning.plan(configuration, chip).candidates)
    limits = {0: 1 << 40, 1: least}

    def work(comm: Communicator) -> config.Config:
        mine = dataclasses.replace(
            configuration,
            parallel=dataclasses.replace(configuration.parallel, memory=limits[comm.rank]),
        )
        return choosing.settle(mine, chip, comm, policy)

    one, two = (found.parallel for found in run_ranks(2, work))
    assert (one.schedule, one.virtual) == (two.schedule, two.virtual)
    alone = planning.plan(config.load(None, [*AUTO, f"parallel.memory={least}"]), chip)
    assert (one.schedule, one.virtual) == (
        alone.config.parallel.schedule, alone.config.parallel.virtual
    )  # fmt: skip


def test_run_that_chooses_works_by_what_was_chosen_and_writes_it_down(tmp_path: Path) -> None:
    settings = [*AUTO, "run.steps=1", "run.sample_tokens=5", "data.prefetch=0"]

    def work(comm: Communicator) -> tuple[Any, ...]:
        run = loop.build(config.load(None, settings), anychip.use("cpu"), comm)
        loop.train(run, tmp_path, nothing)
        assert run.pipeline is not None
        return run.pipeline.schedule.only("F", "I", "W", "B").rows

    plan = planning.plan(config.load(None, AUTO), anychip.use("cpu"))
    assert plan.schedule is not None
    assert run_ranks(2, work) == [plan.schedule.unpaired().rows] * 2
    assert config.load(tmp_path / "config.toml", []).parallel == plan.config.parallel


def test_plan_draws_its_timeline_and_lists_what_it_chose_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, args = tmp_path / "t.svg", ["plan", "--backend", "cpu", *AUTO]
    assert anychip_command([*args, "--timeline", str(file), "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    plan = planning.plan(config.load(None, AUTO), anychip.use("cpu"))
    assert answer["peak_nbytes"] == list(plan.arrangement.peaks)
    assert answer["memory_limit"] == anychip.use("cpu").properties().total_memory
    (chosen,) = [each for each in answer["candidates"] if each["chosen"]]
    settings = plan.config.parallel
    assert (chosen["schedule"], chosen["stages_per_rank"]) == (settings.schedule, settings.virtual)
    text = file.read_text(encoding="utf-8")
    assert f"{settings.schedule}, 2 ranks" in text
    assert parallel.draw(plan.arrangement.timeline, plan.arrangement.memory)[-500:] == text[-500:]
    assert anychip_command(args) == 0
    shown = capsys.readouterr().out
    assert sum(line.rstrip().endswith("chosen") for line in shown.splitlines()) == 1
    assert all(f"{each['nbytes']:,}" in shown for each in answer["candidates"])
    assert anychip_command([*args, "--timeline", str(tmp_path / "t.png")]) == 2
    assert "a file that ends in .svg expected" in capsys.readouterr().err


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
        {**stage.memory._asdict(), "activations_of_a_microbatch": stage.activations.saved}
        for stage in plan.stages
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
