"""zero.Optimizer in loops written for torch.optim: options, schedulers, clipping, states."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs
from torch.optim import swa_utils

import anychip
from anychip.comm import alone
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.train import optim, precision, zero

UNIT = 2.0**-24
STEPS = 12
RATE = 0.04

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda n: 1.0 / (1 + n)),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda n: 0.8),
    "StepLR": lambda o: lrs.StepLR(o, 3, 0.3),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 7], 0.3),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.25, 5),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.1, total_iters=6),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 9, 2.0),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.05, 3, base_momentum=0.5, max_momentum=0.8),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, [0.05, 0.02], STEPS + 1, base_momentum=0.6),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=4), lrs.CosineAnnealingLR(o, 6)], [4]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.1, 3), lrs.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.005, anneal_epochs=5),
}
MOMENTUM = partial(optim.sgd, momentum=0.9)
RULES: dict[str, tuple[Callable[..., optim.Rule], Callable[..., torch.optim.Optimizer]]] = {
    "adamw": (optim.adamw, torch.optim.AdamW),
    "sgd": (MOMENTUM, partial(torch.optim.SGD, momentum=0.9)),
}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((5, 7), (33,), (64, 3))
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def groups(params: list[nn.Parameter], **second: Any) -> list[dict[str, Any]]:
    return [{"params": params[:1]}, {"params": params[1:], **second}]


def give(step: int, *models: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for place in range(len(models[0])):
        grad = torch.randn(models[0][place].shape, generator=generator)
        for params in models:
            params[place].grad = grad.to(params[place].dtype)


def solo(params: Any, rule: optim.Rule, **kwargs: Any) -> zero.Optimizer:
    return zero.Optimizer(params, rule, alone(), **kwargs)


def assert_close(got: list[nn.Parameter], want: list[nn.Parameter]) -> None:
    """STEPS moves of at most 0.1 in size with some 20 roundings each, and one of the parameter.

    A step at another rate, of at least 0.001, is a thousand times farther away.
    """
    for mine, exact in zip(got, want, strict=True):
        bound = STEPS * (20 * 0.1 + 1.0) * UNIT * (1.0 + exact.abs())
        assert bool(((mine - exact).abs() <= bound).all())


def test_every_scheduler_of_torch_is_among_those_tried() -> None:
    assert set(lrs.__all__) - {"LRScheduler"} == SCHEDULERS.keys() - {"SWALR"}


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # SequentialLR's own
def test_scheduler_of_torch_drives_the_rule_as_torch_does(name: str, kind: str) -> None:
    """The first group's rate is a tensor, the second's a number."""
    make, peer_of = RULES[kind]
    mine, exact = parameters(), parameters(torch.float64)
    rates = [torch.tensor(RATE, dtype=torch.float64) for _ in range(2)]
    ours = solo(groups(mine, lr=RATE / 2, weight_decay=0.3), make(rates[0], weight_decay=0.1))
    peer = peer_of(groups(exact, lr=RATE / 2, weight_decay=0.3), lr=rates[1], weight_decay=0.1)
    pair = [(opt, SCHEDULERS[name](opt)) for opt in (ours, peer)]
    seen = set()
    for step in range(STEPS):
        give(step, mine, exact)
        seen.add(ours.param_groups[1]["lr"])
        for opt, scheduler in pair:
            opt.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        for group, other in zip(ours.param_groups, peer.param_groups, strict=True):
            shared = (group.keys() & other.keys()) - {"params"}
            assert all(group[key] == other[key] for key in shared)
    assert_close(mine, exact)
    assert len(seen) > 1


DECAYED = {"lr": 0.02, "weight_decay": 0.5}
SETTINGS: dict[str, tuple[Callable[..., optim.Rule], dict[str, Any]]] = {
    "adamw": (optim.adamw, {**DECAYED, "betas": (0.5, 0.7), "eps": 1e-3}),
    "8bit": (partial(optim.adamw, states="8bit"), {**DECAYED, "betas": (0.5, 0.7), "eps": 1e-3}),
    "lamb": (optim.lamb, {**DECAYED, "betas": (0.5, 0.7), "eps": 1e-3}),
    "lion": (optim.lion, {**DECAYED, "betas": [0.5, 0.7]}),
    "sgd": (MOMENTUM, {**DECAYED, "momentum": 0.5, "nesterov": True, "decoupled": True}),
    "sgd-at-rest": (MOMENTUM, {"lr": 0.0}), "sgd-no-momentum": (MOMENTUM, {"momentum": 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_options_set_in_a_group_are_those_of_a_rule_made_with_them(name: str) -> None:
    make, options = SETTINGS[name]
    arguments = {key: value for key, value in options.items() if key != "betas"}
    if "betas" in options:
        arguments |= dict(zip(("beta1", "beta2"), options["betas"], strict=True))
    made, brought, late = parameters(), parameters(), parameters()
    everything = [
        solo(made, make(**{"lr": 0.3, **arguments})),
        solo([{"params": brought, **options}], make(lr=0.3)), solo(late, make(lr=0.3)),
    ]  # fmt: skip
    everything[2].param_groups[0].update(options)
    for step in range(4):
        give(step, made, brought, late)
        results = [opt.step() for opt in everything]
        assert {result.lr for result in results} == {options.get("lr", 0.3)}
    for params in (brought, late):
        assert all(torch.equal(p, q) for p, q in zip(params, made, strict=True))
    moved = [not torch.equal(p, q) for p, q in zip(made, parameters(), strict=True)]
    assert moved == [name != "sgd-at-rest"] * 3


@pytest.mark.parametrize("stage", [0, 1, 2], ids="stage{}".format)
def test_groups_with_a_scheduler_on_two_ranks_have_the_bits_of_one(stage: int) -> None:
    def work(comm: Communicator, stage: int, models: list[nn.Sequential]) -> list[Tensor]:
        model = models[comm.rank]
        given: Any = groups(list(model.parameters()), weight_decay=0.3, betas=(0.5, 0.9))
        opt = zero.Optimizer(given, optim.adamw(RATE), comm, stage=stage)
        scheduler = lrs.OneCycleLR(opt, [0.05, 0.02], 9, base_momentum=0.6)
        for step in range(6):
            model.zero_grad()  # the model's: what a loop for torch often has
            opt.backward(model(torch.full((1, 40), 1.0 + step)).square().mean())
            opt.step()
            scheduler.step()
        return [param.detach().clone() for param in model.parameters()]

    def build() -> nn.Sequential:
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 3))

    want = work(alone(), 0, [build()])
    for got in run_ranks(2, partial(work, stage=stage, models=[build(), build()])):
        assert all(torch.equal(p, q) for p, q in zip(got, want, strict=True))


def half(count: int) -> float:
    return 0.5**count


def test_schedule_sets_the_rate_until_somebody_else_does() -> None:
    params = parameters()
    opt = solo(groups(params, lr=0.125), optim.sgd(half))
    give(0, params)
    for step in range(4):
        assert [opt.step().lr, opt.param_groups[1]["lr"]] == [half(step), 0.125]
    saved = opt.state_dict()
    opt.param_groups[0]["lr"] = 0.75
    with pytest.warns(UserWarning, match=r"group 0: its lr was set to 0\.75, .* number as lr"):
        opt.step()
    assert opt.step().lr == 0.75
    # Who decides goes with the state.
    for state, want in ((saved, [half(4), 0.125]), (opt.state_dict(), [0.75, 0.125])):
        other = solo(groups(params, lr=0.5), optim.sgd(half))
        other.load_state_dict(state)
        with nullcontext() if state is saved else pytest.warns(UserWarning, match="group 0"):
            other.step()
        assert [group["lr"] for group in other.param_groups] == want
    driven = solo(params, optim.sgd(half))
    scheduler = lrs.StepLR(driven, 5)
    with pytest.warns(UserWarning, match="by a scheduler of torch"):
        driven.step()
    scheduler.step()
    assert driven.step().lr == half(0)


@pytest.mark.parametrize("stage", [1, 2], ids="stage{}".format)
@pytest.mark.parametrize("use", [
    lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True),
    lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    lambda model: model.zero_grad(set_to_none=False),
    lambda model: model(torch.ones(1, 3)).sum().backward(),
    lambda model: model.weight.grad.norm(),
], ids=["clip-norm", "clip-foreach", "clip-value", "zero", "backward", "read"])  # fmt: skip
def test_use_of_a_partitioned_gradient_is_an_error_that_says_what_to_call(
    stage: int, use: Callable[[nn.Module], object]
) -> None:
    def work(comm: Communicator) -> None:
        layer = nn.Linear(3, 1)
        opt = zero.Optimizer(layer, optim.sgd(1.0), comm, stage=stage)
        opt.backward(layer(torch.ones(1, 3)).sum())
        with pytest.raises(RuntimeError, match=r"clip_by_global_norm.* opt\.zero_grad\(\).*opt\.b"):
            use(layer)

    run_ranks(2, work)


@pytest.mark.parametrize("world_size", [1, 2])
def test_backward_of_the_loss_itself_under_loss_scaling_is_refused(world_size: int) -> None:
    def work(comm: Communicator) -> None:
        layer = nn.Linear(3, 1)
        policy = precision.policy("fp16", anychip.backend())
        opt = zero.Optimizer(layer, optim.sgd(1.0), comm, precision=policy)
        with pytest.raises(RuntimeError, match=r"loss scale.*call opt\.backward\(loss\)"):
            layer(torch.ones(1, 3)).sum().backward()
        opt.zero_grad()
        before = layer.weight.detach().clone()
        opt.backward(layer(torch.ones(1, 3)).sum())
        opt.step()
        assert torch.equal(layer.weight, before - 1.0)

    run_ranks(world_size, work)


def test_closure_is_called_once_before_the_update() -> None:
    def model() -> nn.Linear:
        torch.manual_seed(2)
        return nn.Linear(4, 2)

    def closure(layer: nn.Linear, opt: zero.Optimizer) -> Tensor:
        opt.zero_grad()
        loss = layer(torch.ones(3, 4)).square().mean()
        opt.backward(loss)
        return loss

    plain, closed = model(), model()
    first, second = solo(plain, optim.adamw(0.1)), solo(closed, optim.adamw(0.1))
    for _ in range(3):
        loss = closure(plain, first)
        first.step()
        assert torch.equal(second.step(partial(closure, closed, second)).loss, loss)
    assert torch.equal(plain.weight, closed.weight)


@pytest.mark.parametrize("kind", [*RULES, "adam", "sgd-fresh"])
def test_state_of_torch_goes_on_as_in_torch(kind: str) -> None:
    """The state goes over after half of the steps; a parameter without gradient has none."""
    make, peer_of = RULES[{"adam": "adamw", "sgd-fresh": "sgd"}.get(kind, kind)]
    decay = 0.0 if kind == "adam" else 0.1
    peer_of = torch.optim.Adam if kind == "adam" else peer_of
    exact, mine = parameters(torch.float64), parameters()
    peer = peer_of(groups(exact, lr=0.01), lr=RATE, weight_decay=decay)
    ours = solo(groups(mine), make(9.0, weight_decay=9.0))
    give(50, mine)
    ours.step()  # what is there is replaced, of the parameter without a state too
    start = 0 if kind == "sgd-fresh" else STEPS // 2
    for step in range(STEPS):
        give(step, mine, exact)
        if step < start:
            exact[2].grad = None
        if step == start:
            for param, given in zip(mine, exact, strict=True):
                param.data.copy_(given)
            ours.load_state_dict(peer.state_dict())
            assert ours.num_steps == (start if kind in ("adamw", "adam") else 0)
        if step >= start:
            ours.step()
        peer.step()
    assert [group["lr"] for group in ours.param_groups] == [RATE, 0.01]
    assert_close(mine, exact)


@pytest.mark.parametrize(("peer_of", "rule", "message"), [
    (partial(torch.optim.AdamW, amsgrad=True), optim.adamw(0.1), "saved with amsgrad=True"),
    (partial(torch.optim.SGD, maximize=True), optim.sgd(0.1), "saved with maximize=True"),
    (partial(torch.optim.Adam, weight_decay=0.1), optim.adamw(0.1), "decoupled_weight_decay=F"),
    (torch.optim.SGD, optim.adamw(0.1), "another rule, with momentum, nesterov; this one has"),
    (torch.optim.SGD, optim.sgd(half), "no number of steps.*make the rule with a number"),
], ids=["amsgrad", "maximize", "adam", "rule", "schedule"])  # fmt: skip
def test_state_of_torch_that_the_rule_cannot_go_on_from_is_refused(
    peer_of: Callable[..., torch.optim.Optimizer], rule: optim.Rule, message: str
) -> None:
    params = parameters()
    peer = peer_of(parameters(), lr=0.1)
    opt = solo(params, rule)
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(peer.state_dict())
    assert opt.param_groups[0]["lr"] == rule.options["lr"]


def test_hooks_and_named_parameters_are_as_torchs() -> None:
    model = nn.Linear(3, 2)
    opt = solo(model.named_parameters(), optim.adamw(0.1))
    assert opt.param_groups[0]["param_names"] == ["weight", "bias"]
    seen: list[Any] = []
    opt.register_step_pre_hook(lambda *_: seen.append("pre"))
    opt.register_step_post_hook(lambda *_: seen.append("post"))
    opt.register_state_dict_pre_hook(lambda *_: seen.append("saving"))
    opt.register_state_dict_post_hook(lambda o, state: {**state, "mine": state["num_steps"]})
    opt.register_load_state_dict_pre_hook(lambda o, state: seen.append(state["mine"]))
    opt.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    opt.backward(model(torch.ones(1, 3)).sum())
    opt.step()
    opt.load_state_dict(opt.state_dict())
    assert seen == ["pre", "post", "saving", 1, "loaded"]


def test_momentum_in_a_group_of_a_rule_without_is_an_error() -> None:
    params = parameters()
    opt = solo(groups(params, momentum=0.9), optim.sgd(0.1))
    give(0, params)
    with pytest.raises(ValueError, match=r"momentum 0\.9.*give sgd\(\) one"):
        opt.step()
