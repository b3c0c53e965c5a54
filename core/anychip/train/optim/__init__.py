"""Update rules: pairs of init and update that chain, applied to lists of tensors in place.

``chain(clip_by_global_norm(1.0), adamw(lr=warmup_cosine(3e-4, 100, 10_000)))``. A rule is pure
arithmetic through ``anychip.ops``: it knows no model, no device and no rank. Who calls it is
:class:`anychip.train.zero.Optimizer`. After Optax, with updates in place instead of returned.

Note: Rules on shards
    adamw, sgd and lion work element by element. Norms (clip_by_global_norm, lamb) are sums over a
    fixed grid of blocks of ``BLOCK`` elements of each *whole* flattened parameter, so that they
    have the same bits under every sharding; see :mod:`anychip.operators.partials`. Whoever shards

    1. cuts a flattened parameter at multiples of ``BLOCK`` only (or not at all), and keeps every
       parameter in ``Group.params``, ``grads`` and ``state`` of every rank, in one order, a shard
       of no elements where the rank holds nothing of it;
    2. says in ``Group.spans`` where each shard begins, and how many elements the whole has;
    3. gives ``Update.sum_over_shards``: float32 partials in, their sum over the ranks that hold
       the other shards out, like ``lambda t: comm.all_reduce(t)``. All terms but one are zero: the
       sum is exact in any order;
    4. gives ``Update.gather_stages`` when other ranks hold *other* parameters (a pipeline): 1-dim
       partials in, those of all stages one after the other out. A parameter that two stages share
       is counted once if one of them takes its blocks out.

    One rank needs none of this: the defaults are whole parameters and the identity. The partials
    are one float32 per ``BLOCK`` elements: 0.1 % of the bytes of the gradients.
"""

from anychip.operators.partials import BLOCK
from anychip.train.optim.elementwise import adamw, lion, sgd
from anychip.train.optim.layerwise import lamb
from anychip.train.optim.norm import clip_by_global_norm, global_norm
from anychip.train.optim.rule import Group, Rule, ShardMetadata, Update, chain
from anychip.train.optim.schedule import LRSchedule, constant, warmup_cosine

__all__ = [
    "BLOCK",
    "Group",
    "LRSchedule",
    "Rule",
    "ShardMetadata",
    "Update",
    "adamw",
    "chain",
    "clip_by_global_norm",
    "constant",
    "global_norm",
    "lamb",
    "lion",
    "sgd",
    "warmup_cosine",
]  # fmt: skip
