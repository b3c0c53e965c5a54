"""Every schedule on ranks with one and several stages: the bits of one rank that accumulates."""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anychip import ops
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator, UnsupportedError
from anychip.train import optim, zero
from anychip.train.models import GPTConfig, LlamaConfig, build
from anychip.train.parallel import (
    Bytes,
    Local,
    Mesh,
    Pipeline,
    Schedule,
    Stages,
    add_communication,
    add_weights,
    estimate_bytes,
    make_schedule,
    make_stage,
    num_layers,
    parse,
    partition,
    simulate,
)
from anychip.train.parallel.message import Link
from tests.unit.train.zero_oracle import on_models

VOCAB, LENGTH = 29, 6
LLAMA = LlamaConfig(vocab_size=VOCAB, context=8, layers=6, heads=2, kv_heads=1, width=16)
TIED = GPTConfig(vocab_size=VOCAB, context=8, layers=6, heads=2, width=16)
SCHEDULES = {
    "gpipe": 1, "1f1b": 1, "zb1p": 1, "interleaved": 2, "looped-bfs": 2, "interleaved-zb": 2,
    "zbv": 2, "dualpipev": 2,
}  # fmt: skip
"""Stages per rank; with 4 ranks as many stages as layers at most."""
ABOVE = "lm_head.weight"
BELOW = "transformer.wte.weight"


