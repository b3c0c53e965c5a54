"""sums_of_squares: exact sums, so that a norm has the same bits however its tensors are cut.

Note: Exact sums
    The square of a float32 is a multiple of 2^-298 below 2^256. A sum of squares is kept as the
    whole number of 2^-298 that it is, a long accumulator (Kulisch 1981; Collange, Defour, Graillat
    and Iakymchuk 2015, Parallel Computing 49:83): int64 digits in base 2^32, the lowest first, and
    behind them how many infinities and how many NaN there were. Nothing is rounded, so no order and
    no cut shows: rows of any parts of any tensors add up to the row of the whole, on every chip.

    Digits of an operator are carried: from 0 to 2^32 - 1. A sum of up to 2^31 rows holds before it
    is carried again; :func:`carried` does, and so makes equal sums equal digits. 19 digits hold
    2^45 elements.

    :func:`root` rounds twice: in float64, by five additions and a root, and to float32. A norm is
    within (1/2 + 2^-24) units in the last place of the true one for any number of elements and for
    subnormal results within 2^-149; it is inf where the true one rounds to 2^128 or beyond, or an
    element is infinite, and NaN where one is NaN. Subnormal elements count as all others.

    Exact, and not the few bins of Ahrens, Demmel and Nguyen 2020 (ACM TOMS 46:22): those drop what
    lies far below the largest number, need a bound for it that grows with the length, and bits
    that tell ties apart. A tile whose numbers lie within 2^19 of each other needs two sums of
    float64 per lane, and bins would need three.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Sample, SampleMaker
from anychip.operators import lists

NUM_DIGITS = 19
"""In base 2^32, from 2^-298 on."""
WIDTH = NUM_DIGITS + 2
"""Entries of a row: digits, how many infinities, how many NaN."""
_LOWEST = -298
_MASK = (1 << 32) - 1
_EXPONENTS = 256
_ELEMENTS_AT_ONCE = 1 << 20
"""Elements and sums that are made together: their copies stay small. Below 2^31, as sums have 63
bits."""


def carried(rows: Tensor) -> Tensor:
    """(..., WIDTH) int64 with every digit from 0 to 2^32 - 1: equal sums have equal rows."""
    digits = rows[..., :NUM_DIGITS]
    for _ in range(2):  # the first leaves carries below 2^31, the second of at most 1
        carry = torch.nn.functional.pad(digits[..., :-1] >> 32, (1, 0))
        digits = (digits & _MASK) + carry
    # A carry of 1 goes on through digits of only ones, all at once: as bits of two numbers, those
    # digits that send one, and those that pass one on (carry lookahead).
    places = torch.arange(NUM_DIGITS, device=rows.device)
    sends = ((digits >> 32) << places).sum(-1, keepdim=True)
    passes = ((digits == _MASK).to(torch.int64) << places).sum(-1, keepdim=True)
    comes = (((sends << 1) + passes) ^ passes).expand_as(digits)
    digits = (digits + ((comes >> places) & 1)) & _MASK
    return torch.cat([digits, rows[..., NUM_DIGITS:]], dim=-1)


def root(rows: Tensor) -> Tensor:
    """(...) float32 square roots of sums; the same bits for all rows that are one sum.

    Args:
        rows: (..., WIDTH) int64, added up from any number of rows below 2^31.
    """
    rows = carried(rows)
    places = torch.arange(NUM_DIGITS, device=rows.device)
    weights = ((32 * places + _LOWEST + 1023) << 52).view(torch.float64)  # 2^(32 k - 298), exactly
    terms = rows[..., :NUM_DIGITS].to(torch.float64) * weights
    total = torch.nn.functional.pad(terms, (0, 32 - NUM_DIGITS))
    while total.shape[-1] > 1:  # in pairs: no chip's own order of a sum
        first, second = total.chunk(2, dim=-1)
        total = first + second
    total = total[..., 0]
    infinities, nans = rows[..., NUM_DIGITS] > 0, rows[..., NUM_DIGITS + 1] > 0
    total = torch.where(infinities, torch.inf, total)
    return torch.where(nans, torch.nan, total).sqrt().to(torch.float32)


def rows_of(tensors: Iterable[Tensor]) -> Tensor:
    """The reference: (tensors, WIDTH) int64. What makes tensors one by one need not keep them."""
    found, group, counts, room = list[Tensor](), list[Tensor](), list[int](), _ELEMENTS_AT_ONCE
    for tensor in tensors:
        parts = tensor.reshape(-1).split(_ELEMENTS_AT_ONCE)
        counts.append(len(parts))
        for part in parts:
            if group and len(part) + 2 * _EXPONENTS > room:
                found.append(_sums(group))
                group, room = [], _ELEMENTS_AT_ONCE
            group.append(part)
            room -= len(part) + 2 * _EXPONENTS
    rows = torch.cat([*found, _sums(group)])
    if max(counts) > 1:
        rows = torch.stack([parts.sum(0) for parts in rows.split(counts)])
    return carried(rows)


def _sums(parts: Sequence[Tensor]) -> Tensor:
    """(parts, WIDTH) int64: of each, sums of squares by exponent, which become digits."""
    count, device = len(parts), parts[0].device
    bits = torch.cat([part.float() for part in parts]).view(torch.int32)
    which = torch.cat([torch.full_like(part, n, dtype=torch.int64) for n, part in enumerate(parts)])
    exponents, fractions = (bits >> 23) & 0xFF, (bits & 0x7FFFFF).to(torch.int64)
    whole = torch.where(exponents == 0, fractions, fractions | 0x800000)
    is_special = exponents == 255
    squares = torch.where(is_special, 0, whole * whole)
    place = exponents.clamp(min=1).to(torch.int64) - 1  # of units of 4^place
    sums = torch.zeros(2, count * _EXPONENTS, dtype=torch.int64, device=device)
    sums[0].index_add_(0, which * _EXPONENTS + place, squares & _MASK)
    sums[1].index_add_(0, which * _EXPONENTS + place, squares >> 32)
    # Sixteen exponents to a digit: their sums move by 0, 2, ... 30 bits, into up to three digits.
    moved = torch.arange(0, 32, 2, device=device)
    found = torch.zeros(count, WIDTH, dtype=torch.int64, device=device)
    for half in range(2):
        by_digit = sums[half].view(count, 16, 16)
        low, high = (by_digit & _MASK) << moved, (by_digit >> 32) << moved
        for above, part in enumerate((low & _MASK, (low >> 32) + (high & _MASK), high >> 32), half):
            found[:, above : above + 16] += part.sum(-1)
    is_nan = is_special & (fractions != 0)
    for entry, special in enumerate((is_special & ~is_nan, is_nan), NUM_DIGITS):
        found[:, entry].index_add_(0, which, special.to(torch.int64))
    return carried(found)


def check(tensors: Sequence[Tensor]) -> None:
    """Raises ValueError for an empty list, which has no device."""
    if not tensors:
        raise ValueError("at least one tensor expected, got none")


def _samples(maker: SampleMaker) -> Iterator[Sample]:
    yield Sample(([maker.normal(*shape) for shape in lists.SHAPES],), {}, "four tensors")
    yield Sample(([maker.normal(0), maker.normal(33, scale=1e-30)],), {}, "no element, small")


sums_of_squares = OperatorSpec(
    name="sums_of_squares", signature="(Tensor[] tensors) -> Tensor",
    equation="per tensor the exact sum of t^2 / 2^-298 in base 2^32; numbers of inf and of NaN",
    source="Collange et al. 2015, Parallel Computing 49:83 (long accumulators)",
    forward=rows_of,
    fake=lambda tensors: tensors[0].new_empty((len(tensors), WIDTH), dtype=torch.int64),
    check=check, sizes=lambda tensors: {"numel": lists.numel(tensors)},
    cost=lambda tensors: Cost(lists.nbytes(tensors), 2 * lists.numel(tensors)), samples=_samples,
    bound=Bound(forward=0, backward=0, length=lambda *_: 1),
)  # fmt: skip
