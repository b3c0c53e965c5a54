"""Precision policies, and loss scaling against torch's, DeepSpeed's, and the bits of a model."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anychip
from anychip.comm import alone
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator, DeviceProperties, UnsupportedError
from anychip.train import optim, precision, zero
from anychip.train.precision import LossScaler, LossScaling
from tests.unit.train.zero_oracle import descend, on_models

SMALL = LossScaling(init_scale=1024.0, growth_interval=3)


def fp16(scaling: LossScaling | None = None) -> precision.PrecisionPolicy:
    return precision.policy("fp16", anychip.backend(), loss_scaling=scaling)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_policy_decides_the_dtype_of_matrix_products(name: str) -> None:
    with precision.policy(name, anychip.backend()).autocast():
        y = torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))
        own = anychip.ops.linear(torch.ones(2, 3), torch.ones(4, 3))
    want = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    assert y.dtype == own.dtype == want[name]


def test_policy_for_a_device_without_float16_is_refused() -> None:
    chip = anychip.backend()

    class Without(type(chip)):  # type: ignore[misc]
        def properties(self, index: int | None = None) -> DeviceProperties:
            return replace(super().properties(index), dtypes=frozenset({torch.float32}))

    with pytest.raises(UnsupportedError, match="does not compute in fp16; it has float32"):
        precision.policy("fp16", Without())


@pytest.mark.parametrize(("call", "message"), [
    (lambda: precision.policy("int8", anychip.backend()), "fp32, bf16, fp16, auto, got 'int8'"),
    (lambda: precision.policy("bf16", anychip.backend(), reduce_dtype=torch.int8),
     "float32, bfloat16, got int8"),
    (lambda: precision.policy("bf16", anychip.backend(), loss_scaling=SMALL),
     "for precision 'fp16', got it with 'bf16'"),
    (lambda: LossScaling(init_scale=0.0), "init_scale"),
    (lambda: LossScaling(growth_factor=1.0), "growth_factor"),
    (lambda: LossScaling(backoff_factor=1.0), "backoff_factor"),
    (lambda: LossScaling(hysteresis=0), "hysteresis must be at least 1, got 0"),
    (lambda: LossScaling(min_scale=1e9), "min_scale"),
    (lambda: LossScaler(SMALL).load_state_dict({"scale": 1.0}), "num_clean, num_skipped"),
], ids=[
    "name", "reduce-dtype", "scaling", "init", "growth", "backoff", "hysteresis", "floor",
    "state"
])  # fmt: skip
def test_wrong_settings_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("seed", range(8))
def test_scale_follows_torch_grad_scaler_over_any_sequence(seed: int) -> None:
    draw = random.Random(seed)
    interval = draw.choice([1, 2, 3, 7])
    settings = LossScaling(
        init_scale=2.0 ** draw.randrange(4, 100), growth_factor=draw.choice([2.0, 4.0, 1.5]),
        backoff_factor=draw.choice([0.5, 0.25]), growth_interval=interval, min_scale=1e-30,
    )  # fmt: skip
    peer = torch.amp.GradScaler(
        "cpu", init_scale=settings.init_scale, growth_factor=settings.growth_factor,
        backoff_factor=settings.backoff_factor, growth_interval=interval,
    )  # fmt: skip
    param = nn.Parameter(torch.zeros(2))
    sgd, ours = torch.optim.SGD([param], lr=0.0), LossScaler(settings)
    share = draw.choice([0.05, 0.3])
    for _ in range(120):
        found_inf = draw.random() < share
        peer.scale(torch.zeros(()))  # makes its tensors
        param.grad = torch.tensor([1.0, draw.choice([torch.inf, torch.nan]) if found_inf else 1.0])
        peer.step(sgd)
        peer.update()
        ours.update(found_inf)
        assert torch.tensor(ours.scale) == peer.get_scale()


def test_scale_stays_finite_in_float32() -> None:
    scaler = LossScaler(LossScaling(init_scale=2.0**127, growth_interval=1))
    scaler.update(False)
    assert scaler.scale == 2.0**127


def test_scale_follows_deepspeed_published_sequence() -> None:
    """Scale 2^8, window 2: doubled every second clean step, halved by each overflow, floor 1.

    Source: DeepSpeed, tests/unit/runtime/half_precision/test_dynamic_loss_scale.py.
    """
    settings = LossScaling(init_scale=2.0**8, growth_interval=2, hysteresis=1)
    scaler, want = LossScaler(settings), 2.0**8
    for step in range(1, 11):
        scaler.update(False)
        want *= 2.0 if step % 2 == 0 else 1.0
        assert scaler.scale == want
    scaler = LossScaler(settings)
    for exponent in range(7, -1, -1):
        scaler.update(True)
        assert scaler.scale == 2.0**exponent
    with pytest.raises(precision.LossScaleError, match="at the smallest loss scale, 1"):
        scaler.update(True)
    assert scaler.scale == 1.0


def test_scale_with_hysteresis_follows_deepspeed_and_megatron() -> None:
    """Two overflows until it backs off, then each does; growth gives the patience back.

    Worked out by hand from DeepSpeed's DynamicLossScaler with delayed_shift=2.
    """
    scaler = LossScaler(LossScaling(init_scale=2.0**8, growth_interval=2, hysteresis=2))
    events = "x xx . x .. x x .x ..".replace(" ", "")
    want = [8, 7, 6, 6, 5, 5, 6, 6, 5, 5, 4, 4, 5]
    for event, exponent in zip(events, want, strict=True):
        scaler.update(event == "x")
        assert scaler.scale == 2.0**exponent


def test_scale_state_round_trip_goes_on_alike() -> None:
    scaler, other = (LossScaler(replace(SMALL, hysteresis=3)) for _ in range(2))
    for event in (False, False, True, False):
        scaler.update(event)
    other.load_state_dict(scaler.state_dict())
    for event in (False, True, True, False, False, False):
        scaler.update(event)
        other.update(event)
        assert other.state == scaler.state


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2], ids="stage{}".format)
def test_scaled_training_equals_unscaled_training_bit_for_bit(world_size: int, stage: int) -> None:
    """In float32, where a power of two multiplies without rounding."""

    def build() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(9, 300), nn.Tanh(), nn.Linear(300, 4))

    def run(comm: Communicator, model: nn.Module, policy: precision.PrecisionPolicy) -> list[Any]:
        rule = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2))
        opt = zero.Optimizer(model, rule, comm, stage=stage, precision=policy)
        norms = []
        for step in range(6):
            x = torch.linspace(-1, 1, 18).view(2, 9) * (1 + comm.rank + step)
            result = descend(opt, model(x).square().mean())
            norms.append(result.grad_norm)
            assert not result.skipped
            assert result.loss_scale == (1024.0 * 2 ** (step // 3) if opt.scaler else 1.0)
        return [*norms, *(p.detach() for p in model.parameters())]

    plain = precision.policy("fp32", anychip.backend())
    want, got = (
        on_models(world_size, build, partial(run, policy=policy)) for policy in (plain, fp16(SMALL))
    )
    for a, b in zip(got, want, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("stage", [0, 1, 2, 3], ids="stage{}".format)
@pytest.mark.parametrize("world_size", [1, 3])
def test_overflow_on_one_rank_skips_the_step_on_all_and_changes_no_bit(
    world_size: int, stage: int, value: float
) -> None:
    def snapshot(opt: zero.Optimizer, model: nn.Module) -> list[Tensor]:
        states = [t.clone() for p in model.parameters() for t in opt.state[p].values()]
        with opt.whole():
            return [*(p.detach().clone() for p in model.parameters()), *states]

    def work(comm: Communicator, model: nn.Module) -> tuple[Any, ...]:
        rule = optim.chain(
            optim.clip_by_global_norm(1.0), optim.adamw(optim.warmup_cosine(1e-2, 5, 10))
        )
        opt = zero.Optimizer(
            model, rule, comm, stage=stage, precision=fp16(SMALL), bucket_nbytes=4_000
        )

        def step(factor: float) -> zero.StepResult:
            return descend(opt, model(torch.ones(2, 9)).sum() * factor)

        step(1.0)
        before = snapshot(opt, model)
        skipped = step(value if comm.rank == world_size - 1 else 1.0)
        after = snapshot(opt, model)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert opt.num_steps == 1
        assert skipped == zero.StepResult(None, 0.0, 1024.0, True)
        following = step(1.0)
        assert following.lr == pytest.approx(1e-2 * 2 / 5)
        assert not following.skipped
        return following.loss_scale, opt.scaler.state if opt.scaler else None

    for loss_scale, state in on_models(
        world_size, lambda: nn.Sequential(nn.Linear(9, 300), nn.Linear(300, 4)), work
    ):
        assert loss_scale == 512.0
        assert state == (512.0, 1, 1)


@pytest.mark.parametrize("stage", [0, 1, 2], ids="stage{}".format)
@pytest.mark.parametrize("element", [0, 2999], ids=["on-the-first-rank", "on-the-last-rank"])
def test_overflow_of_one_element_is_known_to_ranks_that_do_not_own_it(
    stage: int, element: int
) -> None:
    def work(comm: Communicator) -> bool:
        param = nn.Parameter(torch.ones(3000))
        opt = zero.Optimizer([param], optim.sgd(1.0), comm, stage=stage, precision=fp16(SMALL))
        param.grad = torch.ones(3000)
        if comm.rank == 1:
            param.grad[element] = torch.inf
        skipped = opt.step().skipped
        assert torch.equal(param, torch.ones(3000))
        return skipped

    assert run_ranks(3, work) == [True] * 3


def test_overflow_that_stays_is_an_error_at_the_floor_on_all_ranks() -> None:
    def work(comm: Communicator) -> float:
        layer = nn.Linear(2, 2)
        opt = zero.Optimizer(
            layer, optim.sgd(0.1), comm, precision=fp16(LossScaling(init_scale=2.0))
        )
        for step in range(2):
            opt.backward(layer(torch.full((1, 2), torch.inf if comm.rank else 1.0)).sum())
            if step == 0:
                assert opt.step().skipped
            else:
                with pytest.raises(precision.LossScaleError, match="lower the learning rate"):
                    opt.step()
            opt.zero_grad()
        assert opt.scaler is not None
        return opt.scaler.scale

    assert run_ranks(2, work) == [1.0, 1.0]


def test_float16_model_with_scaling_learns_and_its_state_goes_on() -> None:
    layer = nn.Linear(8, 1)
    policy = fp16(LossScaling(init_scale=2.0**24, growth_interval=5))
    opt = zero.Optimizer(layer, optim.adamw(3e-2), alone(), precision=policy)
    x = torch.randn(64, 8)
    y = x.sum(dim=1, keepdim=True)
    losses, skipped = [], 0
    for _ in range(60):
        with policy.autocast():
            loss = (layer(x) - y).square().mean()
        skipped += descend(opt, loss).skipped
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
    assert 0 < skipped < 20  # 2^24 is too much for float16, until it has backed off
    other = zero.Optimizer(nn.Linear(8, 1), optim.adamw(3e-2), alone(), precision=policy)
    other.load_state_dict(opt.state_dict())
    assert other.scaler is not None
    assert opt.scaler is not None
    assert other.scaler.state == opt.scaler.state


def test_state_without_a_scale_is_refused_where_one_is_needed() -> None:
    saved = zero.Optimizer(nn.Linear(2, 2), optim.sgd(0.1), alone()).state_dict()
    opt = zero.Optimizer(nn.Linear(2, 2), optim.sgd(0.1), alone(), precision=fp16())
    with pytest.raises(ValueError, match="a loss scale expected, got none"):
        opt.load_state_dict(saved)


def test_backward_from_given_gradients_is_not_scaled_again() -> None:
    layer = nn.Linear(3, 1, bias=False)
    opt = zero.Optimizer(layer, optim.sgd(1.0), alone(), precision=fp16(SMALL))
    x = torch.ones(1, 3)
    opt.backward([layer(x)], [torch.full((1, 1), 5.0)])
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.full((1, 3), 5.0))
    opt.zero_grad()
    opt.backward(layer(x).sum())
    assert torch.equal(layer.weight.grad, torch.full((1, 3), 1024.0))
    with pytest.raises(ValueError, match="one loss expected, got 2 tensors"):
        opt.backward([layer(x), layer(x)])
