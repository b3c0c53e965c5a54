"""Lists of the CUDA kernels: tensors of any number, size, type and place; norms, clip, unscale."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from anychip.operators.partials import grid_places, partials_of
from anychip_cuda import lists
from tests.unit.backends_cuda.conftest import Chip

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
U = 2.0**-24

# Shorter than a vector; one chunk and its neighbours; two chunks and a tail. Then how many elements
# behind a 16-byte boundary each begins: a head may be longer than its tensor.
SIZES = (0, 1, 3, 5, 8, 1023, 2052, 16383, 16384, 16385, 33007)
SHIFTS = (0, 1, 2, 3, 5, 7)


def _normal(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _many(chip: Chip, dtype: torch.dtype | None = None) -> list[Tensor]:
    """More tensors than a launch takes, of every size and shift, of one type or of all."""
    types = (FP32, BF16, FP16) if dtype is None else (dtype,)
    sizes = [*SIZES, *(7 + 3 * n for n in range(170))]
    return [
        chip.at(_normal(size, types[n % len(types)], n), SHIFTS[n % len(SHIFTS)])
        for n, size in enumerate(sizes)
    ]


def _row(chip: Chip, operator: str, index: int = 0) -> Any:
    return chip.table.rows(operator, "forward")[index].function


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(t.cpu().double().square().sum()) for t in tensors))


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
        tensor = chip.at(_normal(size, dtype, size), shift)
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


# l2_norm_partials


@DTYPES
@pytest.mark.parametrize("shift", [0, 1, 4], ids=str)
@pytest.mark.parametrize("block", [1, 2, 4, 64, 1024, 2048, 16384, 1 << 18], ids=str)
def test_partials_have_the_bits_of_the_reference(
    chip: Chip, dtype: torch.dtype, shift: int, block: int
) -> None:
    sizes = (0, 1, 9, 70) if block < 64 else (0, 1, 1027, 8192, 9221)
    tensors = [chip.at(_normal(size, dtype, size), shift) for size in sizes]
    attrs: dict[str, Any] = {"offsets": None, "sizes": None, "block": block}
    want = partials_of([t.cpu() for t in tensors], grid_places(tensors, None, None, block), block)
    assert torch.equal(_row(chip, "l2_norm_partials")(tensors, **attrs).cpu(), want)


def test_partials_of_a_long_block_are_summed_in_reversed_bits(chip: Chip) -> None:
    # One of the interleaved sequences alone: a large sum of all would hide its last bits.
    tensors = [torch.zeros(100_003, device=chip.device) for _ in range(4)]
    for index, tensor in enumerate(tensors):
        tensor[index::1024] = _normal(98, FP32, index).exp()
    attrs: dict[str, Any] = {"offsets": None, "sizes": None, "block": 1 << 17}
    want = partials_of([t.cpu() for t in tensors], [(0, 1)] * 4, 1 << 17)
    assert torch.equal(_row(chip, "l2_norm_partials")(tensors, **attrs).cpu(), want)


def test_partials_of_shards_leave_zeros_elsewhere(chip: Chip) -> None:
    tensors = [chip.at(_normal(size, BF16, size), size % 8) for size in (64, 96, 5, 0, 40)] * 30
    offsets, sizes = [32, 0, 96, 64, 0] * 30, [200, 96, 101, 100, 40] * 30
    attrs: dict[str, Any] = {"offsets": offsets, "sizes": sizes, "block": 32}
    want = partials_of([t.cpu() for t in tensors], grid_places(tensors, offsets, sizes, 32), 32)
    assert torch.equal(_row(chip, "l2_norm_partials")(tensors, **attrs).cpu(), want)


def test_partials_of_too_long_blocks_are_left_to_the_reference(chip: Chip) -> None:
    (row,) = chip.table.rows("l2_norm_partials", "forward")
    assert row.accepts is not None
    for block, taken in ((lists.MOST_BLOCK, True), (2 * lists.MOST_BLOCK, False)):
        assert row.accepts([], offsets=None, sizes=None, block=block) == taken


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


def test_clip_writes_nothing_beside_its_tensors(chip: Chip) -> None:
    room = torch.ones(40_000, device=chip.device)
    parts = [room[1:4], room[6:6], room[9:20_010], room[20_013:39_999]]
    _row(chip, "clip")(parts, torch.tensor(2.0, device=chip.device), max_norm=1.0)
    untouched = torch.ones(40_000, dtype=torch.bool)
    for start, end in ((1, 4), (9, 20_010), (20_013, 39_999)):
        untouched[start:end] = False
    assert torch.equal(room.cpu() == 1.0, untouched)


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


def test_writing_rows_of_views_change_the_views_only(chip: Chip) -> None:
    matrix = _normal(60 * 70, BF16, 1).view(60, 70).to(chip.device)
    views = [matrix.t()[:20], matrix[30:, 20::2]]
    want = matrix.clone()
    for part in (want.t()[:20], want[30:, 20::2]):
        part.copy_((part.float() / 3.0).to(BF16))
    found = torch.zeros((), device=chip.device)
    scale = torch.full_like(found, 3.0)
    by_copies = chip.table.rows("unscale_and_check", "forward")[1]
    assert not by_copies.contiguous
    by_copies.function(views, scale, found)
    assert torch.equal(matrix, want)
