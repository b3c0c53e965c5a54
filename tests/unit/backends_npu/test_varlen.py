"""The rows of packed sequences: which of them the kernel gets."""

from typing import Any

import pytest
import torch

from anychip_npu import varlen


@pytest.mark.parametrize(("ends", "causal", "wanted"), [
    (([0], [0]), True, []),
    (([0, 0], [0, 0]), True, []),
    (([0, 3, 3, 8], [0, 3, 3, 8]), True, [((0, 3), (0, 3)), ((3, 8), (3, 8))]),
    (([0, 3, 5, 9], [0, 0, 7, 8]), False, [((3, 5), (0, 7)), ((5, 9), (7, 8))]),
    (([0, 3, 5, 9], [0, 0, 7, 8]), True, [((3, 5), (0, 7)), ((8, 9), (7, 8))]),
], ids=["none", "empty", "one between", "other keys", "blind queries"])  # fmt: skip
def test_rows_that_see_nothing_and_are_not_seen_are_left_out(
    ends: tuple[list[int], list[int]], causal: bool, wanted: list[Any]
) -> None:
    own, seen = varlen.seeing(*map(torch.tensor, ends), causal)
    assert list(zip(own.ranges, seen.ranges, strict=True)) == wanted


def test_rows_are_cut_out_and_put_back() -> None:
    x = torch.arange(1.0, 11.0)[:, None]
    for ranges in ([(0, 10)], [(0, 4), (4, 9)], [(2, 3), (3, 5), (7, 10)], [(1, 2), (9, 10)]):
        rows, wanted = varlen.Rows(ranges), torch.full_like(x, -1.0)
        for start, end in ranges:
            wanted[start:end] = x[start:end]
        cut = rows.of(x)
        assert cut.equal(torch.cat([x[a:b] for a, b in ranges]))
        assert rows.ends()[-1] == len(cut)
        assert rows.back(cut, 10, -1.0).equal(wanted)
