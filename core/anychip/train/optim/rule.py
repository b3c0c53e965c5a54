"""What a rule is given, and how rules join: Group, Update, Rule, chain."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from anychip.train.optim.schedule import LRSchedule

BLOCK = 1024
"""Multiples of which a flattened parameter is cut at: states with an entry per several elements
(:attr:`Rule.blocks`) lie in one shard, whose cuts vectors may begin at."""

Reduce = Callable[[Tensor], Tensor]
"""int64 sums of this rank in, their sum over ranks out. Called by all ranks."""


def num_blocks(numel: int, block: int = BLOCK) -> int:
    """Blocks of a parameter: the last one may be shorter."""
    return -(-numel // block)


def identity(sums: Tensor) -> Tensor:
    """Of a rank that has everything."""
    return sums


@dataclass(kw_only=True, slots=True)
class Group:
    """Parameters, or shards of them, that are updated alike.

    Attributes:
        params, grads: of one length; grads float of any dtype.
        state: what the rules' ``init`` made, one list per name, as long as params.
        step: 0-dim float32, updates done; the rule that writes params advances it.
        options: of the parameter group: all that ``Rule.options`` names.
        counts: whether each of params counts in norms of all; None: they do.
        low_precision: copies in a 16-bit type, written together with params.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    state: Mapping[str, Sequence[Tensor]]
    step: Tensor
    options: Mapping[str, Any] = field(default_factory=dict)
    counts: Sequence[bool] | None = None
    low_precision: Sequence[Tensor] | None = None

    @property
    def counted(self) -> list[Tensor]:
        """The gradients that count in norms of all; one without elements for each that does not."""
        if self.counts is None:
            return list(self.grads)
        pairs = zip(self.grads, self.counts, strict=True)
        return [grad if is_counted else grad.reshape(-1)[:0] for grad, is_counted in pairs]


@dataclass(kw_only=True, slots=True)
class Update:
    """One step on its way through a chain.

    Attributes:
        groups: all parameters that have gradients. Under offload they come one after the other,
            a parameter's elements in several, and each is gone when the next one is asked for.
        count: updates done before this one.
        scale: 0-dim float32 loss scale that is still in the gradients; None: they have none.
        found_inf: 0-dim float32; when it is not 0, the rule that writes leaves everything as it
            was, step included.
        sum_over_shards, sum_over_stages: see "Rules on shards" in :mod:`anychip.train.optim`.
        norm: 0-dim float32 norm of all gradients without the loss scale, once a rule measured it.
        clip: 0-dim float32 factor that the writing rule multiplies gradients by.
        pieces: groups with all gradients and nothing else, where ``groups`` come one by one.
    """

    groups: Iterable[Group]
    count: int
    scale: Tensor | None = None
    found_inf: Tensor | None = None
    sum_over_shards: Reduce = identity
    sum_over_stages: Reduce = identity
    norm: Tensor | None = None
    clip: Tensor | None = None
    pieces: Callable[[], Iterable[Group]] | None = None

    def counted(self) -> Iterator[list[Tensor]]:
        """The gradients that count in norms of all, in any number of lists."""
        groups = self.groups if self.pieces is None else self.pieces()
        return (group.counted for group in groups if group.grads)


class Rule(NamedTuple):
    """An update rule.

    Attributes:
        init: state of one parameter, by name; tensors on the parameter's device.
        update: reads and writes an :class:`Update`.
        options: what a parameter group has for this rule, by torch's names, with the values of
            groups that set none; ``lr`` is the schedule's first where there is one.
        writes: it writes the parameters, so that what follows it in a chain comes too late.
        blocks: states with one entry per so many elements of the flattened parameter, a divisor of
            ``BLOCK``, by name; all others have the parameter's shape.
        schedule: of ``lr`` in groups where nobody has set another; None: it stays.
        in_pieces: it may be given a parameter in pieces, one after the other: it goes through the
            groups once, works element by element, and measures by :meth:`Update.counted`.
    """

    init: Callable[[Tensor], dict[str, Tensor]]
    update: Callable[[Update], None]
    options: Mapping[str, Any] = MappingProxyType({})
    writes: bool = False
    blocks: Mapping[str, int] = MappingProxyType({})
    schedule: LRSchedule | None = None
    in_pieces: bool = False


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

    options = {name: value for rule in rules for name, value in rule.options.items()}
    blocks = {name: block for rule in rules for name, block in rule.blocks.items()}
    in_pieces = all(rule.in_pieces for rule in rules)
    return Rule(init, update, options, rules[-1].writes, blocks, rules[-1].schedule, in_pieces)
