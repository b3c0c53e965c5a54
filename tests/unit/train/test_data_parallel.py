"""Stages 0, 1 and 2 against one process, bit for bit, and which collectives they cost.

That one process steps as torch does is asked by test_optim_as_torch.py.
"""

import gc
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from anychip.comm import alone
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator, UnsupportedError
from anychip.train import optim, zero
from tests.unit.dispatch.tables import deterministic
from tests.unit.train.zero_oracle import (
    Integers,
    assert_equal,
    descend,
    integer_loss,
    on_models,
    ragged,
    ragged_loss,
    serial,
    sharded,
    values_of,
)

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3], ids="stage{}".format)
GRID = pytest.mark.grid


def adamw(max_norm: float | None = None) -> optim.Rule:
    rule = optim.adamw(optim.warmup_cosine(3e-2, 4, 30), beta2=0.99, weight_decay=0.1)
    return rule if max_norm is None else optim.chain(optim.clip_by_global_norm(max_norm), rule)


@STAGES
@pytest.mark.parametrize(
    "max_norm", [pytest.param(None, id="no-clip", marks=GRID), pytest.param(0.5, id="clip")]
)
@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=GRID) for n in (3, 4, 8))])
def test_twenty_steps_of_a_ragged_model_equal_one_process_bit_for_bit(
    stage: int, max_norm: float | None, world_size: int
) -> None:
    want = serial(ragged, ragged_loss, adamw(max_norm), world_size=world_size, steps=20, micro=2)
    got = sharded(
        ragged, ragged_loss, lambda: adamw(max_norm), world_size=world_size, stage=stage, steps=20,
        micro=2,
    )  # fmt: skip
    assert_equal(got, want)
    assert not torch.equal(want.params["first.weight"], ragged().first.weight)
    assert torch.equal(want.params["unused"], ragged().unused)


@STAGES
@pytest.mark.parametrize("world_size", [3, *(pytest.param(n, marks=GRID) for n in (1, 2, 5, 8))])
def test_integer_gradients_equal_one_process_at_any_number_of_ranks(
    stage: int, world_size: int
) -> None:
    def rule() -> optim.Rule:
        return optim.chain(optim.clip_by_global_norm(1e9), optim.sgd(1.0, momentum=0.5))

    want = serial(Integers, integer_loss, rule(), world_size=world_size, steps=4, micro=2)
    got = sharded(
        Integers, integer_loss, rule, world_size=world_size, stage=stage, steps=4, micro=2
    )
    assert_equal(got, want)
    assert all(torch.equal(value, value.round()) for value in want.params.values())
    assert not torch.equal(want.params["offset"], torch.tensor(2.0))


@STAGES
def test_gradients_are_added_up_without_a_division_where_that_is_asked(stage: int) -> None:
    run = partial(sharded, ragged, ragged_loss, lambda: adamw(0.5), world_size=3, stage=stage)
    want = serial(ragged, ragged_loss, adamw(0.5), world_size=3, steps=5, reduction="sum")
    assert_equal(run(steps=5, reduction="sum"), want)
    (first,) = run(steps=1)[0].norms
    assert first is not None
    assert want.norms[0] is not None
    torch.testing.assert_close(want.norms[0], 3 * first)


@pytest.mark.parametrize("rule", [
    lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.lamb(1e-2, weight_decay=0.1)),
    lambda: optim.lion(1e-3, weight_decay=0.1),
    lambda: optim.sgd(1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda: optim.sgd(1e-2),
    lambda: optim.averaged(optim.lamb(1e-2), 0.5),
], ids=["lamb", "lion", "sgd-nesterov", "sgd-no-state", "averaged"])  # fmt: skip
@pytest.mark.parametrize("stage", [1, 2, 3], ids="stage{}".format)
def test_every_rule_on_shards_equals_it_on_whole_parameters(
    rule: Callable[[], optim.Rule], stage: int
) -> None:
    want = serial(ragged, ragged_loss, rule(), world_size=3, steps=5)
    assert_equal(sharded(ragged, ragged_loss, rule, world_size=3, stage=stage, steps=5), want)


