"""The ends of packed sequences: what is read of them."""

import pytest
import torch

from anychip_npu import varlen


@pytest.mark.parametrize(
    ("cu_seqlens", "wanted"),
    [([0], []), ([0, 0], []), ([0, 3, 3, 8], [3, 8]), ([0, 0, 4, 4], [4]), ([0, 5], [5])],
    ids=["none", "empty", "one between", "around", "one"],
)
def test_ends_leave_empty_sequences_out(cu_seqlens: list[int], wanted: list[int]) -> None:
    assert varlen.ends(torch.tensor(cu_seqlens)) == wanted
