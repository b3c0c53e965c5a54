"""Rules: the state that they keep, what they refuse, and every one of them on shards.

That many steps stay with the equations is asked by the conformance suite's chapter `optimizer`.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anychip
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


def test_sgd_without_decay_has_the_bits_of_torch_sgd() -> None:
    """One multiplication and one subtraction per step; torch fuses no two of them here."""
    mine, params = parameters(), parameters()
    ours = zero.Optimizer(mine, optim.sgd(0.25, momentum=0.5), alone())
    peer = torch.optim.SGD(params, lr=0.25, momentum=0.5, foreach=False)
    for step in range(STEPS):
        for one, other, grad in zip(mine, params, gradients(step), strict=True):
            one.grad, other.grad = grad, grad.clone()
        ours.step()
        peer.step()
    # Powers of two are exact factors, so that a fused multiply-add rounds as the two do.
    assert bits(mine) == bits(params)


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
        "exp_avg": ((3, 100), torch.uint8),
        "exp_avg_scale": ((2,), torch.float32),
        "exp_avg_sq": ((3, 100), torch.uint8),
        "exp_avg_sq_scale": ((2,), torch.float32),
    }
    assert all(not t.any() for t in state.values())
    assert rule.blocks == {"exp_avg_scale": 256, "exp_avg_sq_scale": 256}


def test_adamw_in_8_bits_gives_groups_their_rate_and_decay() -> None:
    """Against two models of one group each, with those settings of the rule."""
    start = torch.randn(2, 700, generator=torch.Generator().manual_seed(5))

    def train(make: Callable[[list[nn.Parameter]], zero.Optimizer]) -> Tensor:
        params = [nn.Parameter(row.clone()) for row in start]
        optimizer = make(params)
        for step in range(3):
            for index, param in enumerate(params):
                param.grad = torch.cos(start[index] * (step + 1))
            optimizer.step()
        return torch.stack([param.detach() for param in params])

    def apart(lr: float, decay: float) -> Tensor:
        rule = optim.adamw(lr, weight_decay=decay, eps=1e-3, states="8bit")
        return train(lambda params: zero.Optimizer(params, rule, alone()))

    def groups(params: list[nn.Parameter]) -> zero.Optimizer:
        rule = optim.adamw(0.2, weight_decay=0.5, eps=1e-3, states="8bit")
        second = {"params": params[1:], "lr_scale": 0.25, "weight_decay": 0.0}
        return zero.Optimizer([{"params": params[:1]}, second], rule, alone())

    got = train(groups)
    assert torch.equal(got[0], apart(0.2, 0.5)[0])
    assert torch.equal(got[1], apart(0.05, 0.0)[1])


@pytest.mark.parametrize(("make", "message"), [
    (lambda: optim.sgd(0.1, momentum=1.0), "momentum must be at least 0 and below 1, got 1.0"),
    (lambda: optim.sgd(0.1, nesterov=True), "nesterov needs a momentum"),
    (lambda: optim.sgd(-0.1), "learning rate"),
    (lambda: optim.lion(float("inf")), "learning rate"),
    (lambda: optim.lamb(float("nan")), "learning rate"),
    (lambda: optim.adamw(0.1, states="int8"), "one of float32, 8bit, got 'int8'"),
    (lambda: optim.averaged(optim.sgd(0.1), 1.0), "at least 0 and below 1, got 1.0"),
    (lambda: optim.averaged(optim.clip_by_global_norm(1.0), 0.5), "that writes the parameters"),
], ids=[
    "momentum", "nesterov", "negative", "infinite", "nan", "states", "decay", "nothing-written",
])  # fmt: skip
def test_rule_with_wrong_settings_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# shards

NUMELS = (5 * optim.BLOCK + 17, 3, 2 * optim.BLOCK, 40)
RULES: dict[str, Callable[[], optim.Rule]] = {
    "adamw": lambda: optim.adamw(0.05), "adamw-8bit": lambda: optim.adamw(0.05, states="8bit"),
    "sgd": lambda: optim.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "lion": lambda: optim.lion(0.05, weight_decay=0.1), "lamb": lambda: optim.lamb(0.05),
    "averaged": lambda: optim.averaged(optim.adamw(0.05), 0.9),
}  # fmt: skip


class Shards:
    """The ranks of a sharded group, one after the other: what ZeRO does, without a process."""

    def __init__(self, rule: optim.Rule, world_size: int) -> None:
        self.rule, self.world_size = rule, world_size
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randn(n, generator=generator) for n in NUMELS]
        self.spans = [self.cut(n) for n in NUMELS]
        self.groups = [self.group(whole, rank) for rank in range(world_size)]

    def cut(self, numel: int) -> list[tuple[int, int]]:
        # Anywhere where states allow it: codes of 8 bits have a scale per block.
        unit = optim.BLOCK if self.rule.blocks else 1
        units = -(-numel // unit)
        ends = [min(units * r // self.world_size * unit, numel) for r in range(self.world_size)]
        return list(itertools.pairwise([*ends, numel]))

    def mine(self, tensors: Sequence[Tensor], rank: int) -> list[Tensor]:
        pairs = zip(tensors, self.spans, strict=True)
        return [t[slice(*spans[rank])].clone() for t, spans in pairs]

    def group(self, whole: Sequence[Tensor], rank: int) -> list[optim.Group]:
        params = self.mine(whole, rank)
        states = [self.rule.init(p) for p in params]
        names = states[0].keys()
        halves = []
        for part in (slice(0, 2), slice(2, None)):
            halves.append(
                optim.Group(
                    params=params[part],
                    grads=[],
                    state={name: [s[name] for s in states[part]] for name in names},
                    step=torch.tensor(0.0),
                    options={**self.rule.options, "weight_decay": 0.01 * part.start},
                )
            )
        return halves

    def step(self, count: int, **options: Any) -> list[optim.Update]:
        """All ranks in lock step: a collective gets what all of them have sent."""
        generator = torch.Generator().manual_seed(100 + count)
        grads = [torch.randn(n, generator=generator) for n in NUMELS]
        sent: list[list[Tensor]] = []
        while True:
            # Run everything anew, from the start, until no collective is left unanswered.
            found = self.attempt(count, grads, sent, options)
            if isinstance(found, list):
                return found

    def attempt(
        self, count: int, grads: Sequence[Tensor], sent: list[list[Tensor]], options: Any
    ) -> list[optim.Update] | None:
        asked: list[Tensor] = []
        updates = []
        for rank, groups in enumerate(self.groups):
            own = self.mine(grads, rank)
            groups[0].grads, groups[1].grads = own[:2], own[2:]
            number = itertools.count()

            def answer(sums: Tensor, number: Any = number) -> Tensor:
                index = next(number)
                if index == len(sent):
                    asked.append(sums.clone())
                    raise Unanswered
                return torch.stack(sent[index]).flip(0).sum(0)

            update = optim.Update(groups=groups, count=count, sum_over_shards=answer, **options)
            try:
                self.rule.update(update)
            except Unanswered:
                continue
            updates.append(update)
        if asked:
            sent.append(asked)
            return None
        return updates

    def whole(self) -> list[Tensor]:
        params = [[*groups[0].params, *groups[1].params] for groups in self.groups]
        return [torch.cat([p[i] for p in params]) for i in range(len(NUMELS))]


class Unanswered(Exception):
    """A rank waits for the others."""


@pytest.mark.parametrize("name", RULES)
def test_rule_with_found_inf_leaves_everything(name: str) -> None:
    shards = Shards(optim.chain(optim.clip_by_global_norm(1.0), RULES[name]()), 2)
    shards.step(0)

    def state() -> Any:
        groups = [g for groups in shards.groups for g in groups]
        return bits([[g.params, *g.state.values(), g.step] for g in groups])

    before = state()
    shards.step(1, found_inf=torch.tensor(1.0))
    assert state() == before
    shards.step(1, found_inf=torch.tensor(0.0))
    assert state() != before


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


def test_global_norm_takes_the_loss_scale_out_and_joins_stages() -> None:
    def group(*grads: Tensor) -> optim.Group:
        return optim.Group(params=grads, grads=grads, state={}, step=torch.tensor(0.0))

    first, second = torch.full((3,), 8.0), torch.full((4, 2), -4.0)
    alone = optim.Update(groups=[group(first), group(second)], count=0, scale=torch.tensor(4.0))
    want = optim.global_norm(alone)
    assert want is not None
    assert float(want) == pytest.approx((3 * 4.0 + 8 * 1.0) ** 0.5)
    # Two stages with a parameter each, and one that both have, which the second one counts.
    both = torch.full((5,), 12.0)
    stages = [([first, both], [True, False]), ([second, both], [True, True])]
    total = sum(anychip.ops.sums_of_squares([t]).sum(0) for t in (first, second, both))
    joined = optim.Update(
        groups=[group(first), group(second, both)], count=0, scale=torch.tensor(4.0)
    )
    sent = []
    for grads, counts in stages:
        one = group(*grads)
        one.counts = counts

        def join(sums: Tensor) -> Tensor:
            sent.append(sums)
            return total

        update = optim.Update(groups=[one], count=0, scale=torch.tensor(4.0), sum_over_stages=join)
        assert bits(optim.global_norm(update)) == bits(optim.global_norm(joined))
    assert torch.equal(torch.stack(sent).sum(0), total)


def test_global_norm_without_gradients_is_none() -> None:
    assert optim.global_norm(optim.Update(groups=[], count=0)) is None


def test_clip_by_global_norm_of_the_scaled_gradients_clips_the_true_ones() -> None:
    found = []
    for scale in (1.0, 1024.0):
        param = torch.ones(4)
        grads = [torch.tensor([3.0, 4.0, 0.0, 0.0]) * scale]
        rule = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(1.0))
        group = optim.Group(
            params=[param], grads=grads, state={}, step=torch.tensor(0.0), options=rule.options
        )
        update = optim.Update(groups=[group], count=0, scale=torch.tensor(scale))
        rule.update(update)
        assert float(update.norm) == 5.0  # type: ignore[arg-type]
        found.append(param)
    assert found[0].tolist() == pytest.approx([0.4, 0.2, 1.0, 1.0], rel=1e-6)
    assert bits(found[0]) == bits(found[1])
