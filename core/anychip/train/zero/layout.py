"""Where do parameters lie in a flat buffer, and which part of it does each rank own?

Pure functions of numbers. A buffer holds parameters flattened, one after the other, and is cut into
as many equal parts as there are ranks: a part is gathered and scattered in place, without copies or
lists of sizes. A cut through a parameter lies between *granules* of it, so that a part is a range
of whole granules of each parameter: of the blocks of 8-bit states. What does not fit moves on by a
gap, which belongs to nobody and stays zero: less than a granule per cut. And each parameter begins
at a multiple of ``ALIGNMENT`` elements: kernels are faster on aligned tensors, and some give
other bits on others.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5 (the partition); cuts between granules
as in veScale's RaggedShard.
"""

from collections.abc import Sequence
from typing import NamedTuple

from anychip.train.optim.rule import BLOCK

ALIGNMENT = 32
"""Elements: 64 bytes of 16-bit numbers, as an allocator aligns. A divisor of the granule."""


class Piece(NamedTuple):
    """What a rank owns of a parameter.

    Attributes:
        offset: its first element in the flattened parameter, a multiple of the granule.
        numel: elements; 0 when the rank owns none, with offset 0.
        start: its first element in the rank's part.
    """

    offset: int
    numel: int
    start: int


class ShardMetadata(NamedTuple):
    """Where a rank's piece lies in its whole parameter.

    Attributes:
        offset: index of its first element in the flattened whole.
        size: elements of the whole.
    """

    offset: int
    size: int


class Layout(NamedTuple):
    """How parameters lie in a buffer.

    Attributes:
        starts: of each parameter in the buffer.
        numels: of each parameter, without the gap up to the next one.
        part_numel: elements of each rank's part, gaps included.
        world_size: number of parts.
    """

    starts: tuple[int, ...]
    numels: tuple[int, ...]
    part_numel: int
    world_size: int

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return self.part_numel * self.world_size

    def part(self, rank: int) -> slice:
        """The rank's part of the buffer."""
        return slice(rank * self.part_numel, (rank + 1) * self.part_numel)

    def place(self, index: int) -> slice:
        """Of a parameter in the buffer."""
        return slice(self.starts[index], self.starts[index] + self.numels[index])

    def gaps(self) -> list[slice]:
        """What belongs to no parameter, and is zero wherever it is sent."""
        places = [self.place(index) for index in range(len(self.starts))]
        ends = [0, *(place.stop for place in places)]
        return [slice(a, b) for a, b in zip(ends, [*self.starts, self.numel], strict=True) if a < b]

    def piece(self, index: int, rank: int) -> Piece:
        """What a rank owns of a parameter."""
        part, place = self.part(rank), self.place(index)
        start, end = max(part.start, place.start), min(part.stop, place.stop)
        if end <= start:
            return Piece(0, 0, 0)
        return Piece(start - place.start, end - start, start - part.start)


def plan(
    numels: Sequence[int], world_size: int, granule: int = BLOCK, alignment: int = ALIGNMENT
) -> Layout:
    """Parameters in their order, in the smallest equal parts that can be.

    Args:
        numels: elements of each parameter.
        granule: elements; a multiple of ``alignment``.
        alignment: elements, of which the start of each parameter is a multiple.
    """
    rooms = [-(-numel // alignment) * alignment for numel in numels]
    room = sum(rooms)
    if world_size == 1:
        return Layout(_starts(numels, rooms, room, granule)[0], tuple(numels), room, 1)
    part = -(-room // (world_size * granule)) * granule
    while True:  # at most twice: gaps take less than a granule per cut
        starts, end = _starts(numels, rooms, part, granule)
        if end <= part * world_size:
            return Layout(starts, tuple(numels), part, world_size)
        part += granule


def _starts(
    numels: Sequence[int], rooms: Sequence[int], part: int, granule: int
) -> tuple[tuple[int, ...], int]:
    """Of each parameter, the first place where no cut goes through a granule; and the end."""
    found, end = [], 0
    for numel, room in zip(numels, rooms, strict=True):
        start = end
        cut = -(-start // part) * part if part else 0
        if start < cut < start + numel:
            start += (cut - start) % granule
        found.append(start)
        end = start + room
    return tuple(found), end


class Segment(NamedTuple):
    """Some elements of a rank's piece of a parameter.

    Attributes:
        number: of the parameter.
        start: of the first one in the piece, a multiple of the granule.
        numel: elements.
    """

    number: int
    start: int
    numel: int


class Chunk(NamedTuple):
    """What is moved and updated together: a range of a rank's part, gaps included."""

    start: int
    stop: int
    segments: tuple[Segment, ...]


def chunks(
    pieces: Sequence[Piece], part_numel: int, max_numel: int, granule: int = BLOCK
) -> list[Chunk]:
    """A part, in ranges of about ``max_numel`` elements; cuts in pieces are between granules."""
    found: list[list[Segment]] = [[]]
    starts = [0]
    for index, piece in enumerate(pieces):
        at = 0
        while at < piece.numel:
            place, left = piece.start + at, piece.numel - at
            room = max_numel - (place - starts[-1])
            count = left if left <= room else room // granule * granule
            if count < 1 and found[-1]:
                found.append([])
                starts.append(place)
                continue
            count = max(count, min(left, granule))
            found[-1].append(Segment(index, at, count))
            at += count
    ranges = zip(starts, [*starts[1:], part_numel], found, strict=True)
    return [Chunk(start, stop, tuple(segments)) for start, stop, segments in ranges]


def by_size(numels: Sequence[int], max_numel: int) -> list[list[int]]:
    """Indices from the last to the first, in runs of at most ``max_numel`` elements.

    About the order in which backward reaches them. A parameter that is larger has its own run.
    """
    runs: list[list[int]] = []
    room = -1
    for index in reversed(range(len(numels))):
        if numels[index] > room:
            runs.append([])
            room = max_numel
        runs[-1].append(index)
        room -= numels[index]
    return runs


def default_nbytes(world_size: int) -> int:
    """Of float32 gradients that are sent together.

    Large enough for full bandwidth, small enough that the last ones, which nothing hides, are soon
    over; and 64 granules per rank at least, so that gaps are a few percent.
    """
    return max(8 << 20, 64 * BLOCK * 4 * world_size)
