"""Update rules: pairs of init and update that chain, applied to lists of tensors in place.

``chain(clip_by_global_norm(1.0), adamw(lr=warmup_cosine(3e-4, 100, 10_000)))``. A rule is pure
arithmetic through ``anychip.ops``: it knows no model, no device and no rank. Who calls it is
:class:`anychip.train.zero.Optimizer`. After Optax, with updates in place instead of returned.

Note: Rules on shards
    adamw, sgd and lion work element by element. Norms (clip_by_global_norm, lamb) are exact sums of
    squares of each rank's elements, which add up exactly: they have the same bits under every
    sharding, whatever elements a rank has; see :mod:`anychip.operators.squares`. Whoever shards

    1. keeps every parameter in ``Group.params``, ``grads`` and ``state`` of every rank, in one
       order, a shard of no elements where the rank holds nothing of it;
    2. gives ``Update.sum_over_shards``: int64 sums in, their sum over the ranks that hold the other
       shards out, like ``lambda t: comm.all_reduce(t)``;
    3. gives ``Update.sum_over_stages`` when other ranks hold *other* parameters (a pipeline): the
       sum over them. Of a parameter that two stages share, ``Group.counts`` is False on one.

    One rank needs none of this: the defaults are whole parameters and the identity. A norm takes 21
    int64 of each rank, 168 bytes, and lamb twice that per parameter tensor.
"""

from anychip.train.optim.average import averaged
from anychip.train.optim.elementwise import adamw, lion, sgd
from anychip.train.optim.layerwise import lamb
from anychip.train.optim.norm import clip_by_global_norm, global_norm
from anychip.train.optim.rule import BLOCK, Group, Rule, Update, chain
from anychip.train.optim.schedule import LRSchedule, constant, warmup_cosine

__all__ = [
    "BLOCK", "Group", "LRSchedule", "Rule", "Update", "adamw", "averaged", "chain",
    "clip_by_global_norm", "constant", "global_norm", "lamb", "lion", "sgd", "warmup_cosine",
]  # fmt: skip
