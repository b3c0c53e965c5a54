"""Exact sums of squares: one norm, bit for bit, from whole tensors and from any parts of them."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anychip import ops
from anychip.operators import squares
from anychip.operators.lamb import trust_ratios
from anychip.operators.squares import NUM_DIGITS, WIDTH, carried, root
from tests.unit.dispatch.calls import bits

BASE = 1 << 32
KINDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def number(row: Tensor) -> int:
    """The sum that digits are, in units of 2^-298."""
    return sum(digit << 32 * place for place, digit in enumerate(row[:NUM_DIGITS].tolist()))


def numbers(count: int, seed: int, dtype: torch.dtype = torch.float32, *, exponents: int) -> Tensor:
    """Of so many exponents around one drawn; of 255, every number that there is, NaN too."""
    generator = torch.Generator().manual_seed(seed)
    if exponents == 255:
        info = torch.iinfo(KINDS[dtype])
        drawn = torch.randint(info.min, info.max + 1, (count,), generator=generator)
        return drawn.to(KINDS[dtype]).view(dtype)
    middle = float(torch.randint(-100, 100, (), generator=generator))
    exponent = middle + exponents * (torch.rand(count, generator=generator) - 0.5)
    return (torch.randn(count, generator=generator) * torch.exp2(exponent)).to(dtype)


def parts(x: Tensor, how: str, count: int, seed: int) -> list[Tensor]:
    """The elements of a matrix, each in one of ``count`` parts."""
    places = torch.rand(count - 1, generator=torch.Generator().manual_seed(seed))
    if how in ("rows", "columns"):
        dim = int(how == "columns")
        ends = (places * (x.shape[dim] + 1)).long().sort().values
        return list(torch.tensor_split(x, ends, dim))
    if how == "strided":
        return [x.reshape(-1)[start::count] for start in range(count)]
    order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(seed))
    flat = x.reshape(-1) if how == "flat" else x.reshape(-1)[order]
    return list(torch.tensor_split(flat, (places * (x.numel() + 1)).long().sort().values))


@settings(max_examples=80)
@given(
    shape=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    how=st.sampled_from(["flat", "rows", "columns", "strided", "permuted"]),
    count=st.integers(1, 9), seed=st.integers(0, 2**20),
    exponents=st.sampled_from([4, 25, 90, 255]),
    special=st.sampled_from([None, math.inf, -math.inf, math.nan]),
)  # fmt: skip
def test_parts_of_every_cut_have_the_bits_of_the_whole(
    shape: tuple[int, int], how: str, count: int, seed: int, exponents: int, special: float | None
) -> None:
    x = numbers(shape[0] * shape[1], seed, exponents=exponents).nan_to_num(1.0, 2.0, 3.0)
    if special is not None:
        x[seed % x.numel()] = special
    x = x.view(shape)
    whole = ops.sums_of_squares([x])
    rows = ops.sums_of_squares(parts(x, how, count, seed))
    # In another order than that of the ranks, as a ring adds.
    joined = torch.zeros_like(whole)
    for row in rows.flip(0):
        joined += row
    assert carried(joined).tolist() == whole.tolist()
    assert bits(root(joined)) == bits(root(whole))
    norm = root(whole).item()
    if special is None:
        assert math.isfinite(norm) or number(whole[0]) >= 2 ** (256 + 298)
    else:
        assert math.isnan(norm) if math.isnan(special) else norm == math.inf


def test_reference_squares_few_elements_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several short tensors together, a long one in parts; of whatever makes them one by one."""
    sizes = (3, 0, 700, 4500, 1, 1001, 2000, 12)
    tensors = [numbers(n, n, exponents=255) for n in sizes]
    whole = squares.rows_of(tensors)
    assert whole.tolist() == ops.sums_of_squares(tensors).tolist()
    monkeypatch.setattr(squares, "_ELEMENTS_AT_ONCE", 1500)
    assert squares.rows_of(iter(tensors)).tolist() == whole.tolist()


@settings(max_examples=200)
@given(
    st.lists(
        st.integers(0, 2**62) | st.sampled_from([0, BASE - 1, BASE, 2 * BASE - 1]),
        min_size=NUM_DIGITS - 2, max_size=NUM_DIGITS - 2,
    )
)  # fmt: skip
def test_carried_digits_are_those_of_the_number(digits: list[int]) -> None:
    row = torch.tensor([*digits, 0, 0, 3, 4])
    want = number(row)
    got = carried(row).tolist()
    assert got == [*((want >> 32 * place) % BASE for place in range(NUM_DIGITS)), 3, 4]


@settings(max_examples=200)
@given(st.integers(0, 2 ** (256 + 298) - 1) | st.integers(0, 2**70), st.integers(1, 2**40))
def test_root_is_within_its_bound(square: int, count: int) -> None:
    """Of what 2^40 elements may be: no norm beyond float32's numbers is asked for here."""
    total = min(square * count, 2 ** (256 + 298) - 2 ** (232 + 298))
    row = torch.tensor([(total >> 32 * place) % BASE for place in range(NUM_DIGITS)] + [0, 0])
    found = Fraction(root(row).item())
    unit = Fraction(torch.finfo(torch.float32).smallest_normal) * Fraction(2) ** -23
    while unit * 2**24 <= found:
        unit *= 2
    slack = unit * (Fraction(1, 2) + Fraction(1, 2**24))
    true_square = Fraction(total) * Fraction(1, 2**298)
    assert max(found - slack, Fraction(0)) ** 2 <= true_square <= (found + slack) ** 2


def test_norms_of_2_to_the_40_elements_and_at_the_ends_of_the_range() -> None:
    half = ops.sums_of_squares([torch.full((1 << 20,), 0.5)])
    assert root((half << 20).sum(0)).item() == 2.0**19
    largest, smallest = torch.finfo(torch.float32).max, 2.0**-149
    x = torch.tensor([largest, largest, smallest, 0.0])
    rows = ops.sums_of_squares([x[:1], x[:2], x[2:3], x[3:], x[:0], torch.tensor([1e30, 1e-30])])
    found = root(rows).tolist()
    assert found == [largest, math.inf, smallest, 0.0, 0.0, float(torch.tensor(1e30))]
    assert ops.l2_norm([x[:2]]).item() == math.inf
    assert ops.l2_norm([x[2:3]]).item() == smallest


# lamb


def test_trust_ratio_is_one_where_a_norm_is_zero() -> None:
    weights, steps = ([2.0, 0.0, 4.0, 0.0, 3.0], [1.0, 2.0, 0.0, 0.0, 1.0])
    rows = [ops.sums_of_squares([torch.tensor([v]) for v in line]) for line in (weights, steps)]
    assert trust_ratios(torch.stack(rows)).tolist() == [2.0, 1.0, 1.0, 1.0, 3.0]
    assert trust_ratios(torch.zeros(2, 0, WIDTH, dtype=torch.int64)).tolist() == []
