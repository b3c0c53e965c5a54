"""Lists of the CUDA kernels: tensors of any number, size, type and place; norms, clip, unscale."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from anychip.operators.lamb import trust_ratios
from anychip.operators.squares import NUM_DIGITS, WIDTH, carried, rows_of
from anychip_cuda import lists
from tests.unit.backends_cuda.conftest import Chip, drawn

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
U = 2.0**-24

# Shorter than a vector; one chunk and its neighbours; two chunks and a tail. Then how many elements
# behind a 16-byte boundary each begins: a head may be longer than its tensor.
SIZES = (0, 1, 3, 5, 8, 1023, 2052, 16383, 16384, 16385, 33007)
SHIFTS = (0, 1, 2, 3, 5, 7)


def _many(chip: Chip, dtype: torch.dtype | None = None) -> list[Tensor]:
    """More tensors than a launch takes, of every size and shift, of one type or of all."""
    types = (FP32, BF16, FP16) if dtype is None else (dtype,)
    return [
        chip.at(drawn(size, dtype=types[n % len(types)], seed=n), SHIFTS[n % len(SHIFTS)])
        for n, size in enumerate([*SIZES, *(7 + 3 * n for n in range(170))])
    ]


def _row(chip: Chip, operator: str, index: int = 0) -> Any:
    return chip.table.rows(operator, "forward")[index].function


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(t.cpu().double().square().sum()) for t in tensors))


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.cpu() for t in tensors]


# Parts of tensors


def test_part_of_a_chunk_beyond_two_to_the_31_elements_keeps_its_index(chip: Chip) -> None:
    native, numel = chip.kernels.native, 2**33 + 11
    chunk = native.LIST_CHUNK
    assert native.list_part(numel, 3, 0) == (3, 3, 3 + chunk)
    assert native.list_part(numel, 3, 2**32 // chunk) == (0, 3 + 2**32, 3 + 2**32 + chunk)
    assert native.list_part(numel, 3, 2**33 // chunk) == (0, 3 + 2**33, numel)
    assert native.list_part(2, 7, 0) == (2, 2, 2)


@pytest.mark.parametrize("head", [0, 3, 7], ids=str)
@pytest.mark.parametrize("numel", [1, 5, 16384, 16388, 16391, 16392, 32775], ids=str)
def test_parts_of_a_tensor_are_all_its_elements_once(chip: Chip, numel: int, head: int) -> None:
    native = chip.kernels.native
    chunks = max(1, -(-(numel - head) // native.LIST_CHUNK))
    parts = [native.list_part(numel, head, chunk) for chunk in range(chunks)]
    edges = [(begin - first, end) for first, begin, end in parts]
    assert edges[0][0] == 0
    assert edges[-1][1] == numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))


# l2_norm


@DTYPES
@pytest.mark.parametrize("shift", SHIFTS, ids=str)
def test_l2_norm_of_one_tensor_of_any_place_equals_float64(
    chip: Chip, dtype: torch.dtype, shift: int
) -> None:
    for size in SIZES:
        tensor = chip.at(drawn(size, dtype=dtype, seed=size), shift)
        got, want = float(_row(chip, "l2_norm")([tensor])), _norm([tensor])
        # A thread adds 16,384 / 256 squares to four sums; a tree, chunks, a root: 32 is ample.
        assert abs(got - want) <= 32 * U * want, size


def test_l2_norm_of_many_tensors_of_all_types_equals_float64(chip: Chip) -> None:
    tensors = _many(chip)
    got, want = float(_row(chip, "l2_norm")(tensors)), _norm(tensors)
    assert abs(got - want) <= 32 * U * want
    assert float(_row(chip, "l2_norm")(tensors)) == got


@pytest.mark.parametrize("index", [0, 7, 10, 100, 180], ids=str)
def test_l2_norm_misses_no_tensor_and_no_end(chip: Chip, index: int) -> None:
    for end in (0, -1):
        tensors = [t.zero_() for t in _many(chip, FP32)]
        if tensors[index].numel():
            tensors[index][end] = 3.0
            assert float(_row(chip, "l2_norm")(tensors)) == 3.0


def test_l2_norm_uses_its_scratch_within_bounds_whatever_it_holds(chip: Chip) -> None:
    tensors, found = _many(chip), []
    room = len(tensors) + sum(t.numel() for t in tensors) // chip.kernels.native.LIST_CHUNK
    for content in (math.nan, 3e38):
        scratch = torch.full((room + 64,), content, device=chip.device)
        norm = torch.empty((), device=chip.device)
        chip.kernels.native.l2_norm(
            *lists.described(chip.kernels, tensors), scratch.data_ptr(), room, norm.data_ptr(),
            *chip.kernels.place(norm),
        )  # fmt: skip
        found.append(float(norm))
        beyond = torch.full_like(scratch[room:], content)
        assert torch.equal(scratch[room:].view(torch.int32), beyond.view(torch.int32))
    assert found[0] == found[1] == float(_row(chip, "l2_norm")(tensors))


# sums_of_squares


def _wide(count: int, dtype: torch.dtype, exponents: float) -> Tensor:
    """Numbers of so many exponents, in any order."""
    generator = torch.Generator().manual_seed(count)
    scale = torch.exp2(-exponents * torch.rand(count, generator=generator))
    return (drawn(count, dtype=FP32, seed=count) * scale).to(dtype)


@DTYPES
@pytest.mark.parametrize("shift", [0, 1, 4], ids=str)
@pytest.mark.parametrize("exponents", [0, 15, 40], ids=str)
def test_sums_of_squares_are_exact(
    chip: Chip, dtype: torch.dtype, shift: int, exponents: float
) -> None:
    tensors = [chip.at(_wide(size, dtype, exponents), shift) for size in SIZES]
    assert torch.equal(_row(chip, "sums_of_squares")(tensors).cpu(), rows_of(_on_host(tensors)))


def test_sums_of_squares_of_many_tensors_of_all_types_are_exact(chip: Chip) -> None:
    tensors = _many(chip)
    assert torch.equal(_row(chip, "sums_of_squares")(tensors).cpu(), rows_of(_on_host(tensors)))


@pytest.mark.parametrize("scale", [2.0**-140, 2.0**-130, 2.0**100, 2.0**125], ids=str)
def test_sums_of_squares_at_the_ends_of_the_range_are_exact(chip: Chip, scale: float) -> None:
    tensors = [chip.at(drawn(size, dtype=FP32, seed=size) * scale, 0) for size in SIZES]
    assert torch.equal(_row(chip, "sums_of_squares")(tensors).cpu(), rows_of(_on_host(tensors)))


@pytest.mark.parametrize("place", [0, 1, 63, 64, 5000, 16_383, 16_384, 33_006], ids=str)
@pytest.mark.parametrize("value", [1e30, 1e-30, math.inf, math.nan], ids=str)
def test_sums_of_squares_hold_one_number_unlike_the_others(
    chip: Chip, place: int, value: float
) -> None:
    """Which the sample of a chunk has, or has not; among others and among zeros."""
    both = [drawn(33_007, dtype=FP32, seed=1), torch.zeros(33_007)]
    for tensor in both:
        tensor[place] = value
    tensors = [chip.at(tensor, 0) for tensor in both]
    assert torch.equal(_row(chip, "sums_of_squares")(tensors).cpu(), rows_of(both))


def _sums(count: int) -> Tensor:
    """(2, count, WIDTH) int64 of rows added up: chains of carries, zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randint(2**62, (2, count, WIDTH), generator=generator)
    rows = rows >> torch.randint(62, (2, count, WIDTH), generator=generator)
    rows[:, ::3] = (1 << 32) - 1
    rows[:, ::3, 0] += 1
    for half in rows:  # where digits end is another place in each
        for place, row in enumerate(half):
            row[place % NUM_DIGITS + 1 :] = 0
    rows[..., NUM_DIGITS:] = 0
    rows[0, 1::7, NUM_DIGITS] = 1
    rows[1, 2::9, NUM_DIGITS + 1] = 2
    rows[0, 5] = rows[1, 6] = 0
    return rows


