"""The optimizer: norms, accumulation, schedules, groups, and what is refused."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anychip
from anychip.comm import alone
from anychip.train import optim, precision, zero

UNIT = 2.0**-24


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
    assert optim.warmup_cosine(1.0, 10, 100)(count) == pytest.approx(want)


FROZEN, LAYER = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
MISSPELT = {"params": list(LAYER.parameters()), "weight_dekay": 0.1}


@pytest.mark.parametrize(("params", "rule", "stage", "message"), [
    (FROZEN, optim.adamw(0.1), 0, "no parameter that requires gradients"),
    ([{"params": list(FROZEN.parameters())}], optim.adamw(0.1), 0, "does not require gradients"),
    ([MISSPELT], optim.adamw(0.1), 0, "did you mean 'weight_decay'"),
    (LAYER, optim.clip_by_global_norm(1.0), 0, "writes no parameter"),
    (LAYER, optim.adamw(0.1), 4, "stage must be"),
], ids=["frozen", "frozen-group", "option", "rule", "stage"])  # fmt: skip
def test_optimizer_of_what_cannot_be_is_refused(
    params: Any, rule: optim.Rule, stage: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        zero.Optimizer(params, rule, alone(), stage=stage)


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
