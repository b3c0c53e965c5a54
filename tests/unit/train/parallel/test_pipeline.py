"""The pipeline against the whole model on one rank: gradients, losses, messages, failures."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anychip.comm.threads import run_ranks
from anychip.contract import CommunicationError, Communicator
from anychip.train.models import GPTConfig, LlamaConfig, build
from anychip.train.parallel import (
    Local,
    Pipeline,
    Schedule,
    ScheduleError,
    add_communication,
    gpipe,
    make_stage,
    merge,
    num_layers,
    one_f_one_b,
    parse,
    partition,
)
from anychip.train.parallel.message import HEADER_NUMEL
from tests.unit.train.zero_oracle import on_models

STEPS, ROWS, LENGTH, VOCAB = 20, 8, 6, 29
LLAMA = LlamaConfig(vocab_size=VOCAB, context=8, layers=2, heads=2, kv_heads=1, width=16)
TIED = GPTConfig(vocab_size=VOCAB, context=8, layers=2, heads=2, width=16)
GENERATORS = {"gpipe": gpipe, "1f1b": one_f_one_b}
Generator = Callable[[int, int], Schedule]


@pytest.fixture(params=GENERATORS.values(), ids=GENERATORS.keys())
def generator(request: pytest.FixtureRequest) -> Generator:
    found: Generator = request.param
    return found


def batches(rows: int = ROWS, steps: int = STEPS) -> Tensor:
    """(steps, 2, rows, LENGTH): tokens and targets of every step, drawn apart from the ranks."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(VOCAB, (steps, 2, rows, LENGTH), generator=generator)


def whole(config: GPTConfig | LlamaConfig) -> nn.Module:
    torch.manual_seed(1)
    return build(config)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, foreach=False)


def serial(model: nn.Module, count: int, data: Tensor) -> list[float]:
    """The oracle: plain autograd over the same microbatches, one after the other, on one rank."""

    def work(comm: Communicator) -> list[float]:
        optimizer, losses = adamw(model.parameters()), []
        for tokens, targets in data:
            total = torch.zeros(())
            for x, y in zip(tokens.chunk(count), targets.chunk(count), strict=True):
                loss = model(x, y) / count
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(total))
        return losses

    return run_ranks(1, work)[0]


