"""An update whose tensors are elsewhere: its groups, one chunk on the device after the other."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anychip.train.optim import Group
from anychip.train.optim.rule import num_blocks
from anychip.train.zero.layout import Chunk, Segment
from anychip.train.zero.sharded import Place, ShardedModel
from anychip.train.zero.streaming import Trip
from anychip.train.zero.tiers import Elsewhere, Stored
from anychip.train.zero.weights import FlatWeights

Part = tuple[list[Tensor], Mapping[str, Any]]
"""Parameters that share a step count, and their group's options."""

_Views = Mapping[Stored, tuple[int, Tensor]]
"""Of what is here of each: its first element in what is stored, and its values."""


class ChunkedGroups:
    """The groups of an update; each time they are asked for, they come anew.

    A parameter's elements may come in several groups. What was written into a group is kept when
    the next one is asked for. The step count of a part goes on once, however many groups it has.

    Args:
        parts: what has a gradient, in the order of the optimizer's groups.
        states: of each parameter, with ``step``.
        own: names among the states that the rule is not given.
        blocks: as :class:`~anychip.train.optim.Rule` has them.
        duplicates: parameters that do not count in norms of all.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        parts: Sequence[Part],
        states: Mapping[Tensor, Mapping[str, Tensor]],
        own: Sequence[str],
        blocks: Mapping[str, int],
        duplicates: Collection[Tensor],
    ) -> None:
        assert sharded.tiers is not None
        self._sharded, self._lanes, self._parts = sharded, sharded.tiers.lanes, parts
        self._states, self._own, self._blocks = states, own, blocks
        self._duplicates = duplicates
        self._part_of = {param: n for n, (params, _) in enumerate(parts) for param in params}
        buffers = dict.fromkeys(sharded.places[param].weights for param in self._part_of)
        self._chunks = [
            (weights, number, chunk)
            for weights in buffers
            for number, chunk in enumerate(weights.chunks)
            if any(weights.params[each.number] in self._part_of for each in chunk.segments)
        ]
        self._device = next(iter(self._part_of)).device

    def __iter__(self) -> Iterator[Group]:
        steps = [self._states[params[0]]["step"] for params, _ in self._parts]
        counted: dict[int, Tensor] = {}
        works = [self._work(weights, number, chunk) for weights, number, chunk in self._chunks]
        for place, views in self._bring(works):
            weights, _, chunk = place
            for part, segments in self._by_part(weights, chunk).items():
                counted[part] = steps[part].clone()  # the rule counts in every group
                yield self._group(weights, segments, part, counted[part], views)
            self._write_low(weights, chunk, views)
        for part, (params, _) in enumerate(self._parts):
            if part not in counted:  # this rank has nothing of it, and counts all the same
                counted[part] = steps[part].clone()
                where = self._sharded.places[params[0]]
                empty = Segment(where.index, 0, 0)
                yield self._group(where.weights, [empty], part, counted[part], {})
            steps[part].copy_(counted[part])

    def gradients(self) -> Iterator[Group]:
        """All chunks, with gradients and nothing else; of no chunk, one without elements."""
        works = [
            Trip(number, [g.stored for g in self._gradients_of(w, c)[:1]], ())
            for w, number, c in self._chunks
        ]
        seen = set[int]()
        for (weights, _, chunk), views in self._bring(works):
            for part, segments in self._by_part(weights, chunk).items():
                seen.add(part)
                yield self._group(weights, segments, part, None, views)
        for part, (params, _) in enumerate(self._parts):
            if part not in seen:
                where = self._sharded.places[params[0]]
                yield self._group(where.weights, [Segment(where.index, 0, 0)], part, None, {})

    def _bring(
        self, works: Sequence[Trip]
    ) -> Iterator[tuple[tuple[FlatWeights, int, Chunk], _Views]]:
        for place, views in zip(self._chunks, self._lanes.stream(works, self._device), strict=True):
            number = place[1]
            yield place, {each: (each.records[number][0], v) for each, v in views.items()}

    def _gradients_of(self, weights: FlatWeights, chunk: Chunk) -> list[Elsewhere]:
        places = [self._sharded.places[weights.params[each.number]] for each in chunk.segments]
        found = [p.gradients.gradient(p.index) for p in places if p.gradients is not None]
        return [each for each in found if isinstance(each, Elsewhere)]

    def _work(self, weights: FlatWeights, number: int, chunk: Chunk) -> Trip:
        params = [weights.params[each.number] for each in chunk.segments]
        kept: list[Any] = [weights.values[each.number] for each in chunk.segments]
        kept += [t for param in params for n, t in self._states[param].items() if n != "step"]
        saves = dict.fromkeys(each.stored for each in kept if isinstance(each, Elsewhere))
        loads = [*saves, *dict.fromkeys(g.stored for g in self._gradients_of(weights, chunk))]
        low = [weights.low.stored] if isinstance(weights.low, Elsewhere) else []
        return Trip(number, loads, [*saves, *low])

    def _by_part(self, weights: FlatWeights, chunk: Chunk) -> dict[int, list[Segment]]:
        found: dict[int, list[Segment]] = {}
        for each in chunk.segments:
            part = self._part_of.get(weights.params[each.number])
            if part is not None:
                found.setdefault(part, []).append(each)
        return found

    def _group(
        self, weights: FlatWeights, segments: Sequence[Segment], part: int, step: Tensor | None,
        views: _Views,
    ) -> Group:  # fmt: skip
        """With a step count of its own what is updated; without one gradients alone."""
        params = [weights.params[each.number] for each in segments]
        states = self._states[params[0]] if step is not None else ()
        names = [n for n in states if n not in ("step", *self._own)]
        given = list(zip(segments, params, strict=True))
        state = {
            name: [self._view(self._states[p][name], s, views, self._blocks.get(name, 1))
                   for s, p in given]
            for name in names
        }  # fmt: skip
        updated = segments if step is not None else ()
        first, options = self._parts[part][0][0], self._parts[part][1]
        return Group(
            params=[self._view(weights.values[s.number], s, views) for s in updated],
            grads=[self._gradient(self._sharded.places[p], s, views) for s, p in given],
            state=state,
            step=self._states[first]["step"] if step is None else step,
            options={name: value for name, value in options.items() if name != "params"},
            counts=[param not in self._duplicates for param in params],
        )

    def _gradient(self, place: Place, segment: Segment, views: _Views) -> Tensor:
        assert place.gradients is not None
        return self._view(place.gradients.gradient(place.index), segment, views)

    def _view(self, whole: Tensor, segment: Segment, views: _Views, block: int = 1) -> Tensor:
        start, numel = segment.start // block, num_blocks(segment.numel, block)
        if not isinstance(whole, Elsewhere):
            return whole.detach().view(-1)[start : start + numel]
        if not numel:
            return torch.empty(0, dtype=whole.dtype, device=self._device)
        first, here = views[whole.stored]
        return here[whole.start + start - first :][:numel]

    def _write_low(self, weights: FlatWeights, chunk: Chunk, views: _Views) -> None:
        """The 16-bit copy of masters that are elsewhere."""
        if weights.low is None:
            return
        own = weights.values[0]
        assert isinstance(own, Elsewhere)
        low = weights.low
        if isinstance(low, Elsewhere):
            target = views[low.stored][1]
        else:
            target = low[chunk.start : chunk.stop]
        target.copy_(views[own.stored][1])
