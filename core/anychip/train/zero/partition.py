"""Which elements does each rank own? Buckets of parameters, each cut among the ranks.

Pure functions of numbers. A bucket is a run of parameters whose gradients are sent together; its
buffer holds them flattened, one after the other, and is cut into one part per rank. Cuts lie
between blocks of the grid on which norms are measured (:mod:`anychip.operators.partials`), so that
a part is a range of whole blocks of each parameter. Parts are not padded to one size: they differ,
by one block at most. But each parameter begins at a multiple of ``ALIGNMENT`` elements: kernels are
faster on aligned tensors, and some give other bits on others.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5 (the partition). That contiguous parts
within one block of each other always exist: Barany and Grinberg 2013, arXiv:1308.2452.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from anychip.operators.partials import BLOCK

ALIGNMENT = 16
"""Elements: 64 bytes of float32, as an allocator aligns. A divisor of the grid's block."""


class Piece(NamedTuple):
    """What a rank owns of a parameter.

    Attributes:
        offset: its first element in the flattened parameter, a multiple of the block.
        numel: elements; 0 when the rank owns none, with offset 0.
        start: its first element in the bucket's buffer.
    """

    offset: int
    numel: int
    start: int


class Layout(NamedTuple):
    """How a bucket lies in its buffer.

    Attributes:
        members: indices of its parameters, in the order of the buffer.
        starts: of each member in the buffer.
        numels: of each member, without the gap up to the next one.
        sizes: elements of each rank's part, in rank order, gaps included.
    """

    members: tuple[int, ...]
    starts: tuple[int, ...]
    numels: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return sum(self.sizes)

    def part(self, rank: int) -> slice:
        """The rank's part of the buffer."""
        start = sum(self.sizes[:rank])
        return slice(start, start + self.sizes[rank])

    def gaps(self) -> list[slice]:
        """What belongs to no member, and is zero wherever it is sent."""
        ends = [start + numel for start, numel in zip(self.starts, self.numels, strict=True)]
        followers = (*self.starts[1:], self.numel)
        return [slice(a, b) for a, b in zip(ends, followers, strict=True) if a < b]

    def piece(self, position: int, rank: int) -> Piece:
        """What a rank owns of the member at a position."""
        part, begin = self.part(rank), self.starts[position]
        start, end = max(part.start, begin), min(part.stop, begin + self.numels[position])
        return Piece(start - begin, end - start, start) if end > start else Piece(0, 0, part.start)


def plan(
    numels: Sequence[int], world_size: int, *, max_numel: int, block: int = BLOCK
) -> list[Layout]:
    """Buckets of parameters in reverse order: about the order in which backward reaches them.

    Args:
        numels: elements of each parameter, in order of registration.
        max_numel: of a bucket; a larger parameter has a bucket of its own.
    """
    layouts = []
    for members in fill(numels, max_numel):
        sizes = [numels[index] for index in members]
        room = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        starts = (0, *accumulate(room))[:-1]
        cuts = cut(room, world_size, block)
        parts = tuple(end - start for start, end in pairwise(cuts))
        layouts.append(Layout(tuple(members), starts, tuple(sizes), parts))
    return layouts


def fill(numels: Sequence[int], max_numel: int) -> list[list[int]]:
    """Indices from the last to the first, in runs of at most ``max_numel`` elements."""
    runs: list[list[int]] = []
    room = -1
    for index in reversed(range(len(numels))):
        if numels[index] > room:
            runs.append([])
            room = max_numel
        runs[-1].append(index)
        room -= numels[index]
    return runs


def cut(numels: Sequence[int], world_size: int, block: int = BLOCK) -> list[int]:
    """Where a buffer is cut: ``world_size + 1`` elements' numbers, from 0 to its end.

    Every cut lies between blocks, and no part is larger than another by more than a block: among
    the partitions whose smallest part is as large as can be, there is one in which none exceeds it
    by more. (Parts that end as early as they may, for a smallest part that is larger by one, do
    not come to the end; so parts that end as late as they may reach it.)
    """
    ends = _block_ends(numels, block)
    low, high = 0, ends[-1] // world_size
    while low < high:
        middle = (low + high + 1) // 2
        if _earliest(ends, world_size, middle) is None:
            high = middle - 1
        else:
            low = middle
    earliest = _earliest(ends, world_size, low)
    assert earliest is not None
    latest = _latest(ends, world_size, low + block)
    return _join(ends, earliest, latest, low, low + block)


def _block_ends(numels: Sequence[int], block: int) -> list[int]:
    """0, and the end of each block in the buffer."""
    ends, start = [0], 0
    for numel in numels:
        ends.extend(range(start + block, start + numel, block))
        start += numel
        if numel:
            ends.append(start)
    return ends


def _earliest(ends: Sequence[int], world_size: int, least: int) -> list[int] | None:
    """Numbers of the first ends at which 0, 1, ... parts of ``least`` or more can be over."""
    found = [0]
    for _ in range(world_size):
        found.append(bisect_left(ends, ends[found[-1]] + least))
        if found[-1] == len(ends):
            return None
    return found


def _latest(ends: Sequence[int], world_size: int, most: int) -> list[int]:
    """Numbers of the last ends that 0, 1, ... parts of ``most`` or less can reach."""
    found = [0]
    for _ in range(world_size):
        found.append(bisect_right(ends, ends[found[-1]] + most) - 1)
    return found


def _join(
    ends: Sequence[int], earliest: Sequence[int], latest: Sequence[int], least: int, most: int
) -> list[int]:
    """From the end back: parts of ``least`` to ``most`` elements, near to equal shares."""
    parts = len(earliest) - 1
    cuts = [ends[-1]]
    for number in range(parts - 1, 0, -1):
        first = max(earliest[number], bisect_left(ends, cuts[-1] - most))
        last = min(latest[number], bisect_right(ends, cuts[-1] - least) - 1)
        share = bisect_left(ends, ends[-1] * number // parts)
        cuts.append(ends[min(max(share, first), last)])
    return [0, *reversed(cuts)]