def pipelined(
    model: nn.Module, schedule: Schedule, data: Tensor, parts: Sequence[range] | None = None
) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Losses and final state dict of every rank, each beginning with a copy of the model."""

    def work(comm: Communicator, mine: Any) -> tuple[list[float], dict[str, Tensor]]:
        cut = parts or partition([1] * num_layers(mine), comm.world_size)
        stage: Any = make_stage(mine, cut[comm.rank])
        pipeline = Pipeline(stage, comm, schedule, tied=stage.tied)
        optimizer, losses = adamw(stage.parameters()), []
        for tokens, targets in data:
            loss = pipeline.run(
                tokens if pipeline.is_first else None, targets if pipeline.is_last else None
            )
            optimizer.step()
            optimizer.zero_grad()
            assert loss is not None
            losses.append(float(loss))
        return losses, stage.state_dict()

    return on_models(len(schedule.rows), lambda: copy.deepcopy(model), work)


@pytest.mark.parametrize(("stages", "count"), [
    (2, 4), *(pytest.param(*n, marks=pytest.mark.grid) for n in [(4, 4), (2, 1), (3, 4), (1, 2)]),
], ids=["2-stages", "4-stages", "m-is-1", "not-a-multiple", "1-stage"])  # fmt: skip
def test_pipeline_over_twenty_steps_has_the_bits_of_one_rank(
    generator: Generator, stages: int, count: int
) -> None:
    model, data = whole(LLAMA), batches()
    ranks = pipelined(model, generator(stages, count), data)
    losses = serial(model, count, data)
    for found, _ in ranks:
        assert found == losses
    state = merge([state for _, state in ranks])
    assert state.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name


@pytest.mark.grid
@pytest.mark.parametrize("ahead", [1, 2])
def test_receives_posted_early_change_no_bit(generator: Generator, ahead: int) -> None:
    model, data = whole(LLAMA), batches(steps=3)
    plain = generator(4, 4)
    early = pipelined(model, add_communication(plain, ahead=ahead), data)
    for one, two in zip(pipelined(model, plain, data), early, strict=True):
        assert one[0] == two[0]
        assert all(torch.equal(value, two[1][name]) for name, value in one[1].items())


def test_tied_gradients_of_one_step_are_the_sum_of_both_uses() -> None:
    model, (tokens, targets) = whole(TIED), batches(steps=1)[0]

    def work(comm: Communicator, mine: Any) -> Tensor:
        stage: Any = make_stage(mine, partition([1] * 4, 2)[comm.rank])
        pipeline = Pipeline(stage, comm, one_f_one_b(2, 4), tied=stage.tied)
        half = ROWS // 2
        # Two runs before one step: the copies' gradients are joined once, at the end.
        pipeline.run(tokens[:half], targets[:half], more=True)
        local = stage.tied[0].grad.clone()
        pipeline.run(tokens[half:], targets[half:])
        assert not torch.equal(local, stage.tied[0].grad)
        grad: Tensor = stage.tied[0].grad
        return grad

    first, last = on_models(2, lambda: copy.deepcopy(model), work)
    assert torch.equal(first, last)
    for x, y in zip(tokens.chunk(8), targets.chunk(8), strict=True):
        (model(x, y) / 4).backward()
    weight: Any = model.transformer.wte.weight  # type: ignore[union-attr]
    torch.testing.assert_close(first, weight.grad, rtol=1e-5, atol=1e-7)


def test_microbatches_with_uneven_targets_have_the_bits_of_one_rank(generator: Generator) -> None:
    """Sums, times one over the number of all targets; a microbatch may have none."""
    model, (tokens, targets) = whole(LLAMA), batches(steps=1)[0]
    targets = targets.clone()
    targets[: ROWS // 4] = -100
    targets[-1, ::2] = -100
    weight = 1.0 / int((targets >= 0).sum())

    def work(comm: Communicator) -> tuple[float, float, dict[str, Tensor]]:
        mine: Any = copy.deepcopy(model)
        stage = make_stage(mine, partition([1] * 4, 2)[comm.rank], reduction="sum")
        pipeline = Pipeline(stage, comm, generator(2, 4))
        alone = pipeline.evaluate(tokens, targets, weight=weight)
        loss = pipeline.run(tokens, targets, weight=weight)
        assert alone is not None
        assert loss is not None
        grads = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
        return float(alone), float(loss), grads

    total = torch.zeros(())
    for x, y in zip(tokens.chunk(4), targets.chunk(4), strict=True):
        loss = model(x, y, reduction="sum") * weight
        loss.backward()
        total += loss.detach()
    found = run_ranks(2, work)
    assert [(alone, loss) for alone, loss, _ in found] == [(float(total), float(total))] * 2
    grads = merge([grads for _, _, grads in found])
    for name, param in model.named_parameters():
        assert param.grad is not None
        assert torch.equal(grads[name], param.grad), name
    assert float(total) == pytest.approx(model(tokens, targets).item(), rel=1e-6)


def test_loss_that_is_not_shared_is_on_the_last_stage_only() -> None:
    def work(comm: Communicator) -> tuple[Tensor | None, int]:
        pipeline = Pipeline(linear_stage(comm), comm, gpipe(3, 2), loss_fn=squares)
        loss = pipeline.run(torch.ones(4, 3), torch.zeros(4, 3), share_loss=False)
        return loss, comm.traffic.calls["broadcast"]

    losses = run_ranks(3, work)
    assert [loss is None for loss, _ in losses] == [True, True, False]
    assert [count for _, count in losses] == [0, 0, 0]


def linear_stage(comm: Communicator, width: int = 3) -> nn.Module:
    """Weights from a generator of its own: torch's is shared by the ranks' threads."""
    generator = torch.Generator().manual_seed(comm.rank)
    stage = nn.Linear(width, width)
    with torch.no_grad():
        for param in stage.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return stage


def squares(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 6), (3, 1)])
def test_messages_and_bytes_of_a_step_equal_the_formula(
    generator: Generator, stages: int, count: int
) -> None:
    """A boundary has one output and one gradient per microbatch, and one header in all."""
    rows, width = 2 * count, 5
    nbytes = 2 * width * 4

    def work(comm: Communicator) -> tuple[Counter[str], Counter[str], Counter[str]]:
        pipeline = Pipeline(
            linear_stage(comm, width), comm, generator(stages, count), loss_fn=squares
        )
        pipeline.run(torch.ones(rows, width), torch.zeros(rows, width))
        first = Counter(comm.traffic.calls)
        pipeline.run(torch.ones(rows, width), torch.zeros(rows, width))
        return first, comm.traffic.calls - first, comm.traffic.nbytes

    for rank, (first, second, total) in enumerate(run_ranks(stages, work)):
        below, above = int(rank > 0), int(rank < stages - 1)
        assert second == {
            "send": count * (below + above), "recv": count * (below + above), "broadcast": 1,
        }  # fmt: skip
        assert first["send"] == second["send"] + above
        assert first["recv"] == second["recv"] + below
        assert total["send"] == 2 * count * (below + above) * nbytes + above * HEADER_NUMEL * 8
        assert total["recv"] == 2 * count * (below + above) * nbytes + below * HEADER_NUMEL * 8
        assert total["broadcast"] == 2 * 4


def test_activations_in_flight_are_those_of_the_schedule() -> None:
    """Counts inputs that are alive at each forward: min(m, p - rank) for 1F1B, m for GPipe."""

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.alive, self.peak = nn.Linear(3, 3), 0, 0

        def forward(self, x: Tensor) -> Tensor:
            self.alive += 1
            self.peak = max(self.peak, self.alive)
            output: Tensor = self.linear(x)
            # Called when the graph of this microbatch is dropped.
            output.grad_fn.metadata["watch"] = Drop(self)  # type: ignore[union-attr]
            return output

    class Drop:
        def __init__(self, stage: Watching) -> None:
            self.stage = stage

        def __del__(self) -> None:
            self.stage.alive -= 1

    for generate, wanted in ((gpipe, [6, 6, 6]), (one_f_one_b, [3, 2, 1])):

        def work(comm: Communicator, generate: Generator = generate) -> int:
            stage = Watching()
            pipeline = Pipeline(stage, comm, generate(3, 6), loss_fn=squares)
            pipeline.run(torch.ones(6, 3), torch.zeros(6, 3))
            return stage.peak

        assert run_ranks(3, work) == wanted


def test_bfloat16_between_stages_under_autocast() -> None:
    def work(comm: Communicator) -> torch.dtype:
        stage = linear_stage(comm)
        pipeline = Pipeline(
            stage, comm, one_f_one_b(2, 2), loss_fn=lambda y, t: squares(y.float(), t),
            autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        )  # fmt: skip
        pipeline.run(torch.ones(4, 3), torch.zeros(4, 3))
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in stage.parameters())
        forms = pipeline._link.inputs if pipeline.is_last else pipeline._link.outputs
        return forms[comm.rank].dtype

    assert run_ranks(2, work) == [torch.bfloat16] * 2


def test_backward_is_the_optimizers_which_is_told_of_the_last_one() -> None:
    """It gets the loss on the last stage, outputs and gradients before it."""

    class Recorder(Local):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[bool, bool]] = []
            self.local = True

        def backward(self, output: Tensor, gradient: Tensor | None = None) -> None:
            self.calls.append((gradient is None, self.local))
            loss = output * 8 if gradient is None else output
            torch.autograd.backward(loss, gradient)

        @contextmanager
        def reducing(self, module: nn.Module) -> Iterator[None]:
            self.local = False
            yield
            self.local = True

    def work(comm: Communicator) -> tuple[list[tuple[bool, bool]], list[Tensor]]:
        calls: list[tuple[bool, bool]] = []
        grads = []
        for scaled in (True, False):
            recorder, stage = Recorder(), linear_stage(comm)
            pipeline = Pipeline(stage, comm, one_f_one_b(2, 3), loss_fn=squares)
            optimizer = recorder if scaled else None
            pipeline.run(torch.ones(3, 3), torch.zeros(3, 3), optimizer=optimizer)
            grads.append(stage.weight.grad)
            calls += recorder.calls
        return calls, grads  # type: ignore[return-value]

    for rank, (calls, (scaled, plain)) in enumerate(run_ranks(2, work)):
        assert calls == [(rank == 1, True), (rank == 1, True), (rank == 1, False)]
        assert torch.equal(scaled, plain * 8)


class Failing(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_failing_stage_ends_every_rank_with_its_error(rank: int) -> None:
    heard: dict[int, BaseException] = {}

    def work(comm: Communicator) -> None:
        stage = Failing(ArithmeticError("boom")) if comm.rank == rank else linear_stage(comm)
        pipeline = Pipeline(stage, comm, one_f_one_b(3, 4), loss_fn=squares)
        try:
            pipeline.run(torch.ones(4, 3), torch.zeros(4, 3))
        except Exception as error:
            heard[comm.rank] = error
            raise

    with pytest.raises(ArithmeticError, match="boom"):
        run_ranks(3, work, timeout_s=30)
    for other, error in heard.items():
        if other != rank:
            assert isinstance(error, CommunicationError)
            assert f"pipeline stage {rank} of 3: ArithmeticError: boom" in str(error)
    assert sorted(heard) == [0, 1, 2]


def wrong(case: str, comm: Communicator) -> None:
    """One mistake of a user per case."""
    stage, rows, targets = linear_stage(comm), 4, torch.zeros(4, 3)
    schedule, loss_fn = one_f_one_b(2, 2), squares
    if case == "batch":
        rows = 5
    elif case == "no-tokens":
        rows = -1
    elif case == "loss-is-no-scalar" and comm.rank == 1:
        loss_fn = torch.sub  # type: ignore[assignment]
    elif case == "output-is-a-tuple" and comm.rank == 0:
        stage = nn.Identity()
        stage.forward = lambda x: (x, x)  # type: ignore[assignment]
    elif case == "input-not-used" and comm.rank == 1:
        loss_fn = lambda y, t: stage.weight.sum()  # type: ignore[assignment,union-attr] # noqa: E731
    elif case == "schedules-differ" and comm.rank == 1:
        schedule = gpipe(2, 2)
    pipeline = Pipeline(stage, comm, schedule, loss_fn=loss_fn)
    pipeline.run(torch.ones(rows, 3) if rows > 0 else None, targets)
    if case == "another-shape":
        pipeline.run(torch.ones(8, 3), torch.zeros(8, 3))


@pytest.mark.parametrize(("case", "message"), [
    ("batch", "tokens of a batch that 2 microbatches divide expected, got 5 rows"),
    ("no-tokens", "stage 0 of 2.: tokens expected on this stage, got None"),
    ("loss-is-no-scalar", r"a 0-dim loss expected of the last stage, got \(2, 3\)"),
    ("output-is-a-tuple", "one floating-point tensor expected as output, got tuple"),
    ("input-not-used", "stage 1 of 2.: its output does not depend on its input"),
    ("schedules-differ", "rank 1 and rank 0 have different schedules"),
    ("another-shape", r"an output of \(2, 3\) torch.float32 expected, .* got \(4, 3\)"),
])  # fmt: skip
def test_pipeline_used_wrongly_says_what_was_expected(case: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(2, lambda comm: wrong(case, comm), timeout_s=30)


def test_pipeline_of_a_schedule_that_does_not_fit_is_refused() -> None:
    def work(comm: Communicator) -> None:
        stage = linear_stage(comm)
        with pytest.raises(ValueError, match="got 3 rows and 2 ranks"):
            Pipeline(stage, comm, gpipe(3, 2))
        with pytest.raises(ScheduleError, match="deadlock"):
            Pipeline(stage, comm, parse("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1"))
        with pytest.raises(ValueError, match=r"gives rank \d 2 stages, got 1"):
            Pipeline(stage, comm, parse("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0"))

    run_ranks(2, work)


def test_tied_parameter_in_the_middle_is_refused() -> None:
    def work(comm: Communicator) -> None:
        stage: Any = linear_stage(comm)
        Pipeline(stage, comm, gpipe(3, 1), tied=[stage.weight])

    with pytest.raises(ValueError, match="stage 1 of 3"):
        run_ranks(3, work)
