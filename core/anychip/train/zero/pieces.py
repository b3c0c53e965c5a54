"""What does this rank update? Its pieces of parameters and gradients, put together for a rule.

With one rank, and in stage 0, a piece is the whole parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anychip.contract import Communicator
from anychip.operators.partials import num_blocks
from anychip.runtime import on_host
from anychip.train.optim import Group, Update
from anychip.train.zero.reducer import Reducer
from anychip.train.zero.shards import Shard, Shards, gather

State = Mapping[Tensor, dict[str, Tensor]]
"""Of each parameter the rule's states by name, and ``step``."""


class Pieces:
    """The pieces of one rank.

    Args:
        reducer: None with one rank: gradients are in ``.grad``.
        shards: None where parameters are whole.
        model_comm, duplicates: as :class:`~anychip.train.zero.Optimizer` has them.
    """

    def __init__(
        self,
        comm: Communicator,
        reducer: Reducer | None,
        shards: Shards | None,
        model_comm: Communicator | None,
        duplicates: Collection[Tensor],
    ) -> None:
        self.comm, self.model_comm, self.duplicates = comm, model_comm, duplicates
        self._reducer, self._shards = reducer, shards

    def shard(self, param: Tensor) -> Shard | None:
        """Which part of a parameter it is; None: the whole."""
        return None if self._shards is None else self._shards.of[param]

    def values(self, param: Tensor) -> Tensor:
        """What this rank updates of a parameter."""
        shard = self.shard(param)
        return param if shard is None else shard.values

    def gradient(self, param: Tensor) -> Tensor:
        """The gradient of what this rank updates."""
        if self._reducer is not None:
            return self._reducer.gradient(param)
        assert param.grad is not None
        return param.grad

    def found_inf(self, present: Iterable[Tensor]) -> bool:
        """Whether any gradient on any rank is not finite; the host waits for the answer."""
        gradients = [self.gradient(param) for param in present]
        found = torch.zeros((), dtype=torch.float32, device=gradients[0].device)
        for gradient in gradients:
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
        order = [param for params, _ in parts for param in params]
        update = Update(groups=[self._part(p, g, states) for p, g in parts], count=count)
        if scale is not None:
            update.scale = torch.full((), scale, device=update.groups[0].step.device)
        if self._shards is not None:
            update.sum_over_shards = self._sum_over_shards
        update.gather_stages = lambda partials: self._gather_stages(partials, order)
        return update

    def _part(self, params: list[Tensor], group: Mapping[str, Any], states: State) -> Group:
        mine = [states[p] for p in params]
        shards = [shard for shard in map(self.shard, params) if shard is not None]
        return Group(
            params=[self.values(p) for p in params],
            grads=[self.gradient(p) for p in params],
            state={name: [s[name] for s in mine] for name in mine[0] if name != "step"},
            step=mine[0]["step"],
            options={k: v for k, v in group.items() if k != "params"},
            spans=[shard.span for shard in shards] if shards else None,
        )

    def _sum_over_shards(self, partials: Tensor) -> Tensor:
        self.comm.all_reduce(partials)
        return partials

    def _gather_stages(self, partials: Tensor, params: Sequence[Tensor]) -> Tensor:
        """The blocks' sums of squares of the whole model, the largest first.

        Sorted, they are added up alike whatever the order of parameters is, and on how many ranks
        they are; blocks of zeros, which come last, change nothing.
        """
        start = 0
        for param in params:
            count = num_blocks(param.numel())
            if param in self.duplicates:
                partials[start : start + count] = 0.0
            start += count
        if self.model_comm is not None:
            partials = gather(partials, self.model_comm)
        return partials.sort(descending=True).values


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
