"""Is a parameter, after ten steps of an update rule, where float64 arithmetic puts it?

The operators chapter asks about single steps. Here a rule goes on from its own results, through
:class:`anychip.train.zero.Optimizer` on one rank: step counts, bias correction, moments, weight
decay by group, the learning rate of each step, clipping by the norm of all gradients, the loss
scale, and steps that are left out. The oracles of the operators carry their bounds from step to
step; nothing of the optimizer's own arithmetic is used.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anychip import ops
from anychip.conformance import trainee
from anychip.conformance.arithmetic import Rounded, sqrt, where
from anychip.conformance.calls import Draw
from anychip.conformance.case import Case, Context, check, check_equal_bits
from anychip.conformance.oracles import ORACLES
from anychip.train import optim, precision, zero

STEPS = 10
SHAPES: tuple[tuple[int, ...], ...] = ((4, 5), (17,), (), (0, 3), (1000,), (3, 7, 9), (1,))
SECOND_GROUP = 4
"""From this parameter on: no weight decay, and half the learning rate."""
MAX_NORM = 4.0
"""The gradients' norm is about 35: every step is clipped."""
SKIPPED = 4
"""The step in which a gradient is infinite, where there is a loss scale."""
_SCALING = precision.LossScaling(init_scale=1024.0, growth_interval=3)
ABSENT = (1, 3)
"""Parameter and step without a gradient, where one is absent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A rule, as it is made and as its equation is evaluated.

    Attributes:
        make: the rule for a learning rate.
        operator: whose oracle does one step.
        attrs: of the operator.
        moments: names of the state's tensors.
        rest: arguments of the operator after ``low_precision``.
    """

    make: Callable[[optim.LRSchedule], optim.Rule]
    operator: str
    attrs: Mapping[str, Any]
    moments: tuple[str, ...]
    rest: tuple[Any, ...] = ()
    lr: float = 1e-2

    def plain(self) -> optim.Rule:
        """With one learning rate for all steps."""
        return self.make(lambda count: self.lr)


_ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "weight_decay": 0.5}
_SGD: dict[str, Any] = {"momentum": 0.9, "nesterov": False, "weight_decay": 0.5, "decoupled": False}
_NESTEROV: dict[str, Any] = {**_SGD, "nesterov": True, "decoupled": True}
_PLAIN: dict[str, Any] = {**_SGD, "momentum": 0.0}
_LION: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.5}
_TWO = ("exp_avg", "exp_avg_sq")


def _subject(
    rule: Callable[..., optim.Rule],
    attrs: Mapping[str, Any],
    *moments: str,
    operator: str | None = None,
    rest: tuple[Any, ...] = (),
) -> Subject:
    return Subject(
        make=lambda lr: rule(lr, **attrs), operator=operator or rule.__name__,
        attrs=attrs, moments=moments, rest=rest,
    )  # fmt: skip