@pytest.mark.parametrize("count", [7, 256, 300])
def test_sums_are_carried_and_divided_as_the_reference_does(chip: Chip, count: int) -> None:
    given = _sums(count)
    rows, ratios = given.to(chip.device, copy=True), torch.empty(count, device=chip.device)
    native, place = chip.kernels.native, chip.kernels.place(ratios)
    native.ratios_of_sums(rows.data_ptr(), count, ratios.data_ptr(), *place)
    assert torch.equal(rows.cpu(), given)
    # Of infinity over infinity a chip makes a NaN of its own.
    torch.testing.assert_close(ratios.cpu(), trust_ratios(given), rtol=0, atol=0, equal_nan=True)
    assert len(set(ratios.tolist())) > 2, "it is not asked much"
    native.carry_sums(rows.data_ptr(), 2 * count, *place)
    assert torch.equal(rows.cpu(), carried(given))


# clip


@DTYPES
def test_clip_multiplies_every_element_once(chip: Chip, dtype: torch.dtype) -> None:
    tensors = _many(chip, dtype)
    norm = torch.tensor(3.0, device=chip.device)
    ratio = torch.tensor(1.0) / (torch.tensor(3.0) + 1e-6)
    want = [(t.cpu().float() * ratio).to(dtype) for t in tensors]
    _row(chip, "clip")(tensors, norm, max_norm=1.0)
    for got, exact in zip(tensors, want, strict=True):
        assert torch.equal(got.cpu(), exact)


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0 - 2e-6], ids=str)
def test_clip_below_the_largest_norm_changes_no_bit(chip: Chip, norm: float) -> None:
    tensor = torch.tensor([1.0, math.nan, math.inf, -0.0], device=chip.device)
    before = tensor.cpu().clone().view(torch.int32)
    _row(chip, "clip")([tensor], torch.tensor(norm, device=chip.device), max_norm=1.0)
    assert torch.equal(tensor.cpu().view(torch.int32), before)


