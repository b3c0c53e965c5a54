"""An average of the weights that a rule writes, kept beside them: it is asked, and never trained.

It moves with the optimizer's states: shared out by ZeRO, offloaded, saved, cut anew.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from anychip.train.optim.rule import Group, Rule, Update

EMA = "ema"
"""Name of the state."""


def averaged(rule: Rule, decay: float) -> Rule:
    """A rule that writes, and then ``ema = decay ema + (1 - decay) param`` in float32.

    The average begins as the weights do. A step that is left out leaves it as it is.

    Args:
        decay: at least 0, below 1; of N steps about the last 1 / (1 - decay) count.

    Raises:
        ValueError: another decay; or the rule does not write parameters.

    Source: Polyak and Juditsky 1992, SIAM J. Control Optim. 30(4); with a decay, Tarvainen and
        Valpola 2017, arXiv:1703.01780, equation 1.
    """
    if not rule.writes:
        raise ValueError("averaged: the rule that writes the parameters expected")
    if not 0.0 <= decay < 1.0:
        raise ValueError(f"averaged: decay must be at least 0 and below 1, got {decay}")

    def init(param: Tensor) -> dict[str, Tensor]:
        value = param.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        return {**rule.init(param), EMA: value}

    def update(step: Update) -> None:
        if rule.in_pieces:
            step.groups = _following(step.groups, step.found_inf, decay)
            rule.update(step)
            return
        step.groups = groups = list(step.groups)
        rule.update(step)
        for group in groups:
            _average(group, step.found_inf, decay)

    return rule._replace(init=init, update=update)


def _following(groups: Iterable[Group], found_inf: Tensor | None, decay: float) -> Iterator[Group]:
    """Each group is averaged when the next one is asked for: then it has been written."""
    for group in groups:
        yield group
        _average(group, found_inf, decay)


def _average(group: Group, found_inf: Tensor | None, decay: float) -> None:
    weight = torch.full((), 1.0 - decay, dtype=torch.float32, device=group.step.device)
    if found_inf is not None:
        weight = weight * (found_inf == 0.0)
    for average, param in zip(group.state[EMA], group.params, strict=True):
        average.lerp_(param.to(torch.float32), weight)