SUBJECTS: dict[str, Subject] = {
    "adamw": _subject(optim.adamw, _ADAM, *_TWO),
    "sgd": _subject(optim.sgd, _PLAIN),
    "momentum": _subject(optim.sgd, _SGD, "momentum_buffer"),
    "nesterov": _subject(optim.sgd, _NESTEROV, "momentum_buffer"),
    "lion": _subject(optim.lion, _LION, "exp_avg"),
    "lamb": _subject(optim.lamb, _ADAM, *_TWO, rest=(None,)),
}
_CODES = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
CODED = {
    "adamw-8bit": _subject(
        partial(optim.adamw, states="8bit"), _ADAM, *_CODES, operator="adamw_8bit"
    )
}
"""Rules that round their states: beside a boundary either side is right, and the next step begins
there. Single steps are asked of the operator; here, that steps are skipped and resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """What is different from plain steps."""

    clip: bool = False
    schedule: bool = False
    scaled: bool = False
    absent: bool = False


WAYS: dict[str, Way] = {
    "plain": Way(),
    "clip": Way(clip=True),
    "schedule": Way(schedule=True),
    "absent": Way(absent=True),
    "scaled": Way(scaled=True, clip=True),
}


def cases(context: Context) -> Iterator[Case]:
    """A case per rule and way, for a step that is left out, and for one that goes on from a file;
    then the loss scale."""
    for name, subject in SUBJECTS.items():
        for label, way in WAYS.items():
            run = partial(ten_steps, name=name, subject=subject, way=way)
            yield Case(id=f"optimizer/{name}/{label}", run=run)
    for name, subject in (SUBJECTS | CODED).items():
        for label, check_rule in RULES.items():
            run = partial(check_rule, name=name, subject=subject)
            yield Case(id=f"optimizer/{name}/{label}", run=run)
    for label, check_scale in SCALES.items():
        yield Case(id=f"optimizer/loss-scale/{label}", run=check_scale)


def ten_steps(context: Context, *, name: str, subject: Subject, way: Way) -> None:
    """Parameters and state after ten steps; of a step that is skipped, every bit before it."""
    draw = Draw(torch.float32, f"optimizer/{name}", context.seed)
    context.call = f"{STEPS} steps of {name} through zero.Optimizer on {context.device}"
    start = [draw.normal(*shape) for shape in SHAPES]
    params = [nn.Parameter(value.to(context.device)) for value in start]
    schedule = schedule_of(subject, way)
    opt = optimizer(context, params, subject.make(schedule), way)
    oracle = Oracle(subject, start)
    for step in range(STEPS):
        absent = ABSENT[0] if way.absent and step == ABSENT[1] else None
        grads = [None if i == absent else draw.normal(*s) for i, s in enumerate(SHAPES)]
        overflows = way.scaled and step == SKIPPED
        scale = opt.scaler.scale if opt.scaler is not None else None
        place(params, grads, scale, overflows)
        before = snapshot(params, opt) if overflows else {}
        result = opt.step()
        check(result.skipped == overflows, f"step {step}: skipped is {result.skipped}")
        if overflows:
            for key, value in snapshot(params, opt).items():
                check_equal_bits(f"{key} after a step that is left out", value, before[key])
            continue
        norm = oracle.step(grads, schedule(oracle.done), scale, clip=way.clip)
        if way.clip:
            assert result.grad_norm is not None
            context.compare(f"norm of step {step}", result.grad_norm, norm, statistical=False)
    compare(context, params, opt, oracle)


def schedule_of(subject: Subject, way: Way) -> optim.LRSchedule:
    """The learning rate of each step, in plain Python: nothing of a device."""
    if not way.schedule:
        return lambda count: subject.lr
    return lambda count: subject.lr * (1.0 + math.cos(0.3 * count)) / 2.0


def optimizer(
    context: Context,
    params: list[nn.Parameter],
    rule: optim.Rule,
    way: Way,
    scaling: precision.LossScaling = _SCALING,
) -> zero.Optimizer:
    """Two parameter groups on one rank."""
    groups: list[dict[str, Any]] = [
        {"params": params[:SECOND_GROUP]},
        {"params": params[SECOND_GROUP:], "weight_decay": 0.0, "lr_scale": 0.5},
    ]
    policy = None
    if way.scaled:
        policy = precision.PrecisionPolicy(
            name="fp32",
            device_type=context.device.type,
            why="scaled, to see the scale",
            loss_scaling=scaling,
        )
    chained = optim.chain(optim.clip_by_global_norm(MAX_NORM), rule) if way.clip else rule
    return zero.Optimizer(groups, chained, trainee.alone_on(context.device), precision=policy)


def drawn(context: Context, draw: Draw) -> list[nn.Parameter]:
    """Parameters on the device."""
    return [nn.Parameter(draw.normal(*shape).to(context.device)) for shape in SHAPES]


def place(
    params: list[nn.Parameter], grads: list[Tensor | None], scale: float | None, overflows: bool
) -> None:
    """Gives the parameters their (scaled) gradients; the last one gets the infinity."""
    for param, grad in zip(params, grads, strict=True):
        if grad is None:
            param.grad = None
            continue
        given = grad if scale is None else grad * scale
        if overflows and param is params[-1]:
            given = torch.full_like(given, math.inf)
        param.grad = given.to(param.device)


def snapshot(params: list[nn.Parameter], opt: zero.Optimizer) -> dict[str, Tensor]:
    """All that a step writes, by name."""
    found = {f"parameter {i}": p.detach().cpu().clone() for i, p in enumerate(params)}
    for i, param in enumerate(params):
        for name, value in opt.state[param].items():
            found[f"{name} {i}"] = value.cpu().clone()
    return found


class Oracle:
    """The same steps in float64, one parameter at a time, with the bounds of float32."""

    def __init__(self, subject: Subject, start: list[Tensor]) -> None:
        self.subject, self.done = subject, 0
        self.params = [Rounded.exact(value.double().numpy()) for value in start]
        zeros = [Rounded.exact(np.zeros(value.shape)) for value in start]
        self.moments = [[zero for _ in subject.moments] for zero in zeros]
        self.counts = [0.0 for _ in start]

    def step(
        self, grads: list[Tensor | None], lr: float, scale: float | None, *, clip: bool
    ) -> Rounded:
        """One step; the norm of its gradients."""
        exact = [None if g is None else Rounded.exact(g.double().numpy()) for g in grads]
        flat = [(g * g).reshape(-1).sum(0) for g in exact if g is not None]
        norm = sqrt(sum(flat[1:], start=flat[0]))
        ratio = MAX_NORM / (norm + 1e-6)
        factor = where(ratio.value < 1.0, ratio, 1.0) if clip else None
        self.done += 1
        for index, grad in enumerate(exact):
            if grad is not None:
                self._update(index, grad, lr, scale, factor)
        return norm

    def _update(
        self, index: int, grad: Rounded, lr: float, scale: float | None, factor: Rounded | None
    ) -> None:
        attrs, second = dict(self.subject.attrs), index >= SECOND_GROUP
        if second:
            attrs["weight_decay"] = 0.0
        if scale is not None:
            grad = Rounded(grad.value * scale, grad.worst * scale, grad.spread * scale)
        results = ORACLES[self.subject.operator].forward(
            [self.params[index]],
            [grad],
            *([moment] for moment in self.moments[index]),
            *(() if self.subject.moments or self.subject.operator != "sgd" else ([],)),
            Rounded.constant(lr * (0.5 if second else 1.0)),
            Rounded.exact(self.counts[index]),
            None if scale is None else Rounded.exact(scale),
            factor,
            None,
            None,
            *self.subject.rest,
            **attrs,
        )
        self.params[index] = results[0]
        self.moments[index] = list(results[1 : 1 + len(self.subject.moments)])
        self.counts[index] += 1.0


def compare(
    context: Context, params: list[nn.Parameter], opt: zero.Optimizer, oracle: Oracle
) -> None:
    """Values and counts; errors of ten steps are not independent, so no statistics of them."""
    for index, param in enumerate(params):
        state = opt.state[param]
        count, want = float(state["step"]), oracle.counts[index]
        check(count == want, f"parameter {index}: {want:g} steps counted expected, got {count:g}")
        place = trainee.place_of(context.device)
        check(param.device == place, f"parameter {index} went to {param.device}")
        for name, moment in zip(oracle.subject.moments, oracle.moments[index], strict=True):
            context.compare(f"{name} of parameter {index}", state[name], moment, statistical=False)
        found = oracle.params[index]
        context.compare(f"parameter {index}", param.detach(), found, statistical=False)


def found_inf(context: Context, *, name: str, subject: Subject) -> None:
    """Where the device knows that a gradient is not finite, the rule leaves every bit alone."""
    draw = Draw(torch.float32, f"optimizer/{name}/found-inf", context.seed)
    context.call = f"a step of {name} with found_inf = 1 on {context.device}"
    params, rule = drawn(context, draw), subject.plain()
    opt = optimizer(context, params, rule, Way())
    for param in params:
        param.grad = draw.normal(*param.shape).to(context.device)
    opt.step()
    before = snapshot(params, opt)
    grads = [param.grad for param in params if param.grad is not None]
    grads[-1].fill_(math.nan)
    states = [opt.state[param] for param in params]
    group = optim.Group(
        params=[param.detach() for param in params],
        grads=grads,
        state={key: [state[key] for state in states] for key in subject.moments},
        step=states[0]["step"],
        options=rule.options,
    )
    flag = torch.ones((), device=context.device)
    with torch.no_grad():
        rule.update(optim.Update(groups=[group], count=1, found_inf=flag))
    for key, value in snapshot(params, opt).items():
        check_equal_bits(f"{key} after a step with found_inf", value, before[key])


def resumed(context: Context, *, name: str, subject: Subject) -> None:
    """Half of the steps, the state into a new optimizer, the other half: the bits of all in one."""
    context.call = f"{STEPS} steps of {name}, in one and in two halves, on {context.device}"
    found = []
    for cut in (None, STEPS // 2):
        draw = Draw(torch.float32, f"optimizer/{name}/resumed", context.seed)
        params = drawn(context, draw)
        opt = optimizer(context, params, subject.plain(), Way())
        for step in range(STEPS):
            if step == cut:
                saved = copy.deepcopy(opt.state_dict())
                params = [nn.Parameter(param.detach().clone()) for param in params]
                opt = optimizer(context, params, subject.plain(), Way())
                opt.load_state_dict(saved)
            place(params, [draw.normal(*shape) for shape in SHAPES], None, overflows=False)
            opt.step()
        found.append(snapshot(params, opt))
    for key, want in found[0].items():
        check_equal_bits(f"{key} of two halves", found[1][key], want)


RULES: dict[str, Callable[..., None]] = {"found-inf": found_inf, "resumed": resumed}


# The loss scale

SCALING = precision.LossScaling(init_scale=1024.0, growth_interval=2, hysteresis=2)
HISTORY: tuple[tuple[float | None, float], ...] = (
    (math.inf, 1024.0),  # the first overflow is let pass: hysteresis
    (math.nan, 512.0),
    (None, 512.0),
    (None, 1024.0),  # two clean steps: it grows, and hysteresis begins again
    (None, 1024.0),
    (None, 2048.0),
    (-math.inf, 2048.0),
    (None, 2048.0),
    (math.nan, 1024.0),
    (math.inf, 512.0),
    (None, 512.0),
    (None, 1024.0),
)
"""What one gradient of a step holds (None: nothing unusual), and the scale after the step."""


def scale_of_steps(context: Context) -> None:
    """zero.Optimizer: the scale after each step; a skipped step writes nothing, others do."""
    context.call = f"{len(HISTORY)} steps of sgd with a loss scale on {context.device}"
    draw = Draw(torch.float32, "optimizer/loss-scale", context.seed)
    params, rule = drawn(context, draw), SUBJECTS["momentum"].plain()
    opt = optimizer(context, params, rule, Way(scaled=True), SCALING)
    assert opt.scaler is not None
    for step, (odd, want) in enumerate(HISTORY):
        place(params, [draw.normal(*s) for s in SHAPES], opt.scaler.scale, overflows=False)
        _make_odd(params, step, odd)
        before = snapshot(params, opt)
        result = opt.step()
        check(result.skipped == (odd is not None), f"step {step} with {odd}: {result.skipped=}")
        check(opt.scaler.scale == want, f"step {step}: {want:g} expected, got {opt.scaler.scale:g}")
        after = snapshot(params, opt)
        changed = any(not torch.equal(after[key], value) for key, value in before.items())
        check(changed != result.skipped, f"step {step}: skipped {result.skipped}, {changed=}")


def _make_odd(params: list[nn.Parameter], step: int, odd: float | None) -> None:
    """One element of one gradient, another one in each step; no tensor is left out."""
    whole = [param.grad for param in params if param.grad is not None and param.numel()]
    if odd is not None:
        grad = whole[step % len(whole)].view(-1)
        grad[(7 * step) % len(grad)] = odd


def scale_of_own_loop(context: Context) -> None:
    """ops.unscale_and_check and a LossScaler, as in somebody's own loop."""
    context.call = f"{len(HISTORY)} calls of unscale_and_check on {context.device}"
    draw = Draw(torch.float32, "optimizer/loss-scale", context.seed)
    scaler = precision.LossScaler(SCALING)
    params = [nn.Parameter(torch.zeros(shape, device=context.device)) for shape in SHAPES]
    for step, (odd, want) in enumerate(HISTORY):
        grads: list[Tensor | None] = [draw.normal(*shape) for shape in SHAPES]
        place(params, grads, scaler.scale, overflows=False)
        _make_odd(params, step, odd)
        flag = torch.zeros((), device=context.device)
        scale = torch.full((), scaler.scale, device=context.device)
        given = [param.grad for param in params if param.grad is not None]
        ops.unscale_and_check(given, scale, flag)
        scaler.update(bool(flag.item()))
        check(scaler.scale == want, f"step {step} with {odd}: {want:g}, got {scaler.scale:g}")
        if odd is None:
            for got, plain in zip(given, grads, strict=True):
                assert plain is not None
                check_equal_bits("a gradient scaled and unscaled", got.cpu(), plain)


SCALES: dict[str, Callable[[Context], None]] = {
    "steps": scale_of_steps,
    "own-loop": scale_of_own_loop,
}
