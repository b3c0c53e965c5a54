"""Rules that update each element by itself: adamw, sgd, lion. A shard is updated like the whole."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anychip import ops
from anychip.operators.adamw_8bit import BLOCK
from anychip.train.optim.rule import Group, Rule, Update, num_blocks
from anychip.train.optim.schedule import LRSchedule, with_rate


def float_zeros(param: Tensor) -> Tensor:
    """State of a parameter: float32, contiguous, 0."""
    return torch.zeros_like(param, dtype=torch.float32, memory_format=torch.contiguous_format)


def two_moments(param: Tensor) -> dict[str, Tensor]:
    """State of a rule that averages gradients and their squares."""
    return {name: float_zeros(param) for name in ("exp_avg", "exp_avg_sq")}


_SCALES: Mapping[str, int] = MappingProxyType({"exp_avg_scale": BLOCK, "exp_avg_sq_scale": BLOCK})


def _coded_moments(param: Tensor) -> dict[str, Tensor]:
    """:func:`two_moments` as codes of 8 bits, with the scales of their blocks."""
    scales = num_blocks(param.numel(), BLOCK)
    state: dict[str, Tensor] = {}
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = torch.zeros(param.shape, dtype=torch.uint8, device=param.device)
        state[f"{name}_scale"] = torch.zeros(scales, dtype=torch.float32, device=param.device)
    return state


def rate_of(group: Group) -> Tensor:
    """The group's learning rate, 0-dim float32 on its device."""
    rate, device = group.options["lr"] * group.options["lr_scale"], group.step.device
    if isinstance(rate, Tensor):
        return rate.reshape(()).to(device, torch.float32)
    return torch.full((), rate, dtype=torch.float32, device=device)


def numbers(group: Group) -> dict[str, float]:
    """The group's other options, by the operators' names."""
    first, second = group.options["betas"]
    found = {name: group.options[name] for name in ("eps", "weight_decay") if name in group.options}
    return {n: float(v) for n, v in ({"beta1": first, "beta2": second} | found).items()}


def write(
    operator: Callable[..., None],
    step: Update,
    group: Group,
    states: Sequence[str | None],
    *others: Any,
    **attributes: Any,
) -> None:
    """Calls an operator that updates the group; None is a state that it does without."""
    if not group.params:
        return
    given = [[] if name is None else group.state[name] for name in states]
    scalars = (rate_of(group), group.step, step.scale, step.clip, step.found_inf)
    low = group.low_precision
    operator(group.params, group.grads, *given, *scalars, low, *others, **attributes)


class _States(NamedTuple):
    """How adamw keeps its averages: names in the operator's order, and the rule's other parts."""

    names: tuple[str, ...]
    operator: Callable[..., None]
    init: Callable[[Tensor], dict[str, Tensor]]
    blocks: Mapping[str, int]


ADAMW_STATES: Mapping[str, _States] = {
    "float32": _States(("exp_avg", "exp_avg_sq"), ops.adamw, two_moments, MappingProxyType({})),
    "8bit": _States(
        ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"),
        ops.adamw_8bit,
        _coded_moments,
        _SCALES,
    ),
}
"""By the value of adamw's ``states``."""


def adamw(
    lr: float | LRSchedule,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    states: str = "float32",
) -> Rule:
    """AdamW with decoupled weight decay; see ``anychip.ops.adamw`` for the equations.

    Args:
        lr: a number, or a schedule of the number of updates done.
        states: in which both averages are kept: float32, or 8bit with a scale per 256 elements
            (``anychip.ops.adamw_8bit``), about a quarter of the bytes.

    All but ``states`` are options of a parameter group too, both betas as torch's ``betas``.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2; 8bit: Dettmers et al. 2022,
    arXiv:2110.02861.
    """
    if states not in ADAMW_STATES:
        raise ValueError(f"states must be one of {', '.join(ADAMW_STATES)}, got {states!r}")
    names, operator, init, blocks = ADAMW_STATES[states]
    schedule, options = with_rate(lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)

    def update(step: Update) -> None:
        for group in step.groups:
            write(operator, step, group, names, **numbers(group))

    return Rule(init, update, options, True, blocks, schedule, in_pieces=True)


def sgd(
    lr: float | LRSchedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    decoupled: bool = False,
) -> Rule:
    """Gradient descent as torch.optim.SGD without dampening; see ``anychip.ops.sgd``.

    Args:
        lr: a number, or a schedule of the number of updates done.
        momentum: 0: no state is kept, and no group can have a momentum.
        weight_decay: part of the gradient, or with ``decoupled`` of the parameter as in adamw.

    All are options of a parameter group too.

    Raises:
        ValueError: momentum outside 0 to 1, or nesterov without momentum.

    Source: Sutskever et al. 2013, PMLR 28(3):1139, section 2.
    """
    _check_momentum(momentum, nesterov)
    schedule, options = with_rate(
        lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, decoupled=decoupled
    )

    def init(param: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": float_zeros(param)} if momentum else {}

    def update(step: Update) -> None:
        for group in step.groups:
            mine = _momentum_of(group)
            names = ["momentum_buffer"] if mine else [None]
            decay = float(group.options["weight_decay"])
            switches = {name: group.options[name] for name in ("nesterov", "decoupled")}
            write(ops.sgd, step, group, names, momentum=mine, weight_decay=decay, **switches)

    return Rule(init, update, options, writes=True, schedule=schedule, in_pieces=True)


def _momentum_of(group: Group) -> float:
    momentum = float(group.options["momentum"])
    if momentum and not group.state:
        raise ValueError(
            f"a parameter group has the momentum {momentum}, and the rule was made without: give "
            "sgd() one, and the other groups 0"
        )
    return momentum


def _check_momentum(momentum: float, nesterov: bool) -> None:
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum must be at least 0 and below 1, got {momentum}")
    if nesterov and not momentum:
        raise ValueError("nesterov needs a momentum greater than 0, got 0.0")


def lion(
    lr: float | LRSchedule, *, beta1: float = 0.9, beta2: float = 0.99, weight_decay: float = 0.0
) -> Rule:
    """Lion: the sign of an average of gradients; see ``anychip.ops.lion`` for the equations.

    Args:
        lr: a number, or a schedule of the number of updates done; 3 to 10 times smaller than for
            adamw, with a weight decay as many times larger (section 5 of the paper).
        weight_decay: decoupled.

    All are options of a parameter group too, both betas as torch's ``betas``.

    Source: Chen et al. 2023, arXiv:2302.06675, algorithm 2.
    """
    schedule, options = with_rate(lr, betas=(beta1, beta2), weight_decay=weight_decay)

    def init(param: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": float_zeros(param)}

    def update(step: Update) -> None:
        for group in step.groups:
            write(ops.lion, step, group, ["exp_avg"], **numbers(group))

    return Rule(init, update, options, writes=True, schedule=schedule, in_pieces=True)
