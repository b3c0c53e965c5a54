"""Data parallel training, and ZeRO: optimizer states and gradients partitioned over the ranks.

:class:`Optimizer` is what a loop uses. Below it: ``partition`` says who owns what, ``bucket`` and
``reducer`` bring gradients together while backward runs, ``shards`` holds the parameters,
``pieces`` puts together what a rank updates, ``state`` saves and loads in a form that fits any
number of ranks.

Source: Rajbhandari et al. 2020, arXiv:1910.02054 (stages 1 and 2); Li et al. 2020,
arXiv:2006.15704 (buckets and overlap).
"""

from anychip.train.zero.optimizer import BUCKET_NBYTES, MemoryUse, Optimizer, StepResult

__all__ = ["BUCKET_NBYTES", "MemoryUse", "Optimizer", "StepResult"]
