"""Boxes: every element of a run exactly once, whatever the shape; numpy says which those are."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anychip.train.checkpoint import boxes
from anychip.train.checkpoint.boxes import Box

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A shape, and a run of the flattened tensor."""
    shape = draw(SHAPES)
    ends = sorted(draw(st.lists(st.integers(0, math.prod(shape)), min_size=2, max_size=2)))
    return shape, ends[0], ends[1] - ends[0]


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    pairs = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs))


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


def elements(box: Box, shape: tuple[int, ...]) -> list[int]:
    return [int(n) for n in numbered(shape)[box.within(boxes.whole(shape))].reshape(-1)]


@given(run=runs())
@example(run=((), 0, 1))
@example(run=((), 0, 0))
@example(run=((3, 0, 2), 0, 0))
@example(run=((5, 5, 5), 31, 63))
@example(run=((1, 1, 1), 0, 1))
@example(run=((7,), 2, 4))
def test_boxes_of_a_run_are_its_elements_in_order_and_few(
    run: tuple[tuple[int, ...], int, int],
) -> None:
    shape, offset, numel = run
    found = boxes.of_run(shape, offset, numel)
    assert [n for box in found for n in elements(box, shape)] == [*range(offset, offset + numel)]
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel for box in found)


def test_boxes_of_a_run_through_a_matrix_are_its_first_row_the_middle_and_the_last() -> None:
    want = [Box((1, 3), (1, 2)), Box((2, 0), (3, 5)), Box((5, 0), (1, 1))]
    assert boxes.of_run((9, 5), 8, 18) == want


@given(data=st.data(), shape=SHAPES)
def test_intersection_is_what_numpy_finds_in_both(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    one, other = data.draw(boxes_of(shape)), data.draw(boxes_of(shape))
    both = set(elements(one, shape)) & set(elements(other, shape))
    assert set(elements(boxes.intersection(one, other), shape)) == both


@given(data=st.data(), run=runs())
def test_overlaps_copy_exactly_the_elements_that_a_box_and_a_run_share(
    data: st.DataObject, run: tuple[tuple[int, ...], int, int]
) -> None:
    shape, offset, numel = run
    box = data.draw(boxes_of(shape))
    held = numbered(shape)[box.within(boxes.whole(shape))]
    got = np.full(numel, -1)
    for start, sizes, in_run, in_box in boxes.overlaps(box, shape, offset, numel):
        assert (got[start : start + math.prod(sizes)].reshape(sizes)[in_run] == -1).all()
        got[start : start + math.prod(sizes)].reshape(sizes)[in_run] = held[in_box]
    mine = set(elements(box, shape))
    assert [*got] == [n if n in mine else -1 for n in range(offset, offset + numel)]


@given(data=st.data(), shape=SHAPES)
def test_runs_that_follow_each_other_tile_and_others_do_not(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    count = math.prod(shape)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, count), max_size=5))), count]
    found = [box for a, b in itertools.pairwise(cuts) for box in boxes.of_run(shape, a, b - a)]
    assert boxes.tile(found, shape)
    if found:
        assert not boxes.tile(found[1:], shape)
        assert not boxes.tile([*found, found[-1]], shape)


@pytest.mark.parametrize(("found", "shape"), [
    ([Box((0, 0), (2, 2)), Box((0, 1), (2, 2))], (4, 2)),  # leaves the tensor, with the right count
    ([Box((0, 0), (2, 2)), Box((1, 0), (2, 2))], (4, 2)),  # overlaps, with the right count
    ([Box((0, 0), (3, 1)), Box((1, 0), (1, 2)), Box((2, 1), (1, 1))], (3, 2)),
    ([Box((), ()), Box((), ())], ()),
], ids=["outside", "overlapping", "crossing", "twice"])  # fmt: skip
def test_boxes_that_do_not_tile_are_found(found: list[Box], shape: tuple[int, ...]) -> None:
    assert not boxes.tile(found, shape)
