"""Data parallel training, and ZeRO: states, gradients and weights partitioned over the ranks.

:class:`Optimizer` is what a loop uses; :class:`ShardedModel`, in ``Optimizer.sharded``, is for who
wants the parts. Below them: ``layout`` says who owns what of a flat buffer, ``weights`` and
``gradients`` are its two sides, ``exchange`` brings both to other ranks and back; ``units`` says
what is gathered together, ``hooks`` when; ``reduce_queue`` when gradients are sent; ``explicit``
takes both from who knows better, like the schedule of a pipeline. ``update`` puts
together what a rank updates, ``state`` saves and loads in a form that fits any number of ranks.
``tiers`` are where what is not on the device lives, ``streaming`` brings it there and back, and
``chunked`` makes the update's groups of it.

Source: Rajbhandari et al. 2020, arXiv:1910.02054; Li et al. 2020, arXiv:2006.15704 (gradients that
are sent while backward runs); Zhao et al. 2023, arXiv:2304.11277 (units of flat weights).
"""

from anychip.train.zero.explicit import Explicit
from anychip.train.zero.guard import gradient_edge, stand_in
from anychip.train.zero.optimizer import MemoryUse, Optimizer, StepResult
from anychip.train.zero.sharded import ShardedModel, ShardingOptions

__all__ = [
    "Explicit", "MemoryUse", "Optimizer", "ShardedModel", "ShardingOptions", "StepResult",
    "gradient_edge", "stand_in",
]  # fmt: skip
