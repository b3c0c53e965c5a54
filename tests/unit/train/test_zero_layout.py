"""The layout: every element exactly once, in whole granules, in equal parts with few gaps."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anychip.train.zero import layout

GRANULE = 64
NUMELS = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 600)), max_size=12)
WORLDS = st.integers(1, 9)


@given(numels=NUMELS, world_size=WORLDS)
@example(numels=[], world_size=3)
@example(numels=[0], world_size=2)
@example(numels=[1], world_size=8)
@example(numels=[0, 1, 0, 1000], world_size=4)
@example(numels=[65, 65, 65], world_size=3)
def test_plan_gives_every_element_to_exactly_one_rank(numels: list[int], world_size: int) -> None:
    made = layout.plan(numels, world_size, GRANULE)
    buffer: list[object] = [None] * made.numel
    for index, numel in enumerate(numels):
        owners: list[list[int]] = [[] for _ in range(numel)]
        for rank in range(world_size):
            piece, part = made.piece(index, rank), made.part(rank)
            assert piece.offset % GRANULE == 0
            assert 0 <= piece.start <= piece.start + piece.numel <= part.stop - part.start
            for element in range(piece.numel):
                owners[piece.offset + element].append(rank)
                place = part.start + piece.start + element
                assert buffer[place] is None
                buffer[place] = (index, piece.offset + element)
        assert all(len(ranks) == 1 for ranks in owners)
        assert made.starts[index] % layout.ALIGNMENT == 0
    found = [content for content in buffer if content is not None]
    assert found == [(i, e) for i, numel in enumerate(numels) for e in range(numel)]
    gaps = {element for gap in made.gaps() for element in range(gap.start, gap.stop)}
    assert gaps == {place for place, content in enumerate(buffer) if content is None}


@given(numels=NUMELS, world_size=WORLDS)
@example(numels=[65, 65, 65], world_size=3)
def test_gaps_are_an_alignment_per_parameter_and_two_granules_per_rank(
    numels: list[int], world_size: int
) -> None:
    made = layout.plan(numels, world_size, GRANULE)
    most = (layout.ALIGNMENT - 1) * len(numels) + (2 * GRANULE * world_size if numels else 0)
    assert made.numel - sum(numels) <= most
    assert made.part_numel % GRANULE == 0 or world_size == 1


def test_parts_of_a_large_buffer_for_many_ranks_are_within_two_granules_of_a_share() -> None:
    numels = [50257 * 768, 768, 3072 * 768, 3072]
    assert 0 <= layout.plan(numels, 512).part_numel - sum(numels) / 512 <= 2 * layout.BLOCK


@pytest.mark.parametrize(("numels", "max_numel", "want"), [
    ([5, 5, 5], 10, [[2, 1], [0]]), ([5, 50, 5], 10, [[2], [1], [0]]),
    ([0, 10, 0], 10, [[2, 1, 0]]), ([], 10, []),
], ids=["fills", "larger-than-a-buffer", "empty-parameters", "none"])  # fmt: skip
def test_by_size_goes_from_the_last_parameter_to_the_first(
    numels: list[int], max_numel: int, want: list[list[int]]
) -> None:
    assert layout.by_size(numels, max_numel) == want


@pytest.mark.parametrize("world_size", [1, 8, 32, 64, 512])
def test_gaps_of_a_buffer_of_the_default_size_are_below_3_percent(world_size: int) -> None:
    numel = layout.default_nbytes(world_size) // 4
    rows = [numel // 7 - 5] * 7
    assert layout.default_nbytes(world_size) >= 8 << 20
    assert layout.plan(rows, world_size).numel <= 1.03 * sum(rows)
