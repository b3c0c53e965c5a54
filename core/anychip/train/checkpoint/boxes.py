"""Which boxes of a tensor does a rank hold that owns a run of its elements?

A checkpoint describes what it holds by boxes of whole tensors, whatever cut them: a run of the
flattened tensor (ZeRO), or a part of one dim. Who loads at another arrangement asks which boxes
meet its own. Pure functions of numbers.

Source: the boxes of a run as in veScale's RaggedShard and torch.distributed.checkpoint's chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """Some neighbouring elements of a tensor: half-open in each dim, and maybe empty.

    Attributes:
        offsets: of its first element; () in a 0-dim tensor.
        sizes: as many.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements; 1 for the box of a 0-dim tensor."""
        return math.prod(self.sizes)

    def within(self, other: Box) -> tuple[slice, ...]:
        """Its place in a tensor that has the elements of a box around it."""
        return tuple(
            slice(offset - origin, offset - origin + size)
            for offset, origin, size in zip(self.offsets, other.offsets, self.sizes, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """The box of all elements."""
    return Box((0,) * len(shape), tuple(shape))


def intersection(one: Box, other: Box) -> Box:
    """The elements that are in both; where there are none, an empty box."""
    starts = [max(pair) for pair in zip(one.offsets, other.offsets, strict=True)]
    ends = [min(a + m, b + n) for (a, m), (b, n) in zip(_dims(one), _dims(other), strict=True)]
    sizes = [max(0, end - start) for start, end in zip(starts, ends, strict=True)]
    return Box(tuple(starts), tuple(sizes))


def _dims(box: Box) -> Iterable[tuple[int, int]]:
    return zip(box.offsets, box.sizes, strict=True)


def of_run(shape: Sequence[int], offset: int, numel: int) -> list[Box]:
    """The fewest boxes that are the elements [offset, offset + numel) of a flattened tensor.

    In the order of the elements; each is a run by itself. At most 2 d - 1 of them for d dims, 1 for
    none: in each dim but the last a beginning and an end, and in one of them a middle.
    """
    if not numel:
        return []
    if not shape:
        return [Box((), ())]
    inner = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(offset, inner), divmod(offset + numel, inner)
    if first == last:
        return _in_row(first, shape, head, numel)
    found = []
    if head:
        found += _in_row(first, shape, head, inner - head)
        first += 1
    if first < last:
        found.append(Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    return found + _in_row(last, shape, 0, tail)


def _in_row(row: int, shape: Sequence[int], offset: int, numel: int) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in of_run(shape[1:], offset, numel)]


class Overlap(NamedTuple):
    """Elements that a run and a box have in common.

    Attributes:
        start: in the run, of the box of it that they are in.
        sizes: of that box.
        in_run: their place in it.
        in_box: their place in the other box.
    """

    start: int
    sizes: tuple[int, ...]
    in_run: tuple[slice, ...]
    in_box: tuple[slice, ...]


def overlaps(box: Box, shape: Sequence[int], offset: int, numel: int) -> list[Overlap]:
    """Which elements of a run a box holds: one entry for each of the run's boxes that it meets."""
    found, start = [], 0
    for mine in of_run(shape, offset, numel):
        common = intersection(mine, box)
        if common.numel:
            found.append(Overlap(start, mine.sizes, common.within(mine), common.within(box)))
        start += mine.numel
    return found


def tile(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    """Whether boxes have every element of a tensor exactly once."""
    ordered, all_of_it = sorted(boxes), whole(shape)
    if sum(box.numel for box in ordered) != all_of_it.numel:
        return False
    open_ones: list[Box] = []  # those that reach into rows where later ones begin
    for box in ordered:
        if intersection(box, all_of_it) != box:
            return False
        open_ones = [
            o for o in open_ones if not shape or o.offsets[0] + o.sizes[0] > box.offsets[0]
        ]
        if any(intersection(box, other).numel for other in open_ones):
            return False
        open_ones.append(box)
    return True
