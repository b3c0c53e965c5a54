"""The partition: every element exactly once, in whole blocks, in parts as equal as can be."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anychip.train.zero import partition

BLOCK = 32
NUMELS = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 300)), max_size=12)
WORLDS = st.integers(1, 9)


@given(numels=NUMELS, world_size=WORLDS, max_numel=st.integers(1, 500))
@example(numels=[], world_size=3, max_numel=10)
@example(numels=[0], world_size=2, max_numel=10)
@example(numels=[1], world_size=8, max_numel=10)
@example(numels=[0, 1, 0, 1000], world_size=4, max_numel=10)
def test_plan_gives_every_element_to_exactly_one_rank(
    numels: list[int], world_size: int, max_numel: int
) -> None:
    layouts = partition.plan(numels, world_size, max_numel=max_numel, block=BLOCK)
    owners: list[list[list[int]]] = [[[] for _ in range(numel)] for numel in numels]
    for layout in layouts:
        buffer: list[object] = [None] * layout.numel
        for position, index in enumerate(layout.members):
            for rank in range(world_size):
                piece = layout.piece(position, rank)
                part = layout.part(rank)
                assert part.start <= piece.start <= piece.start + piece.numel <= part.stop
                for element in range(piece.numel):
                    owners[index][piece.offset + element].append(rank)
                    assert buffer[piece.start + element] is None
                    buffer[piece.start + element] = (index, piece.offset + element)
        gaps = {element for gap in layout.gaps() for element in range(gap.start, gap.stop)}
        assert gaps == {place for place, content in enumerate(buffer) if content is None}
        found = [content for content in buffer if content is not None]
        assert found == [(i, e) for i in layout.members for e in range(numels[i])]
        assert all(start % partition.ALIGNMENT == 0 for start in layout.starts)
        assert len(gaps) <= (partition.ALIGNMENT - 1) * len(layout.members)
        assert max(layout.sizes) - min(layout.sizes) <= BLOCK
    assert all(len(ranks) == 1 for elements in owners for ranks in elements)
    assert [i for layout in layouts for i in layout.members] == [*reversed(range(len(numels)))]
    for layout in layouts:
        assert sum(layout.numels) <= max_numel or sum(n > 0 for n in layout.numels) == 1


@given(numels=NUMELS, world_size=WORLDS)
@example(numels=[1] * 12, world_size=5)
@example(numels=[32, 1, 1, 32, 1, 32], world_size=3)
def test_cut_lies_between_blocks_and_parts_differ_by_at_most_one(
    numels: list[int], world_size: int
) -> None:
    cuts = partition.cut(numels, world_size, BLOCK)
    parts = [end - start for start, end in pairwise(cuts)]
    assert len(parts) == world_size
    assert sum(parts) == sum(numels)
    assert min(parts) >= 0
    assert max(parts) - min(parts) <= BLOCK
    allowed, start = {0}, 0
    for numel in numels:
        allowed |= {start + element for element in range(0, numel, BLOCK)} | {start + numel}
        start += numel
    assert set(cuts) <= allowed


@given(numels=st.lists(st.integers(1, 120), min_size=1, max_size=5), world_size=st.integers(1, 4))
def test_cut_has_the_largest_smallest_part_that_any_partition_has(
    numels: list[int], world_size: int
) -> None:
    ends = [0]
    for numel in numels:
        start = ends[-1]
        ends += [min(start + step, start + numel) for step in range(BLOCK, numel + BLOCK, BLOCK)]

    def best(first: int, parts: int) -> int:
        if parts == 1:
            return ends[-1] - ends[first]
        return max(
            min(ends[end] - ends[first], best(end, parts - 1)) for end in range(first, len(ends))
        )

    cuts = partition.cut(numels, world_size, BLOCK)
    smallest = min(end - start for start, end in pairwise(cuts))
    assert smallest == best(0, world_size)


@pytest.mark.parametrize(("numels", "max_numel", "want"), [
    ([5, 5, 5], 10, [[2, 1], [0]]), ([5, 50, 5], 10, [[2], [1], [0]]),
    ([0, 10, 0], 10, [[2, 1, 0]]), ([], 10, []),
], ids=["fills", "larger-than-a-bucket", "empty-parameters", "none"])  # fmt: skip
def test_fill_goes_from_the_last_parameter_to_the_first(
    numels: list[int], max_numel: int, want: list[list[int]]
) -> None:
    assert partition.fill(numels, max_numel) == want


def test_cut_of_a_large_bucket_for_many_ranks_is_even() -> None:
    numels = [50257 * 768, 768, 3072 * 768, 3072]
    cuts = partition.cut(numels, 512)
    parts = [end - start for start, end in pairwise(cuts)]
    assert max(parts) - min(parts) <= partition.BLOCK
