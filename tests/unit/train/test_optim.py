"""The optimizer: norms, accumulation, schedules, groups, and what is refused."""

import math

import pytest
import torch
from torch import Tensor, nn

import anychip
from anychip.comm import alone
from anychip.train import optim, precision, zero

UNIT = 2.0**-24
TWICE = optim.chain(
    optim.Rule(lambda param: {"exp_avg": param.clone()}, lambda update: None), optim.adamw(1.0)
)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in ((5, 7), (33,), (1,), (64, 3))]


def give(params: list[nn.Parameter], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(param.dtype)


def optimizer(params: object, rule: optim.Rule) -> zero.Optimizer:
    return zero.Optimizer(params, rule, alone())  # type: ignore[arg-type]


def test_clip_by_global_norm_measures_all_groups_and_leaves_gradients_alone() -> None:
    params = parameters()
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}]
    ours = optimizer(groups, optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-3)))
    grads = [torch.randn_like(p) for p in params]
    give(params, grads)
    norm = ours.step().grad_norm
    want = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    assert norm is not None
    assert float(norm) == pytest.approx(want, rel=32 * UNIT)
    assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))


@pytest.mark.parametrize(
    ("count", "want"), [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (55, 0.55), (100, 0.1), (500, 0.1)]
)
def test_warmup_cosine_at_its_corners(count: int, want: float) -> None:
    schedule = optim.warmup_cosine(1.0, 10, 100)
    assert schedule(count) == pytest.approx(want)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: optim.chain(), "at least one rule"),
    (lambda: optimizer(nn.Linear(2, 2), TWICE), "two rules keep"),
    (lambda: optim.clip_by_global_norm(0.0), "max_norm must be greater than 0"),
    (lambda: optim.constant(-1.0), "learning rate"),
    (lambda: optim.warmup_cosine(1.0, 20, 10), "warmup_steps"),
], ids=["empty-chain", "state-twice", "max-norm", "negative-rate", "long-warmup"])  # fmt: skip
def test_rule_with_wrong_arguments_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_optimizer_on_frozen_module_or_unknown_stage_is_refused() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires gradients"):
        optimizer(frozen, optim.adamw(0.1))
    with pytest.raises(ValueError, match="does not require gradients"):
        optimizer([{"params": list(frozen.parameters())}], optim.adamw(0.1))
    with pytest.raises(ValueError, match="stage must be"):
        zero.Optimizer(nn.Linear(2, 2), optim.adamw(0.1), alone(), stage=4)


def test_optimizer_with_wrong_groups_or_rule_is_refused() -> None:
    layer = nn.Linear(2, 2)
    wrong = [{"params": list(layer.parameters()), "weight_dekay": 0.1}]
    with pytest.raises(ValueError, match="did you mean 'weight_decay'"):
        optimizer(wrong, optim.adamw(0.1))
    with pytest.raises(ValueError, match="writes no parameter"):
        optimizer(layer, optim.clip_by_global_norm(1.0))
    with pytest.raises(ValueError, match="must be the last one"):
        optim.chain(optim.adamw(0.1), optim.clip_by_global_norm(1.0))


def test_frozen_parameters_of_a_module_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    ours = optimizer(model, optim.adamw(0.1))
    assert [id(p) for g in ours.param_groups for p in g["params"]] == [
        id(p) for p in model[1].parameters()
    ]


def test_precision_auto_without_declared_rates_is_fp32_and_says_why() -> None:
    policy = precision.policy("auto", anychip.backend())
    assert policy.name == "fp32"
    assert policy.why.startswith("auto: ")
    assert policy.why.endswith(" does not say how fast it is in bf16")


def test_precision_auto_takes_bf16_where_the_backend_declares_it_faster() -> None:
    from dataclasses import replace

    from anychip.contract import DeviceProperties

    chip = anychip.backend()

    class Faster(type(chip)):  # type: ignore[misc]
        def properties(self, index: int | None = None) -> DeviceProperties:
            rates = {torch.float32: 1e12, torch.bfloat16: 4e12}
            return replace(super().properties(index), flops=rates)

    assert precision.policy("auto", Faster()).name == "bf16"
