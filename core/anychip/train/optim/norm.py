"""The norm of all gradients, the same under every sharding, and what is done with it."""

import torch
from torch import Tensor

from anychip import ops
from anychip.operators.gradients import CLIP_EPS
from anychip.operators.squares import root
from anychip.train.optim.rule import Rule, Update


def global_norm(step: Update) -> Tensor | None:
    """Norm of all gradients of all ranks, without the loss scale: 0-dim float32.

    Every rank gets the same bits, and those of a rank that holds everything; see "Rules on shards"
    in :mod:`anychip.train.optim`. None when there is no gradient on this rank's list.
    """
    found = [ops.sums_of_squares(grads).sum(0) for grads in step.counted()]
    if not found:
        return None
    norm = root(step.sum_over_stages(step.sum_over_shards(torch.stack(found).sum(0))))
    return norm if step.scale is None else norm / step.scale


def clip_by_global_norm(max_norm: float) -> Rule:
    """Scales all gradients by ``min(1, max_norm / (norm + 1e-6))``, norm over all of them.

    The factor is handed on to the rule that writes, so that gradients are read once more and not
    written. Source: Pascanu et al. 2013, arXiv:1211.5063, algorithm 1.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be greater than 0, got {max_norm}")

    def update(step: Update) -> None:
        step.norm = global_norm(step)
        if step.norm is None:
            return
        factor = torch.clamp(max_norm / (step.norm + CLIP_EPS), max=1.0)
        step.clip = factor if step.clip is None else step.clip * factor

    return Rule(lambda param: {}, update, in_pieces=True)
