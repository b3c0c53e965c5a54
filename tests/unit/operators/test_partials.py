"""Partial sums on the grid: the same norm, bit for bit, from whole tensors and from any shards."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anychip
from anychip import ops
from anychip.operators.lamb import trust_ratios
from anychip.operators.partials import BLOCK, sum_in_pairs
from tests.unit.dispatch.calls import bits


def in_pairs(values: Sequence[np.float32]) -> np.float32:
    """The definition: zeros up to a power of two; first half plus second half."""
    line = list(values)
    while len(line) & (len(line) - 1) or not line:
        line.append(np.float32(0.0))
    while len(line) > 1:
        half = len(line) // 2
        line = [a + b for a, b in zip(line[:half], line[half:], strict=True)]
    return line[0]


@settings(max_examples=60)
@given(numels=st.lists(st.integers(0, 70), min_size=1, max_size=4), log=st.integers(0, 6))
def test_partials_have_the_bits_of_the_definition(numels: list[int], log: int) -> None:
    block, generator = 1 << log, torch.Generator().manual_seed(log)
    tensors = [torch.randn(n, generator=generator) for n in numels]
    want = []
    for tensor in tensors:
        squares = tensor.numpy() ** 2
        for start in range(0, len(squares), block):
            part = list(squares[start : start + block])
            want.append(in_pairs(part + [np.float32(0.0)] * (block - len(part))))
    for pinned in ("cpu", "reference"):
        with anychip.policy(pin={"l2_norm_partials": pinned}):
            got = ops.l2_norm_partials(tensors, block=block)
        assert got.numpy().tobytes() == np.array(want, dtype=np.float32).tobytes()
    total = float(sum_in_pairs(got))
    assert total == float(in_pairs(list(got.numpy())))


def cuts(numel: int, block: int, places: Sequence[float]) -> list[tuple[int, int]]:
    """Ranges of whole blocks that cover a tensor; some may be empty."""
    ends = sorted(min(round(p * -(-numel // block)) * block, numel) for p in places)
    edges = [0, *ends, numel]
    return list(itertools.pairwise(edges))


@settings(max_examples=60)
@given(
    numels=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    places=st.lists(st.floats(0.0, 1.0), max_size=7),
    log=st.integers(2, 6),
)
def test_shards_of_any_cut_add_up_to_the_partials_of_the_whole(
    numels: list[int], places: list[float], log: int
) -> None:
    block, generator = 1 << log, torch.Generator().manual_seed(len(places))
    tensors = [torch.randn(n, generator=generator) for n in numels]
    want = ops.l2_norm_partials(tensors, block=block)
    layout = [cuts(n, block, places) for n in numels]
    found = []
    for rank in range(len(places) + 1):
        spans = [ranges[rank] for ranges in layout]
        # A shard that holds nothing may say that it begins anywhere on the grid.
        offsets = [0 if a == b else a for a, b in spans]
        shards = [t[a:b] for t, (a, b) in zip(tensors, spans, strict=True)]
        part = ops.l2_norm_partials(shards, offsets=offsets, sizes=numels, block=block)
        assert part.shape == want.shape
        found.append(part)
    # In another order than that of the ranks, as a ring adds.
    total = torch.zeros_like(want)
    for part in reversed(found):
        total += part
    assert bits(total) == bits(want)


def test_partials_do_not_depend_on_layout_threads_or_implementation() -> None:
    x = torch.randn(300, 411, generator=torch.Generator().manual_seed(2))
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            for pinned in ("cpu", "reference"):
                with anychip.policy(pin={"l2_norm_partials": pinned}):
                    found.append(bits(ops.l2_norm_partials([x])))
                    found.append(bits(ops.l2_norm_partials([x.t().contiguous().t()])))
    finally:
        torch.set_num_threads(threads)
    assert all(one == found[0] for one in found)


def test_sum_in_pairs_of_nothing_is_zero() -> None:
    assert sum_in_pairs(torch.zeros(0)).item() == 0.0
    assert sum_in_pairs(torch.zeros(2, 0)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("attrs", "message"), [
    ({"offsets": [3]}, r"tensor 0: a range of whole blocks of 8 .* got elements 3 to 23 of 23"),
    ({"offsets": [8], "sizes": [20]}, "got elements 8 to 28 of 20"),
    ({"offsets": [0], "sizes": [40]}, "got elements 0 to 20 of 40"),
    ({"offsets": [-8]}, "got elements -8 to 12 of 12"),
    ({"offsets": [0, 8]}, r"offsets must be as long as the tensors \(1\), got 2"),
    ({"sizes": []}, r"sizes must be as long as the tensors \(1\), got 0"),
    ({"block": 12}, "block must be a power of two, got 12"),
], ids=["start", "past-the-end", "end", "negative", "offsets", "sizes", "block"])  # fmt: skip
def test_shards_that_are_not_on_the_grid_are_refused(
    attrs: dict[str, list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ops.l2_norm_partials([torch.ones(20)], **{"block": 8, **attrs})  # type: ignore[arg-type]


def test_partials_of_no_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one tensor expected, got none"):
        ops.l2_norm_partials([])


# lamb


def test_trust_ratio_is_one_where_a_norm_is_zero() -> None:
    partials = torch.tensor([[4.0, 0.0, 16.0, 0.0, 9.0], [1.0, 4.0, 0.0, 0.0, 1.0]])
    assert trust_ratios(partials, [1, 1, 1, 1, 1]).tolist() == [2.0, 1.0, 1.0, 1.0, 3.0]
    two_blocks = torch.tensor([[4.0, 5.0, 0.0], [1.0, 0.0, 7.0]])
    assert trust_ratios(two_blocks, [BLOCK + 1, 1]).tolist() == [3.0, 1.0]
