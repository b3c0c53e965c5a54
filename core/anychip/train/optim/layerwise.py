"""Rules that need norms of whole parameters: lamb. Shards join them through the Update."""

from typing import Any

import torch
from torch import Tensor

from anychip import ops
from anychip.operators.lamb import trust_ratios
from anychip.train.optim.elementwise import numbers, two_moments, write
from anychip.train.optim.rule import Group, Rule, Update
from anychip.train.optim.schedule import LRSchedule, with_rate


def lamb(
    lr: float | LRSchedule,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
) -> Rule:
    """LAMB: AdamW's step times ``||w|| / ||u||`` per parameter; see ``anychip.ops.lamb``.

    Two passes: one for the norms, which are added up over all shards of all groups at once, and
    one that writes.

    Args:
        lr: a number, or a schedule of the number of updates done.
        weight_decay: part of the step u.

    All are options of a parameter group too, both betas as torch's ``betas``.

    Source: You et al. 2019, arXiv:1904.00962, algorithm 2.
    """
    schedule, options = with_rate(lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)

    def update(step: Update) -> None:
        groups = [group for group in step.groups if group.params]
        if not groups:
            return
        sums = [_sums_of_squares(step, group, numbers(group)) for group in groups]
        joined = step.sum_over_shards(torch.cat(sums, dim=1))
        counts = [len(group.params) for group in groups]
        for group, rows in zip(groups, joined.split(counts, dim=1), strict=True):
            moments = ("exp_avg", "exp_avg_sq")
            write(ops.lamb, step, group, moments, trust_ratios(rows), **numbers(group))

    return Rule(two_moments, update, options, writes=True, schedule=schedule)


def _sums_of_squares(step: Update, group: Group, settings: dict[str, Any]) -> Tensor:
    averages = group.state["exp_avg"], group.state["exp_avg_sq"]
    return ops.lamb_sums_of_squares(
        group.params, group.grads, *averages, group.step, step.scale, step.clip, **settings
    )
