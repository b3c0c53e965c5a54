"""gather_objects: what every rank gets, in which messages."""

from collections import Counter
from typing import Any

import pytest
import torch

from anychip.comm import alone, gather_objects, objects
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator

PIECE = 64
"""Bytes; none of the sizes below is a multiple of it."""


def value_of(rank: int) -> dict[str, Any]:
    shared = torch.full((), 7.0 + rank)
    return {
        "float32": torch.arange(50.0) * (rank + 1),
        "bfloat16": torch.arange(41).to(torch.bfloat16) - rank,
        "strided": torch.arange(60).view(6, 10).t()[1:], "bool": torch.arange(3) > rank,
        "nothing": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(torch.full((2, 3), float(rank))),
        "several": [shared, (shared, rank, "text", None), {3: 2.5}],
        "only here": [torch.tensor([rank], dtype=torch.int64)] * rank,
    }  # fmt: skip


def assert_same(got: Any, want: Any) -> None:
    if isinstance(want, torch.Tensor):
        assert (got.dtype, got.shape, got.device.type) == (want.dtype, want.shape, "cpu")
        assert torch.equal(got, want)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            assert_same(got[key], want[key])
    elif isinstance(want, (list, tuple)):
        assert (type(got), len(got)) == (type(want), len(want))
        for one, two in zip(got, want, strict=True):
            assert_same(one, two)
    else:
        assert got == want


def pieces_of(value: Any, seen: set[int]) -> int:
    """Messages that its tensors take."""
    if isinstance(value, torch.Tensor):
        if id(value) in seen:
            return 0
        seen.add(id(value))
        return -(-value.nbytes // PIECE)
    inner = value.values() if isinstance(value, dict) else value
    return sum(pieces_of(v, seen) for v in inner) if isinstance(value, (dict, list, tuple)) else 0


@pytest.mark.parametrize("to_rank", [None, 0, 2])
def test_values_of_all_ranks_arrive_in_pieces(
    monkeypatch: pytest.MonkeyPatch, to_rank: int | None
) -> None:
    monkeypatch.setattr(objects, "PIECE_NBYTES", PIECE)

    def work(comm: Communicator) -> tuple[list[Any], Counter[str]]:
        return gather_objects(comm, value_of(comm.rank), to_rank=to_rank), comm.traffic.calls

    found = run_ranks(3, work)
    pieces = [pieces_of(value_of(rank), set()) for rank in range(3)]
    for rank, (values, calls) in enumerate(found):
        assert len(values) == (3 if to_rank in (None, rank) else 0)
        for source, value in enumerate(values):
            assert_same(value, value_of(source))
            one, (two, *_), _ = value["several"]
            assert one is two
        if to_rank is None:
            assert calls["broadcast"] == sum(pieces)
        else:
            assert calls["send"] == (pieces[rank] if rank != to_rank else 0)
            assert calls["recv"] == (sum(pieces) - pieces[rank] if rank == to_rank else 0)


def test_values_of_one_rank_alone_are_its_own() -> None:
    (found,) = gather_objects(alone(), value_of(1))
    assert_same(found, value_of(1))
