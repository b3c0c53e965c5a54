"""Rules: the state that they keep, what they write beside the parameters, and what they refuse.

That many steps stay with the equations, with clipping, a loss scale and steps that are left out, is
asked by the conformance suite's chapter `optimizer`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anychip.comm import alone
from anychip.train import optim, zero
from tests.unit.dispatch.calls import bits

STEPS = 25
SHAPES = ((5, 7), (33,), (1,), (64, 3))


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(99)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


@pytest.mark.parametrize(("rule", "names"), [
    (optim.sgd(0.1), set()),
    (optim.sgd(0.1, momentum=0.9), {"momentum_buffer"}),
    (optim.lion(0.1), {"exp_avg"}), (optim.lamb(0.1), {"exp_avg", "exp_avg_sq"}),
], ids=["sgd", "momentum", "lion", "lamb"])  # fmt: skip
def test_rule_keeps_the_state_that_it_needs(rule: optim.Rule, names: set[str]) -> None:
    state = rule.init(torch.ones(3, 4, dtype=torch.bfloat16))
    assert state.keys() == names
    assert all(t.dtype == torch.float32 and t.shape == (3, 4) for t in state.values())
    assert rule.writes
    assert rule.options.keys() >= {"lr", "lr_scale", "weight_decay"}


@pytest.mark.parametrize("make", [optim.lion, optim.lamb], ids=["in-pieces", "whole"])
def test_average_follows_the_weights_and_changes_nothing_of_them(
    make: Callable[[float], optim.Rule],
) -> None:
    decay, mine, plain = 0.7, parameters(), parameters()
    ours = zero.Optimizer(mine, optim.averaged(make(0.05), decay), alone())
    peer = zero.Optimizer(plain, make(0.05), alone())
    want = [param.detach().double() for param in plain]
    for step in range(STEPS):
        for one, other, grad in zip(mine, plain, gradients(step), strict=True):
            one.grad, other.grad = grad, grad.clone()
        ours.step()
        peer.step()
        pairs = zip(want, plain, strict=True)
        want = [decay * w + (1.0 - decay) * p.detach().double() for w, p in pairs]
    assert bits(mine) == bits(plain)
    for param, value in zip(mine, want, strict=True):
        got = ours.state[param]["ema"]
        # Three roundings a step, which fade like what they are of: 3 eps / (1 - decay) of the most.
        most = 3 * 2.0**-24 / (1.0 - decay) * float(value.abs().max() + param.detach().abs().max())
        assert float((got - value).abs().max()) <= most
        assert not torch.equal(got, param)


def test_average_stays_where_a_step_is_left_out() -> None:
    rule = optim.averaged(optim.lion(0.05), 0.5)
    param = torch.ones(7)
    state = {name: [value] for name, value in rule.init(param).items()}
    group = optim.Group(params=[param], grads=[torch.ones(7)], state=state, step=torch.tensor(0.0),
                        options=rule.options)  # fmt: skip
    param.add_(1.0)  # so that an average that moved would show
    rule.update(optim.Update(groups=[group], count=0, found_inf=torch.tensor(1.0)))
    assert torch.equal(state["ema"][0], torch.ones(7))


def test_adamw_in_8_bits_keeps_codes_and_scales() -> None:
    rule = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1, states="8bit"))
    state = rule.init(torch.ones(3, 100))
    assert {name: (tuple(t.shape), t.dtype) for name, t in state.items()} == {
        "exp_avg": ((3, 100), torch.uint8), "exp_avg_scale": ((2,), torch.float32),
        "exp_avg_sq": ((3, 100), torch.uint8), "exp_avg_sq_scale": ((2,), torch.float32),
    }  # fmt: skip
    assert all(not t.any() for t in state.values())
    assert rule.blocks == {"exp_avg_scale": 256, "exp_avg_sq_scale": 256}


KEPT_TWICE = optim.Rule(lambda param: {"exp_avg": param.clone()}, lambda update: None)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: optim.sgd(0.1, momentum=1.0), "momentum must be at least 0 and below 1, got 1.0"),
    (lambda: optim.sgd(0.1, nesterov=True), "nesterov needs a momentum"),
    (lambda: optim.sgd(-0.1), "learning rate"),
    (lambda: optim.lion(float("inf")), "learning rate"),
    (lambda: optim.lamb(float("nan")), "learning rate"),
    (lambda: optim.adamw(0.1, states="int8"), "one of float32, 8bit, got 'int8'"),
    (lambda: optim.averaged(optim.sgd(0.1), 1.0), "at least 0 and below 1, got 1.0"),
    (lambda: optim.averaged(optim.clip_by_global_norm(1.0), 0.5), "that writes the parameters"),
    (lambda: optim.clip_by_global_norm(0.0), "max_norm must be greater than 0"),
    (lambda: optim.constant(-1.0), "learning rate"),
    (lambda: optim.warmup_cosine(1.0, 20, 10), "warmup_steps"),
    (lambda: optim.chain(), "at least one rule"),
    (lambda: optim.chain(optim.adamw(0.1), optim.clip_by_global_norm(1.0)), "must be the last one"),
    (lambda: optim.chain(KEPT_TWICE, optim.adamw(1.0)).init(torch.ones(2)), "two rules keep"),
], ids=[
    "momentum", "nesterov", "negative", "infinite", "nan", "states", "decay", "nothing-written",
    "max-norm", "constant", "long-warmup", "empty-chain", "order", "state-twice",
])  # fmt: skip
def test_rule_with_wrong_settings_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


RULES: dict[str, Callable[[], optim.Rule]] = {
    "adamw": lambda: optim.adamw(0.05), "adamw-8bit": lambda: optim.adamw(0.05, states="8bit"),
    "sgd": lambda: optim.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "lion": lambda: optim.lion(0.05, weight_decay=0.1), "lamb": lambda: optim.lamb(0.05),
    "averaged": lambda: optim.averaged(optim.adamw(0.05), 0.9),
}  # fmt: skip


def test_rule_writes_the_low_precision_copies() -> None:
    for make in RULES.values():
        rule = make()
        param, copy = torch.randn(50), torch.zeros(50, dtype=torch.bfloat16)
        state = {name: [t] for name, t in rule.init(param).items()}
        group = optim.Group(
            params=[param], grads=[torch.randn(50)], state=state, step=torch.tensor(0.0),
            low_precision=[copy], options=rule.options,
        )  # fmt: skip
        rule.update(optim.Update(groups=[group], count=0))
        assert bits(copy) == bits(param.bfloat16())


def test_global_norm_without_gradients_is_none() -> None:
    assert optim.global_norm(optim.Update(groups=[], count=0)) is None
