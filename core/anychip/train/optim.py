"""Update rules: pairs of init and update that chain, applied to lists of tensors in place.

``chain(clip_by_global_norm(1.0), adamw(lr=warmup_cosine(3e-4, 100, 10_000)))``. A rule is pure
arithmetic through ``anychip.ops``: it knows no model, no device and no rank. Who calls it is
:class:`anychip.train.zero.Optimizer`. After Optax, with updates in place instead of returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anychip import ops
from anychip.operators.update import CLIP_EPS

Schedule = Callable[[int], float]
"""Learning rate given the number of updates done before this one."""


@dataclass(kw_only=True, slots=True)
class Group:
    """Parameters that are updated alike.

    Attributes:
        params, grads: of one length; grads float of any dtype.
        state: what the rules' ``init`` made, one list per name, as long as params.
        step: 0-dim float32, updates done; the rule that writes params advances it.
        options: of the parameter group; ``weight_decay`` and ``lr_scale`` override a rule's own.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    state: Mapping[str, Sequence[Tensor]]
    step: Tensor
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Update:
    """One step on its way through a chain.

    Attributes:
        groups: all parameters that have gradients.
        count: updates done before this one, for schedules.
        norm: 0-dim float32 norm of all gradients, once a rule has measured it.
        clip: 0-dim float32 factor that the writing rule multiplies gradients by.
        lr: learning rate that was applied.
    """

    groups: Sequence[Group]
    count: int
    norm: Tensor | None = None
    clip: Tensor | None = None
    lr: float = 0.0


class Rule(NamedTuple):
    """An update rule.

    Attributes:
        init: state of one parameter, by name; tensors on the parameter's device.
        update: reads and writes an :class:`Update`.
        options: what a parameter group may set for this rule.
        writes: it writes the parameters, so that what follows it in a chain comes too late.
    """

    init: Callable[[Tensor], dict[str, Tensor]]
    update: Callable[[Update], None]
    options: frozenset[str] = frozenset()
    writes: bool = False


def chain(*rules: Rule) -> Rule:
    """One rule after the other.

    Raises:
        ValueError: no rule, a rule after the one that writes the parameters, or two rules whose
            states have a name in common.
    """
    if not rules:
        raise ValueError("chain: at least one rule expected, got none")
    if any(rule.writes for rule in rules[:-1]):
        raise ValueError("chain: the rule that writes the parameters must be the last one")

    def init(param: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for rule in rules:
            made = rule.init(param)
            if state.keys() & made.keys():
                raise ValueError(f"chain: two rules keep {sorted(state.keys() & made.keys())}")
            state |= made
        return state

    def update(step: Update) -> None:
        for rule in rules:
            rule.update(step)

    options = frozenset().union(*(rule.options for rule in rules))
    return Rule(init, update, options, rules[-1].writes)


def clip_by_global_norm(max_norm: float) -> Rule:
    """Scales all gradients by ``min(1, max_norm / (norm + 1e-6))``, norm over all of them.

    The factor is handed on to the rule that writes, so that gradients are read once more and not
    written. Source: Pascanu et al. 2013, arXiv:1211.5063, algorithm 1.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be greater than 0, got {max_norm}")

    def update(step: Update) -> None:
        grads = [grad for group in step.groups for grad in group.grads]
        if not grads:
            return
        step.norm = ops.l2_norm(grads)
        factor = torch.clamp(max_norm / (step.norm + CLIP_EPS), max=1.0)
        step.clip = factor if step.clip is None else step.clip * factor

    return Rule(lambda param: {}, update)


def adamw(
    lr: float | Schedule,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Rule:
    """AdamW with decoupled weight decay; see ``anychip.ops.adamw`` for the equations.

    Args:
        lr: a number, or a schedule of the number of updates done.
        weight_decay: of groups that do not set their own.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
    """
    schedule = lr if callable(lr) else constant(lr)

    def init(param: Tensor) -> dict[str, Tensor]:
        return {name: _float_zeros(param) for name in ("exp_avg", "exp_avg_sq")}

    def update(step: Update) -> None:
        step.lr = schedule(step.count)
        for group in step.groups:
            if not group.params:
                continue
            rate = step.lr * group.options.get("lr_scale", 1.0)
            ops.adamw(
                group.params,
                group.grads,
                group.state["exp_avg"],
                group.state["exp_avg_sq"],
                torch.full((), rate, dtype=torch.float32, device=group.step.device),
                group.step,
                None,
                step.clip,
                None,
                None,
                beta1=beta1,
                beta2=beta2,
                eps=eps,
                weight_decay=group.options.get("weight_decay", weight_decay),
            )

    return Rule(init, update, frozenset({"weight_decay", "lr_scale"}), writes=True)


def _float_zeros(param: Tensor) -> Tensor:
    return torch.zeros_like(param, dtype=torch.float32, memory_format=torch.contiguous_format)


def constant(lr: float) -> Schedule:
    """The same learning rate at every step."""
    _check_rate(lr)
    return lambda count: lr


def warmup_cosine(
    peak: float, warmup_steps: int, total_steps: int, *, final_fraction: float = 0.1
) -> Schedule:
    """Linear to ``peak`` over the warm-up, then half a cosine down to ``final_fraction * peak``.

    The first update has ``peak / warmup_steps``, the last of the warm-up has ``peak``; from
    ``total_steps`` on the rate stays. Source: Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5.
    """
    _check_rate(peak)
    if not 0 <= warmup_steps <= total_steps or total_steps < 1:
        raise ValueError(
            f"warmup_cosine: 0 <= warmup_steps <= total_steps and total_steps >= 1 expected, got "
            f"warmup_steps {warmup_steps} and total_steps {total_steps}"
        )
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction must be from 0 to 1, got {final_fraction}")

    def schedule(count: int) -> float:
        if count < warmup_steps:
            return peak * (count + 1) / warmup_steps
        done = (count - warmup_steps) / max(1, total_steps - warmup_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return peak * (final_fraction + (1.0 - final_fraction) * cosine)

    return schedule


def _check_rate(lr: float) -> None:
    if not lr >= 0 or math.isinf(lr):
        raise ValueError(f"a learning rate must be a finite number of at least 0, got {lr}")