def batch(rows: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets (rows, LENGTH), drawn apart from the ranks."""
    drawn = torch.randint(VOCAB, (2, rows, LENGTH), generator=torch.Generator().manual_seed(3))
    return drawn[0], drawn[1]


def whole(config: GPTConfig | LlamaConfig) -> Any:
    torch.manual_seed(1)
    return build(config)


def stages_of(model: Any, schedule: Schedule, rank: int) -> list[Any]:
    """Those of a rank, in ascending order."""
    parts = partition([1] * num_layers(model), schedule.num_stages)
    owners = schedule.owners()
    return [make_stage(model, part) for s, part in enumerate(parts) if owners[s] == rank]


def tied_of(stages: Sequence[Any]) -> list[nn.Parameter]:
    return [param for stage in stages for param in stage.tied]


def serial(model: Any, count: int) -> tuple[float, dict[str, Tensor]]:
    """The oracle: loss and gradients of plain autograd on one rank, without a pipeline.

    What is tied is two parameters, whose gradients are added at the end: first + last.
    """
    alone = copy.deepcopy(model)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = {ABOVE, BELOW} <= names and model.lm_head.weight is model.transformer.wte.weight
    if tied:
        alone.lm_head.weight = nn.Parameter(alone.lm_head.weight.detach().clone())

    def work(comm: Communicator) -> float:
        total = torch.zeros(())
        for x, y in zip(*(part.chunk(count) for part in batch(2 * count)), strict=True):
            loss = alone(x, y) / count
            loss.backward()
            total += loss.detach()
        return float(total)

    loss = run_ranks(1, work)[0]
    grads = {name: param.grad for name, param in alone.named_parameters()}
    if tied:
        grads[ABOVE] = grads[BELOW] = grads[BELOW] + grads[ABOVE]
    return loss, grads


def pipelined(model: Any, schedule: Schedule, count: int) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients by name of every rank."""

    def work(comm: Communicator, own: Any) -> tuple[float, dict[str, Tensor]]:
        stages = stages_of(own, schedule, comm.rank)
        loss = Pipeline(stages, comm, schedule, tied=tied_of(stages)).run(*batch(2 * count))
        assert loss is not None
        named = [item for stage in stages for item in stage.named_parameters()]
        assert all(param.grad is not None for _, param in named)
        return float(loss), {name: param.grad for name, param in named}

    return on_models(len(schedule.rows), lambda: copy.deepcopy(model), work)


def check_bits(model: Any, schedule: Schedule, count: int) -> None:
    loss, wanted = serial(model, count)
    found: dict[str, Tensor] = {}
    for got, grads in pipelined(model, schedule, count):
        assert got == loss
        assert not found.keys() & grads.keys()
        found |= grads
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert torch.equal(found[name], grad), name


@pytest.mark.parametrize("config", [LLAMA, TIED], ids=["llama", "tied-gpt"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.grid)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_of_every_schedule_have_the_bits_of_one_rank(
    name: str, ranks: int, config: GPTConfig | LlamaConfig
) -> None:
    count = 2 * ranks
    check_bits(whole(config), make_schedule(name, ranks, count, virtual=SCHEDULES[name]), count)


def test_text_of_a_user_runs_with_stages_placed_as_it_says() -> None:
    """Neighbouring stages on one rank, a pair, a split backward, actions on weights, messages."""
    text = (
        "0UNSHARD,0F0,1F0,0F1,1F1,1I0,0B0,1W0,1B1,0B1,0REDUCE_GRAD,0RESHARD\n"
        "2F0,(2F1;2B0)OVERLAP_F_B,2B1"
    )
    check_bits(whole(TIED), parse(text), 2)
    check_bits(whole(TIED), add_communication(parse(text)), 2)


ALONE = "0F0,0I0,0F1,0I1,0W0,0W1"
"""One rank that splits its backwards, and does the weights' parts at the end."""


def test_weight_tied_within_a_stage_has_the_bits_of_autograd_when_the_backward_is_split() -> None:
    """Embedding and head are one parameter of the one stage: one sum per microbatch."""
    model, whole_model = whole(TIED), whole(TIED)
    tokens, targets = batch(4)

    def work(comm: Communicator) -> None:
        stage = make_stage(model, range(num_layers(model)))
        Pipeline(stage, comm, parse(ALONE)).run(tokens, targets)
        for x, y in zip(tokens.chunk(2), targets.chunk(2), strict=True):
            (whole_model(x, y) / 2).backward()

    run_ranks(1, work)
    for (name, param), other in zip(
        model.named_parameters(), whole_model.parameters(), strict=True
    ):
        assert torch.equal(param.grad, other.grad), name


class Mixed(nn.Module):
    """Uses one weight in an operator of ours, and once more in one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
        self.weight = nn.Parameter(drawn)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(ops.linear(x, self.weight), self.weight)


def test_weight_that_waits_and_does_not_is_summed_once_per_microbatch() -> None:
    data = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))

    def work(comm: Communicator) -> list[Any]:
        grads = []
        for text in (ALONE, "0F0,0B0,0F1,0B1"):
            stage = Mixed()
            pipeline = Pipeline(
                stage, comm, parse(text), loss_fn=lambda y, t: (y - t).square().sum()
            )
            pipeline.run(data, data)
            grads.append(stage.weight.grad)
        return grads

    ((split, joined),) = run_ranks(1, work)
    assert torch.equal(split, joined)


def test_weights_of_our_operators_wait_for_W_and_the_others_do_not() -> None:
    """The seed of the loss, then the norms in I; linear and embedding weights in W."""
    model = whole(LLAMA)
    calls: list[tuple[int, float]] = []

    class Recorder(Local):
        def backward(self, output: Any, gradient: Any = None) -> None:
            outputs = output if isinstance(output, list) else [output]
            calls.append((len(outputs), 0.0 if gradient is None else float(len(gradient))))
            torch.autograd.backward(output, gradient)

    def work(comm: Communicator) -> None:
        stage = make_stage(model, range(num_layers(model)))
        Pipeline(stage, comm, parse(ALONE)).run(*batch(4), optimizer=Recorder())

    run_ranks(1, work)
    blocks, norms, linears = 6, 2, 7
    now, later = blocks * norms + 1, blocks * linears + 2
    seed, of_norms, of_weights = (1, 0.0), (now, float(now)), (later, float(later))
    assert calls == [seed, of_norms, seed, of_norms, of_weights, of_weights]


def test_split_backward_of_a_checkpoint_runs_it_twice_and_keeps_no_weights() -> None:
    """Between I and W it holds what a plain one holds there, which is no more than F saves."""

    def work(comm: Communicator, recomputes: bool) -> tuple[list[int], int]:
        model, runs = whole(LLAMA), []
        plain = model.run_block
        model.run_block = lambda *given: runs.append(1) or plain(*given)
        if recomputes:
            model.run_block = partial(checkpoint, model.run_block, use_reentrant=False)
        stage = make_stage(model, range(num_layers(model)))
        pipeline = Pipeline(stage, comm, parse("0F0,0I0,0W0"), count_bytes=True)
        pipeline.run(*batch(2))
        return pipeline.bytes_in_use, len(runs)

    (plain, _), (again, count) = (
        run_ranks(1, partial(work, recomputes=recomputes))[0] for recomputes in (False, True)
    )
    saved, kept, left = plain[:3]
    assert again[1:3] == [kept, left] == [kept, 0]
    assert 0 < kept <= saved
    assert count == 2 * num_layers(whole(LLAMA)) - 4  # blocks


def test_split_backward_under_autocast_has_the_bits_of_a_whole_one() -> None:
    def trained(name: str) -> list[dict[str, Tensor]]:
        models, schedule = [whole(TIED) for _ in range(2)], make_schedule(name, 2, 4)

        def work(comm: Communicator) -> dict[str, Tensor]:
            (stage,) = stages_of(models[comm.rank], schedule, comm.rank)
            autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
            Pipeline(stage, comm, schedule, tied=stage.tied, autocast=autocast).run(*batch(8))
            return {name: param.grad for name, param in stage.named_parameters()}

        return run_ranks(2, work)

    for one, two in zip(trained("1f1b"), trained("zb1p"), strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(grad, two[name]) for name, grad in one.items())


def test_loss_is_scaled_once_by_the_callers_backward_when_the_backward_is_split() -> None:
    class Scaling(Local):
        def backward(self, output: Any, gradient: Any = None) -> None:
            torch.autograd.backward(output * 8 if gradient is None else output, gradient)

    def work(comm: Communicator) -> list[Tensor]:
        grads: list[Any] = []
        for optimizer in (None, Scaling()):
            generator = torch.Generator().manual_seed(comm.rank)
            stage = nn.Linear(3, 3)
            with torch.no_grad():
                stage.weight.copy_(torch.randn(3, 3, generator=generator))
                stage.bias.zero_()
            pipeline = Pipeline(
                stage, comm, make_schedule("zb1p", 2, 3),
                loss_fn=lambda y, t: (y - t).square().sum(),
            )  # fmt: skip
            pipeline.run(torch.ones(3, 3), torch.zeros(3, 3), optimizer=optimizer)
            grads.append(stage.weight.grad)
        return grads

    for plain, scaled in run_ranks(2, work):
        assert torch.equal(scaled, plain * 8)
        assert plain.any()


def test_split_backward_refuses_a_hook_that_would_see_parts() -> None:
    model = whole(TIED)
    model.transformer.wte.weight.register_hook(lambda grad: grad * 2)

    def work(comm: Communicator) -> None:
        stage = make_stage(model, range(num_layers(model)))
        Pipeline(stage, comm, parse(ALONE)).run(*batch(4))

    with pytest.raises(
        UnsupportedError, match=r"stage 0 of 1\): a parameter's register_hook would"
    ):
        run_ranks(1, work)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbv"])
def test_evaluate_gives_the_loss_of_run_and_no_gradients(name: str) -> None:
    model, schedule = whole(LLAMA), make_schedule(name, 2, 4, virtual=SCHEDULES[name])

    def work(comm: Communicator) -> tuple[Any, Any]:
        stages = stages_of(copy.deepcopy(model), schedule, comm.rank)
        pipeline = Pipeline(stages, comm, schedule)
        loss = pipeline.evaluate(*batch(8))
        assert all(param.grad is None for stage in stages for param in stage.parameters())
        return loss, pipeline.run(*batch(8))

    for loss, again in run_ranks(2, work):
        assert torch.equal(loss, again)
        assert loss.item() == pytest.approx(model(*batch(8)).item(), rel=1e-6)


def test_stages_on_one_rank_hand_on_without_a_message() -> None:
    """In a V the last stage of the way down and the first of the way up are on the last rank."""
    schedule = make_schedule("zbv", 2, 4, virtual=2)

    def work(comm: Communicator) -> Any:
        stages = [nn.Linear(3, 3) for _ in range(2)]
        pipeline = Pipeline(stages, comm, schedule, loss_fn=lambda y, t: (y - t).square().mean())
        for _ in range(2):
            before = comm.traffic.calls.copy()
            pipeline.run(torch.ones(4, 3), torch.zeros(4, 3))
        return comm.traffic.calls - before

    for found in run_ranks(2, work):
        # Boundaries 0-1 and 2-3, of 4 microbatches, both ways.
        assert found == {"send": 8, "recv": 8, "broadcast": 1}


def test_messages_of_a_pair_of_ranks_have_tags_of_their_own() -> None:
    """Ranks 0 and 1 share boundaries 0-1 and 2-3; headers and tied gradients go there too."""
    schedule = add_communication(make_schedule("interleaved", 2, 4, virtual=2))
    link = Link(schedule, torch.device("cpu"))
    sends = [a for row in schedule.rows for a in row if a.kind.startswith("SEND")]
    tags = [link.tag(send) for send in sends]
    tags += [link.tied_tag, *(link.header_tag(stage) for stage in range(3))]
    assert len(sends) == 2 * 3 * 4
    assert len(set(tags)) == len(tags)
    assert all(link.tag(send) == link.tag(send.counterpart()) for send in sends)


def test_measured_timeline_of_rows_of_unequal_length_has_every_computation() -> None:
    schedule = make_schedule("dualpipev", 2, 5, virtual=2)
    assert len({len(row) for row in schedule.unpaired().rows}) == 2

    def work(comm: Communicator) -> Any:
        stages = [nn.Linear(3, 3) for _ in range(2)]
        pipeline = Pipeline(
            stages, comm, schedule, loss_fn=lambda y, t: (y - t).mean(), measure=lambda: None
        )
        with pytest.raises(RuntimeError, match="measure, and call run"):
            pipeline.timeline()
        pipeline.run(torch.ones(5, 3), torch.zeros(5, 3))
        return pipeline.timeline()

    one, two = run_ranks(2, work)
    assert one == two
    assert tuple(tuple(s.action for s in row) for row in one.rows) == schedule.unpaired().rows
    assert one.peak_in_flight == simulate(schedule).peak_in_flight
    for row in one.rows:
        times = [time for span in row for time in span[1:]]
        assert times == sorted(times)
        assert times[-1] > 0


STEPS = 2


class Use(NamedTuple):
    """Of one rank in its last step.

    Attributes:
        actions: what was gathered and released, by the hooks and by the rows.
        units: of each stage, names of its units, and their bytes.
        bytes_in_use: after each action.
    """

    actions: list[tuple[str, str]]
    units: dict[int, dict[str, int]]
    bytes_in_use: list[int]
    peak_whole: int


def trained(
    config: GPTConfig | LlamaConfig, schedule: Schedule, stage_of_zero: int, replicas: int = 2,
    *, counts: bool = False,
) -> tuple[dict[str, Tensor], list[Use]]:  # fmt: skip
    """Parameters after steps of the replicas; of each rank of the first one what it had when."""
    count = len(schedule.rows)

    def work(comm: Communicator, model: Any) -> tuple[dict[str, Tensor], Use]:
        mesh = Mesh(comm, {"data": replicas, "pipeline": count})
        replica, rank = mesh.coordinates["data"], mesh.coordinates["pipeline"]
        stages = stages_of(model, schedule, rank)
        pipeline = Pipeline(
            stages, mesh.axis("pipeline"), schedule, tied=tied_of(stages), count_bytes=counts
        )
        module = Stages(stages)
        optimizer = zero.Optimizer(
            module, optim.adamw(1e-2), mesh.axis("data"), stage=stage_of_zero,
            model_comm=mesh.axis("pipeline"), roots=stages,
        )  # fmt: skip
        for _ in range(STEPS):
            tokens, targets = (
                part.chunk(replicas)[replica] for part in batch(4 * count * replicas)
            )
            assert optimizer.sharded is not None
            with optimizer.sharded.recorded() as actions:
                pipeline.run(tokens, targets, optimizer=optimizer)
            assert optimizer.sharded.whole_nbytes == 0 or stage_of_zero < 3
            optimizer.step()
            optimizer.zero_grad()
        peak = optimizer.sharded.peak_whole_nbytes
        with optimizer.whole():
            values = {n: p.detach().clone() for s in stages for n, p in s.named_parameters()}
        units = {
            number: {u.name: u.nbytes for u in optimizer.sharded.units if u.modules[0] in own}
            for number, stage in pipeline.stages.items() for own in [set(stage.modules())]
        }  # fmt: skip
        return values, Use(actions, units, pipeline.bytes_in_use, peak)

    ranks = on_models(replicas * count, lambda: whole(config), work)[:count]
    return {n: v for values, _ in ranks for n, v in values.items()}, [seen for _, seen in ranks]


@cache
def of_plain_pipeline(ranks: int, tied: bool) -> dict[str, Tensor]:
    """One stage per rank, whole backwards, nothing cut; tested above against one rank."""
    return trained(TIED if tied else LLAMA, make_schedule("1f1b", ranks, 2 * ranks), 0)[0]


@pytest.mark.parametrize(("name", "stage_of_zero", "whole_stages"), [
    ("interleaved", 0, 0), ("zbv", 1, 0), ("interleaved-zb", 2, 0), ("zbv", 3, 0),
    ("interleaved-zb", 3, 1),
    *(
        pytest.param(name, 3, count, marks=pytest.mark.grid)
        for name in SCHEDULES
        for count in range(3)
        if (name, count) not in (("zbv", 0), ("interleaved-zb", 1))
    ),
])  # fmt: skip
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.grid)])
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.grid), True])
def test_optimizer_with_replicas_has_the_bits_of_one_stage_per_rank(
    name: str, stage_of_zero: int, whole_stages: int, ranks: int, tied: bool
) -> None:
    """2 replicas; whatever is gathered and reduced when, the parameters are those of 1F1B."""
    schedule = make_schedule(name, ranks, 2 * ranks, virtual=SCHEDULES[name])
    schedule = add_weights(schedule, whole=whole_stages)
    found, _ = trained(TIED if tied else LLAMA, schedule, stage_of_zero)
    wanted = of_plain_pipeline(ranks, tied)
    assert wanted.keys() == found.keys()
    for param, value in wanted.items():
        assert torch.equal(found[param], value), param


@pytest.mark.parametrize(("name", "whole_stages"), [
    ("1f1b", 1), ("zbv", 2), ("interleaved-zb", 1),
    pytest.param("dualpipev", 1, marks=pytest.mark.grid),
    pytest.param("zb1p", 1, marks=pytest.mark.grid),
])  # fmt: skip
def test_bytes_in_use_are_those_of_the_simulator_after_every_action(
    name: str, whole_stages: int
) -> None:
    """What autograd holds of microbatches, W's part of it, and stages whose weights are whole."""
    schedule = make_schedule(name, 2, 4, virtual=SCHEDULES[name])
    schedule = add_weights(schedule, whole=whole_stages)
    _, ranks = trained(LLAMA, schedule, 3, counts=True)
    parts = partition([1] * num_layers(whole(LLAMA)), schedule.num_stages)
    tokens, targets = (part[:2] for part in batch(2))
    activations = estimate_bytes(whole(LLAMA), parts, tokens, targets)
    units = {number: names for use in ranks for number, names in use.units.items()}
    weights = [sum(units[number].values()) for number in range(schedule.num_stages)]
    nbytes = Bytes(
        saved=[each.saved for each in activations],
        kept=[each.kept for each in activations],
        weights=weights,
    )
    memory = simulate(schedule).memory(schedule, nbytes)
    for row, wanted, use in zip(schedule.rows, memory, ranks, strict=True):
        assert use.bytes_in_use == [held for _, held in wanted]
        assert [max(use.bytes_in_use), use.bytes_in_use[-1]] == [max(held for _, held in wanted), 0]
        kinds = Counter(action.stage for action in row if action.kind == "UNSHARD")
        gathers = Counter(unit for kind, unit in use.actions if kind == "UNSHARD" and unit)
        assert gathers == {
            unit: kinds[number] for number, own in use.units.items() for unit in own if unit
        }
        most = sorted((weights[number] for number in use.units), reverse=True)
        assert use.peak_whole <= sum(most[:whole_stages])


def test_gradients_of_a_stage_are_reduced_at_its_last_backward() -> None:
    """Those of the rank's other stage are under way while it goes on."""
    schedule = make_schedule("interleaved", 2, 4, virtual=2)

    def work(comm: Communicator) -> list[str]:
        calls = []

        class Recorder(Local):
            def backward(self, output: Any, gradient: Any = None) -> None:
                calls.append("backward")
                super().backward(output, gradient)

            @contextmanager
            def reducing(self, module: nn.Module) -> Iterator[None]:
                calls.append(f"({stages.index(module)}")
                yield
                calls.append(")")

        stages = [nn.Linear(3, 3) for _ in range(2)]
        pipeline = Pipeline(stages, comm, schedule, loss_fn=lambda y, t: (y - t).mean())
        data = torch.ones(4, 3), torch.zeros(4, 3)
        pipeline.run(*data, optimizer=Recorder())
        pipeline.run(*data, optimizer=Recorder(), more=True)
        return calls

    late, early = "(1 backward ) (1 )", "(0 backward ) (0 )"
    for calls in run_ranks(2, work):
        text = " ".join(calls)
        assert text == " ".join([*["backward"] * 5, late, "backward", early, *["backward"] * 8])