def test_unused_parameter_keeps_its_step_count_and_one_rank_suffices_to_use_it() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(4, 4)
            self.branches = nn.ModuleList(nn.Linear(4, 2000) for _ in range(3))

        def forward(self, x: Tensor, branch: int) -> Tensor:
            return self.branches[branch](self.stem(x)).square().mean()

    def build() -> Branches:
        torch.manual_seed(5)
        return Branches()

    def loss(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
        # Branch 0 on rank 0 only, branch 1 by turns, branch 2 only in step 1 on rank 1.
        branch = 0 if rank == 0 else 2 if step == 1 else 1
        generator = torch.Generator().manual_seed(10 * step + rank)
        return model(torch.randn(3, 4, generator=generator), branch)

    want = serial(build, loss, adamw(0.5), world_size=2, steps=4)
    for stage, bucket_nbytes in product((0, 1, 2, 3), (12_000, 1 << 20)):
        with deterministic():  # so that fresh memory is NaN
            got = sharded(
                build, loss, lambda: adamw(0.5), world_size=2, stage=stage, steps=4,
                bucket_nbytes=bucket_nbytes,
            )  # fmt: skip
        assert_equal(got, want)
    states = want.state["state"]
    assert [float(entry["step"]) for entry in states.values()] == [4, 4, 4, 4, 3, 3, 1, 1]


@STAGES
@pytest.mark.parametrize("how", ["no-sync-only", "plain-backward", "by-hand", "twice"])
def test_gradients_however_they_came_give_the_same_update(stage: int, how: str) -> None:
    def work(comm: Communicator, model: nn.Module) -> dict[str, Tensor]:
        opt = zero.Optimizer(model, adamw(0.5), comm, stage=stage, bucket_nbytes=12_000)
        for step in range(3):
            first, second = (ragged_loss(model, step, comm.rank, micro) for micro in (0, 1))
            if how == "no-sync-only":
                with opt.no_sync():
                    opt.backward(first)
                    opt.backward(second)
            elif how == "plain-backward":
                first.backward()
                second.backward()
            elif how == "by-hand":
                params = [p for p in model.parameters() if p.requires_grad]
                grads = torch.autograd.grad(first + second, params, allow_unused=True)
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad
            else:  # two forwards, then one backward
                opt.backward(first + second)
            opt.step()
            opt.zero_grad()
        return values_of(model, opt)

    def both(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
        return ragged_loss(model, step, rank, 0) + ragged_loss(model, step, rank, 1)

    # One backward over the sum of two losses adds up within it what two backwards add up in .grad.
    if how in ("by-hand", "twice"):
        want = serial(ragged, both, adamw(0.5), world_size=2, steps=3)
    else:
        want = serial(ragged, ragged_loss, adamw(0.5), world_size=2, steps=3, micro=2)
    for trained in on_models(2, ragged, work):
        for name, value in want.params.items():
            assert torch.equal(trained[name], value), name


@STAGES
@pytest.mark.parametrize("second", ["reduced", "local"])
def test_backward_after_a_reduced_one_adds_up_what_was_reduced(stage: int, second: str) -> None:
    grads: dict[int, list[Tensor]] = {}

    def work(comm: Communicator, model: nn.Module) -> dict[str, Tensor]:
        opt = zero.Optimizer(model, adamw(), comm, stage=stage, bucket_nbytes=12_000)
        opt.backward(ragged_loss(model, 0, comm.rank, 0))
        with opt.no_sync() if second == "local" else nullcontext():
            opt.backward(ragged_loss(model, 0, comm.rank, 1))
        if stage == 0 and second == "reduced":
            grads[comm.rank] = [p.grad for p in model.parameters() if p.grad is not None]
        opt.step()
        return values_of(model, opt)

    trained = on_models(2, ragged, work)
    model = ragged()
    params = [p for p in model.parameters() if p.requires_grad]
    opt = zero.Optimizer(model, adamw(), alone())
    sums: dict[Tensor, Tensor] = {}
    for micro in (0, 1):
        for rank in (0, 1):
            model.zero_grad()
            ragged_loss(model, 0, rank, micro).backward()
            for p in params:
                if p.grad is not None:
                    sums[p] = p.grad if rank == 0 else (sums[p] + p.grad) / 2
        if micro == 0:
            before = dict(sums)
    for p in params:
        p.grad = before[p] + sums[p] if p in sums else None
    if grads:
        want = [p.grad for p in params if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(grads[0], want, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(grads[1], want, strict=True))
    opt.step()
    for values in trained:
        assert all(torch.equal(values[n], v) for n, v in values_of(model).items())


def test_stage_0_leaves_the_mean_in_grad_where_a_person_may_change_it() -> None:
    def work(comm: Communicator) -> tuple[Tensor, Tensor]:
        layer = nn.Linear(3, 1, bias=False)
        opt = zero.Optimizer(layer, optim.sgd(1.0), comm)
        nn.init.zeros_(layer.weight)
        opt.backward((layer.weight * (comm.rank + 1.0)).sum())
        grad = layer.weight.grad
        assert grad is not None
        mean = grad.clone()
        grad.mul_(2.0)
        opt.step()
        layer.weight.grad = torch.full((1, 3), 8.0 * comm.rank)  # instead of the mean
        opt.step()
        return mean, layer.weight.detach().clone()

    for mean, weight in run_ranks(2, work):
        assert torch.equal(mean, torch.full((1, 3), 1.5))
        assert torch.equal(weight, torch.full((1, 3), -3.0 - 4.0))


@pytest.mark.parametrize("stage", [1, 2, 3], ids="stage{}".format)
def test_partitioned_stages_leave_no_values_in_grad(stage: int) -> None:
    def work(comm: Communicator) -> tuple[bool, int]:
        layer = nn.Linear(3, 1)
        opt = zero.Optimizer(layer, optim.sgd(1.0), comm, stage=stage)
        opt.backward(layer(torch.ones(1, 3)).sum())
        return layer.weight.grad is None, layer.weight.grad.data_ptr()

    assert run_ranks(2, work) == [(False, 0)] * 2


@STAGES
def test_parameters_begin_as_those_of_rank_0(stage: int) -> None:
    models = [nn.Sequential(nn.Linear(50, 60), nn.Linear(60, 7)) for _ in range(3)]
    first = values_of(models[0])

    def work(comm: Communicator) -> dict[str, Tensor]:
        opt = zero.Optimizer(models[comm.rank], optim.sgd(1.0), comm, stage=stage)
        return values_of(models[comm.rank], opt)

    for values in run_ranks(3, work):
        assert all(torch.equal(values[name], value) for name, value in first.items())


class Recorder(Function):
    """Notes how many reductions have been started when backward comes to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return grads[0], None


@pytest.mark.parametrize("stage", [0, 1, 2], ids="stage{}".format)
def test_buffers_are_sent_while_backward_goes_on(stage: int) -> None:
    def work(comm: Communicator, layers: nn.Module) -> list[int]:
        call = "reduce_scatter" if stage else "all_reduce"
        groups = [
            {"params": [layer.bias for layer in layers], "weight_decay": 0.0},
            {"params": [layer.weight for layer in layers]},
        ]
        opt = zero.Optimizer(groups, adamw(), comm, stage=stage, bucket_nbytes=6_400)
        started: list[int] = []
        for _ in range(2):
            x, before = torch.ones(2, 40, requires_grad=True), comm.traffic.calls[call]

            def note(before: int = before) -> None:
                started.append(comm.traffic.calls[call] - before)

            for layer in layers:
                x = layer(Recorder.apply(x, note))
            descend(opt, x.sum())
            started.append(comm.traffic.calls[call] - before)
        return started

    # A bucket of all biases, which is full at the end only, and six of a weight each. It holds up
    # the others once. Then, when backward comes to the input of layer i, the weights of this layer
    # and of those above have been sent.
    extra = 1 if stage == 0 else 0  # the question which parameters have a gradient
    for started in on_models(2, lambda: nn.ModuleList(nn.Linear(40, 40) for _ in range(6)), work):
        assert started[:7] == [0, 0, 0, 0, 0, 7, 7 + extra]
        assert started[7:] == [1, 2, 3, 4, 5, 7, 7 + extra]


def test_buffers_are_sent_in_one_order_whatever_order_gradients_come_in() -> None:
    def work(comm: Communicator, layers: nn.Module) -> list[Tensor]:
        opt = zero.Optimizer(layers, optim.sgd(1.0), comm, stage=2, bucket_nbytes=1)
        for layer in layers:
            nn.init.zeros_(layer.weight)
        for step in range(3):
            x = torch.full((1, 40), 1.0 + comm.rank + 2 * step)
            order = layers if comm.rank == 0 else reversed(layers)
            # A sum of independent terms: backward goes through them last to first.
            descend(opt, sum((layer(x).sum() for layer in order), torch.zeros(())))
        return [layer.weight.detach().clone() for layer in layers]

    for weights in on_models(
        2, lambda: nn.ModuleList(nn.Linear(40, 40, bias=False) for _ in range(4)), work
    ):
        assert all(torch.equal(w, torch.full((40, 40), -1.5 - 3.5 - 5.5)) for w in weights)


@pytest.mark.parametrize("sent_first", [False, True], ids=["waits", "sent-too-early"])
def test_gradient_that_comes_in_pieces_is_added_up_or_an_error(sent_first: bool) -> None:
    def work(comm: Communicator) -> tuple[Tensor, Tensor]:
        layer, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            layer.weight.fill_(comm.rank + 1.0)
            other.weight.fill_(1.0)
        # Buckets go from the last parameter to the first: one that is not full holds the others.
        params = [other.weight, layer.weight] if sent_first else [layer.weight, other.weight]
        opt = zero.Optimizer(params, optim.sgd(0.0), comm, bucket_nbytes=1)
        x = torch.full((1, 4), comm.rank + 1.0, requires_grad=True)

        def loss() -> Tensor:
            once = checkpoint(layer, other(x), use_reentrant=True)
            return checkpoint(layer, once, use_reentrant=True).sum()

        if sent_first:
            with pytest.raises(RuntimeError, match=r"came after its buffer.*no_sync"):
                opt.backward(loss())
            opt.zero_grad()
            with opt.no_sync():
                opt.backward(loss())
        else:
            opt.backward(loss())
        opt.step()
        want = torch.autograd.grad(layer(layer(other(x))).sum(), layer.weight)[0]
        assert layer.weight.grad is not None
        return layer.weight.grad, want

    (mean, want0), (_, want1) = run_ranks(2, work)
    assert torch.equal(mean, (want0 + want1) / 2)


def test_backward_onto_a_reduced_gradient_is_an_error() -> None:
    def work(comm: Communicator) -> None:
        layer = nn.Linear(4, 4)
        opt = zero.Optimizer(layer, optim.sgd(0.1), comm)
        opt.backward(layer(torch.ones(1, 4)).sum())
        with pytest.raises(RuntimeError, match="has added to a reduced gradient"):
            layer(torch.ones(1, 4)).sum().backward()

    run_ranks(2, work)


def test_sparse_gradient_is_refused() -> None:
    def work(comm: Communicator) -> None:
        layer = nn.Embedding(10, 4, sparse=True)
        opt = zero.Optimizer(layer, optim.sgd(0.1), comm)
        with pytest.raises(UnsupportedError, match=r"torch.sparse_coo.*sparse=False"):
            opt.backward(layer(torch.tensor([1])).sum())

    run_ranks(2, work)


def test_parameters_that_share_memory_are_refused() -> None:
    def work(comm: Communicator) -> None:
        memory = torch.zeros(10)
        params = [nn.Parameter(memory[:6]), nn.Parameter(memory[4:])]
        with pytest.raises(UnsupportedError, match=r"\(6,\) and \(6,\), share memory"):
            zero.Optimizer(params, optim.sgd(0.1), comm, stage=1)

    run_ranks(2, work)


def test_parameter_that_was_moved_after_construction_is_an_error() -> None:
    def work(comm: Communicator) -> None:
        layer = nn.Linear(4, 4)
        opt = zero.Optimizer(layer, optim.sgd(0.1), comm, stage=1)
        layer.weight.data = layer.weight.data.clone()
        opt.backward(layer(torch.ones(1, 4)).sum())
        with pytest.raises(RuntimeError, match=r"weight, of shape \(4, 4\), has other memory"):
            opt.step()

    run_ranks(2, work)


@STAGES
def test_backward_through_a_forward_from_before_the_step_is_an_error(stage: int) -> None:
    def work(comm: Communicator) -> None:
        layer = nn.Linear(4, 4)
        opt = zero.Optimizer(layer, optim.sgd(0.1), comm, stage=stage)
        x = torch.ones(1, 4, requires_grad=True)
        stale = layer(x).sum()
        descend(opt, layer(x).sum())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()

    run_ranks(2, work)


@STAGES
def test_parameters_and_gradients_that_are_not_contiguous_are_updated_alike(stage: int) -> None:
    def work(comm: Communicator, stage: int) -> list[Tensor]:
        params = [
            nn.Parameter(torch.arange(3000.0).view(50, 60).t()),
            nn.Parameter(torch.zeros(2, 3, 20, 20).to(memory_format=torch.channels_last)),
        ]
        rule, module = optim.sgd(1.0, momentum=0.5), nn.ParameterList(params)
        opt = zero.Optimizer(params, rule, comm, stage=stage, module=module)
        for step in range(2):
            for param in params:
                grad = torch.arange(float(param.numel())).view(param.shape)
                param.grad = grad.transpose(-1, -2).contiguous().transpose(-1, -2) * (step + 2)
            opt.step()
            opt.zero_grad()
        with opt.whole():
            return [param.detach().clone() for param in params]

    want = work(alone(), 0)
    for values in run_ranks(3, partial(work, stage=stage)):
        assert all(torch.equal(a, b) for a, b in zip(values, want, strict=True))


def test_step_without_gradient_on_any_rank_is_an_error_on_all() -> None:
    def work(comm: Communicator) -> None:
        opt = zero.Optimizer(nn.Linear(2, 2), optim.sgd(0.1), comm, stage=2)
        with pytest.raises(RuntimeError, match="no parameter has a gradient"):
            opt.step()

    run_ranks(2, work)


@STAGES
def test_share_of_every_rank_reaches_all_with_its_bits_and_no_message(stage: int) -> None:
    numbers = torch.tensor([[1 / 3, math.nan], [-0.0, -math.inf], [5e-324, -2.5]]).double()

    def work(comm: Communicator) -> list[Tensor | None]:
        layer = nn.Linear(3, 1)
        opt = zero.Optimizer(layer, optim.sgd(1.0), comm, stage=stage)
        shared, calls = [], []
        for share in (None, None, numbers[comm.rank]):
            opt.zero_grad()
            opt.backward(layer(torch.ones(1, 3)).sum())
            before = comm.traffic.calls.copy()
            shared.append(opt.step(share=share).shared)
            calls.append(comm.traffic.calls - before)
        assert calls[1] == calls[2]
        return shared

    for first, _, last in run_ranks(3, work):
        assert first is None
        assert last is not None
        assert torch.equal(last.view(torch.int64), numbers.view(torch.int64))


def test_zero_grad_that_keeps_the_tensors_makes_them_zero() -> None:
    def work(comm: Communicator, stage: int) -> Tensor:
        layer = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(layer.weight)
        opt = zero.Optimizer(layer, optim.sgd(1.0), comm, stage=stage)
        opt.backward(layer(torch.ones(1, 3)).sum())
        opt.zero_grad(set_to_none=False)
        opt.backward(layer(torch.full((1, 3), 2.0)).sum())
        opt.step()
        return layer.weight.detach().clone()

    for stage in (0, 1, 2):
        for weight in run_ranks(2, partial(work, stage=stage)):
            assert torch.equal(weight, torch.full((1, 3), -2.0))


def test_optimizer_that_is_gone_leaves_no_hook_behind() -> None:
    def work(comm: Communicator) -> Tensor:
        layer = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(layer.weight)
        first = zero.Optimizer(layer, optim.sgd(1.0), comm, stage=1)
        opt = zero.Optimizer(layer, optim.sgd(1.0), comm, stage=2)
        opt.backward(layer(torch.ones(1, 3)).sum())
        del first
        gc.collect()
        assert len(layer.weight._post_accumulate_grad_hooks) == 1  # type: ignore[attr-defined]
        opt.step()
        return layer.weight.detach().clone()

    for weight in run_ranks(2, work):
        assert torch.equal(weight, torch.full((1, 3), -1.0))
