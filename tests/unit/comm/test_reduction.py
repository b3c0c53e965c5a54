"""Does the ordered reduction do what its docstring says, in every dtype that the table claims?"""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anychip.comm import wire_nbytes
from anychip.comm.ledger import disagreement
from anychip.comm.reduction import CHUNK_NUMEL, host_capabilities, reduce_pairwise
from anychip.comm.wire import SMALL_NBYTES
from anychip.contract import CALLS, REDUCTIONS
from tests.order_of_sums import pairwise


def parts(num: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    draw = np.random.default_rng([num, numel])
    if dtype.is_floating_point:
        return [torch.from_numpy(draw.standard_normal(numel)).to(dtype) for _ in range(num)]
    return [torch.from_numpy(draw.integers(-100, 200, numel)).to(dtype) for _ in range(num)]


def by_numpy(values: list[torch.Tensor], reduction: str) -> torch.Tensor:
    narrow = values[0].dtype in (torch.bfloat16, torch.float16)
    arrays: list[Any] = [(v.float() if narrow else v).numpy() for v in values]
    total = pairwise(arrays, {"max": np.maximum, "min": np.minimum}.get(reduction, np.add))
    if reduction == "avg":
        total = total / total.dtype.type(len(values))
    return torch.from_numpy(np.asarray(total)).to(values[0].dtype)


TABLE = [
    pytest.param(dtype, reduction, id=f"{str(dtype)[6:]}-{reduction}")
    # In one order in every process: a set of dtypes has none.
    for dtype, reductions in sorted(host_capabilities().reductions.items(), key=str)
    for reduction in REDUCTIONS
    if reduction in reductions
]


@pytest.mark.parametrize(("dtype", "reduction"), TABLE)
@pytest.mark.parametrize("num", [1, 2, 3, 8])
def test_reduction_that_the_table_claims_equals_numpy(
    num: int, dtype: torch.dtype, reduction: Any
) -> None:
    for numel in (0, 1, CHUNK_NUMEL, CHUNK_NUMEL + 3):
        values = parts(num, numel, dtype)
        want, got = by_numpy(values, reduction), torch.empty(numel, dtype=dtype)
        reduce_pairwise(got, values, reduction)
        assert torch.equal(got, want)


@settings(max_examples=40)
@given(num=st.integers(1, 9), numel=st.integers(0, 500), index=st.integers(0, 8), avg=st.booleans())
def test_reduction_into_any_of_its_parts_is_right(
    num: int, numel: int, index: int, avg: bool
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        values = parts(num, numel, dtype)
        want = by_numpy(values, "avg" if avg else "sum")
        reduce_pairwise(values[index % num], values, "avg" if avg else "sum")
        assert torch.equal(values[index % num], want)


@pytest.mark.parametrize("groups", [[2, 4], [4, 2], [2, 2, 2], [3, 2], [3, 4]], ids=str)
@pytest.mark.parametrize("reduction", ["sum", "avg"])
def test_sum_of_groups_of_neighbours_is_that_of_all(groups: list[int], reduction: Any) -> None:
    """Groups of two or four of neighbours, then of those, from the last axis to the first."""
    values = parts(math.prod(groups), 1000, torch.float32)
    at_once = torch.empty(1000)
    reduce_pairwise(at_once, values, reduction)
    for size in reversed(groups):
        sums = [torch.empty(1000) for _ in range(len(values) // size)]
        for index, got in enumerate(sums):
            reduce_pairwise(got, values[index * size : (index + 1) * size], reduction)
        values = sums
    if reduction == "sum" or groups[0] != 3:  # thirds are rounded
        assert torch.equal(values[0], at_once)


def test_sum_in_16_bits_is_rounded_once() -> None:
    # 256 + 1 + 1 rounds to 256 twice in bfloat16, and once to 258 from float32.
    values = [torch.tensor([v], dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0)]
    got = torch.empty(1, dtype=torch.bfloat16)
    reduce_pairwise(got, values, "sum")
    assert got.item() == 258.0


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_not_a_number_stays_one(reduction: Any) -> None:
    values = [torch.tensor([1.0, 2.0]), torch.tensor([float("nan"), float("inf")])]
    got = torch.empty(2)
    reduce_pairwise(got, values, reduction)
    assert got[0].isnan()
    assert got[1].item() == (2.0 if reduction == "min" else float("inf"))


def test_wire_bytes_reach_the_bounds_of_the_literature() -> None:
    payload = 10 * SMALL_NBYTES
    for world_size in range(1, 9):
        share = Fraction(world_size - 1, world_size) * payload
        assert wire_nbytes("all_reduce", payload, world_size) == 2 * share
        assert wire_nbytes("reduce_scatter", payload, world_size) == share
        assert wire_nbytes("all_gather", payload, world_size) == share
    assert {wire_nbytes(call, 0, 4) for call in CALLS} == {0}
    with pytest.raises(ValueError, match="no call 'gather'"):
        wire_nbytes("gather", 1, 2)


@pytest.mark.parametrize(("calls", "odd"), [
    ({0: "a", 1: "b", 2: "b"}, (0,)), ({0: "a", 1: "b"}, (1,)),
    ({4: "x", 5: "y", 6: "x", 7: "z"}, (5, 7)),
])  # fmt: skip
def test_disagreement_names_those_that_differ_from_most(
    calls: dict[int, str], odd: tuple[int, ...]
) -> None:
    found = disagreement(3, calls)
    assert found.ranks == odd
    assert all(text in found.reason for text in calls.values())