def test_clip_by_a_norm_that_is_no_number_leaves_no_number(chip: Chip) -> None:
    tensors = [torch.ones(11, device=chip.device), torch.ones(3, dtype=BF16, device=chip.device)]
    _row(chip, "clip")(tensors, torch.tensor(math.nan, device=chip.device), max_norm=1.0)
    assert all(bool(t.isnan().all()) for t in tensors)


# unscale_and_check


@DTYPES
def test_unscale_divides_and_rounds_once(chip: Chip, dtype: torch.dtype) -> None:
    grads = _many(chip, dtype)
    want = [(g.cpu().float() / 3.0).to(dtype) for g in grads]
    found = torch.zeros((), device=chip.device)
    _row(chip, "unscale_and_check")(grads, torch.tensor(3.0, device=chip.device), found)
    assert float(found) == 0.0
    for got, exact in zip(grads, want, strict=True):
        assert torch.equal(got.cpu(), exact)


@pytest.mark.parametrize("index", [1, 3, 7, 10, 180], ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan], ids=str)
def test_unscale_finds_what_is_not_finite_anywhere(chip: Chip, bad: float, index: int) -> None:
    size = _many(chip, FP32)[index].numel()
    for place in {0, size // 2, size - 1}:
        grads = _many(chip, FP32)
        grads[index][place] = bad
        found = torch.zeros((), device=chip.device)
        _row(chip, "unscale_and_check")(grads[: index + 1], torch.ones_like(found), found)
        assert float(found) == 1.0, place


def test_unscale_finds_an_overflow_by_its_own_division(chip: Chip) -> None:
    found = torch.zeros((), device=chip.device)
    grads = [torch.full((9,), 40_000.0, dtype=FP16, device=chip.device)]
    _row(chip, "unscale_and_check")(grads, torch.full_like(found, 0.5), found)
    assert float(found) == 1.0


def test_unscale_never_takes_found_inf_back(chip: Chip) -> None:
    found = torch.full((), 1.0, device=chip.device)
    _row(chip, "unscale_and_check")([torch.ones(3, device=chip.device)], found.clone(), found)
    assert float(found) == 1.0


# Layouts, and what is refused
