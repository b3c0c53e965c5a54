"""The ends of packed sequences: what is read of them, and how often."""

from __future__ import annotations

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


def test_ends_of_one_tensor_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read = varlen._read
    monkeypatch.setattr(varlen, "_read", lambda t: reads.append(1) or read(t))
    cu_seqlens = torch.tensor([0, 3, 8])

    assert [varlen.ends(cu_seqlens) for _ in range(3)] == [[3, 8]] * 3
    assert len(reads) == 1


def test_ends_after_a_write_are_read_again() -> None:
    cu_seqlens = torch.tensor([0, 3, 8])
    varlen.ends(cu_seqlens)

    cu_seqlens[1] = 5

    assert varlen.ends(cu_seqlens) == [5, 8]


def test_ends_of_another_part_of_the_memory_are_its_own() -> None:
    memory = torch.tensor([0, 2, 0, 7])

    assert varlen.ends(memory[:2]) == [2]
    assert varlen.ends(memory[2:]) == [7]


def test_ends_in_inference_mode_follow_the_values() -> None:
    with torch.inference_mode():
        cu_seqlens = torch.tensor([0, 3])
        assert varlen.ends(cu_seqlens) == [3]
        cu_seqlens[1] = 4
        assert varlen.ends(cu_seqlens) == [4]
