"""What does this rank update? Its pieces of parameters and gradients, put together for a rule.

With one rank, and in stage 0, a piece is the whole parameter.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anychip.contract import Communicator
from anychip.runtime import on_host
from anychip.train.optim import Group, Update
from anychip.train.zero.chunked import ChunkedGroups, Part
from anychip.train.zero.dtensors import local, sum_over_parts
from anychip.train.zero.layout import ShardMetadata
from anychip.train.zero.sharded import ShardedModel

MASTER = "master"
"""Name of a 16-bit weight's value in float32, among its states."""

State = Mapping[Tensor, dict[str, Tensor]]
"""Of each parameter the rule's states by name, and ``step``."""


class Updates:
    """What this rank gives its rule, step by step.

    Args:
        sharded: the parameters; None with one rank: they are whole, and gradients in ``.grad``.
        blocks: as :class:`~anychip.train.optim.Rule` has them.
        model_comm, duplicates: as :class:`~anychip.train.zero.Optimizer` has them.
    """

    def __init__(
        self,
        comm: Communicator,
        sharded: ShardedModel | None,
        model_comm: Communicator | None,
        duplicates: Collection[Tensor],
        blocks: Mapping[str, int],
    ) -> None:
        self.comm, self.sharded, self.blocks = comm, sharded, blocks
        self.model_comm, self.duplicates = model_comm, duplicates

    def values(self, param: Tensor) -> Tensor:
        """What this rank updates of a parameter."""
        if self.sharded is None:
            return local(param)
        place = self.sharded.places[param]
        return place.weights.values[place.index]

    def has_master(self, param: Tensor) -> bool:
        """What is updated is not the weight that modules see."""
        return self.sharded is not None and self.sharded.places[param].weights.has_masters

    def span(self, param: Tensor) -> ShardMetadata | None:
        """Where that lies in the flattened parameter; None: it is the parameter."""
        if self.sharded is None:
            return None
        place = self.sharded.places[param]
        return None if place.weights.spans is None else place.weights.spans[place.index]

    def gradient(self, param: Tensor) -> Tensor:
        """The gradient of what this rank updates."""
        if self.sharded is None:
            return local(param.grad)
        place = self.sharded.places[param]
        assert place.gradients is not None
        return place.gradients.gradient(place.index)

    def found_inf(
        self, groups: Sequence[Mapping[str, Any]], states: State, present: Collection[Tensor]
    ) -> bool:
        """Whether any gradient on any rank is not finite; the host waits for the answer."""
        found = torch.zeros((), dtype=torch.float32, device=next(iter(present)).device)
        for gradient in self._gradients(groups, states, present):
            if not gradient.numel():
                continue
            low, high = torch.aminmax(gradient)  # both NaN when there is one
            finite = torch.isfinite(low) & torch.isfinite(high)
            found = torch.maximum(found, (~finite).to(torch.float32))
        self.comm.all_reduce(found, "max")
        if self.model_comm is not None:
            self.model_comm.all_reduce(found, "max")
        return bool(on_host(found).item())

    def update(
        self,
        groups: Sequence[Mapping[str, Any]],
        states: State,
        present: Collection[Tensor],
        *,
        count: int,
        scale: float | None,
    ) -> Update:
        """What a rule is given.

        Args:
            groups: torch's parameter groups.
            present: parameters that have a gradient on any rank.
            count: updates done.
            scale: that is still in the gradients; None: there is no loss scaling.
        """
        parts = [(params, group) for group in groups for params in _parts(group, states, present)]
        chunked = self._chunked(parts, states)
        update = Update(groups=chunked or [self._part(p, g, states) for p, g in parts], count=count)
        if chunked is not None:
            update.pieces = chunked.gradients
        if scale is not None:
            update.scale = torch.full((), scale, device=next(iter(present)).device)
        if self.sharded is None:
            update.sum_over_shards = sum_over_parts(present)
        elif self.sharded.partition.states:
            update.sum_over_shards = self.sharded.exchange.sum_over_parts
        if self.model_comm is not None:
            update.sum_over_stages = self._sum_over_stages
        return update

    def _chunked(self, parts: Sequence[Part], states: State) -> ChunkedGroups | None:
        """The groups, where something of them is elsewhere."""
        if self.sharded is None or self.sharded.tiers is None:
            return None
        return ChunkedGroups(self.sharded, parts, states, [MASTER], self.blocks, self.duplicates)

    def _gradients(
        self, groups: Sequence[Mapping[str, Any]], states: State, present: Collection[Tensor]
    ) -> Iterable[Tensor]:
        parts = [(params, group) for group in groups for params in _parts(group, states, present)]
        chunked = self._chunked(parts, states)
        if chunked is None:
            return map(self.gradient, present)
        return (gradient for group in chunked.gradients() for gradient in group.grads)

    def _part(self, params: list[Tensor], group: Mapping[str, Any], states: State) -> Group:
        mine = [states[p] for p in params]
        return Group(
            params=[self.values(p) for p in params],
            grads=[self.gradient(p) for p in params],
            state={n: [local(s[n]) for s in mine] for n in mine[0] if n not in ("step", MASTER)},
            step=mine[0]["step"],
            options={k: v for k, v in group.items() if k != "params"},
            counts=[param not in self.duplicates for param in params],
        )

    def _sum_over_stages(self, sums: Tensor) -> Tensor:
        assert self.model_comm is not None
        self.model_comm.all_reduce(sums)
        return sums


def _parts(
    group: Mapping[str, Any], states: State, present: Collection[Tensor]
) -> list[list[Tensor]]:
    """Those of a group that have a gradient, apart where step counts differ.

    All parameters of a group share one step count until one of them misses a gradient: from
    then on it has a count of its own, as in torch, since bias correction depends on it.
    """
    parts: dict[int, list[Tensor]] = {}
    for param in group["params"]:
        parts.setdefault(id(states[param]["step"]), []).append(param)
    found = []
    for params in parts.values():
        absent = [p for p in params if p not in present]
        if len(absent) == len(params):
            continue
        if absent:
            step = states[absent[0]]["step"].clone()
            for param in absent:
                states[param]["step"] = step
        found.append([p for p in params if p in present])
    return found
