"""embedding of the CUDA kernels: exact copies, and sums of any pattern of repeated indices."""

import pytest
import torch
from torch import Tensor

from tests.unit.backends_cuda.conftest import Chip

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A part of a row is 64 accesses: 64 elements one by one, 512 (16-bit) or 256 (float32) as vectors.
WIDTHS = (1, 7, 8, 64, 65, 256, 512, 520, 1032)


def _forward(chip: Chip, indices: Tensor, weight: Tensor) -> Tensor:
    (row,) = chip.table.rows("embedding", "forward")
    y: Tensor = row.function(indices, weight)
    return y


def _backward(chip: Chip, grad: Tensor, indices: Tensor, num_rows: int) -> Tensor:
    (row,) = chip.table.rows("embedding", "backward")
    weight = grad.new_empty(num_rows, grad.shape[-1])
    (dweight,) = row.function(grad, indices, weight, needs=(True,))
    assert isinstance(dweight, Tensor)
    return dweight


def _integers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers whose sums have no rounding in float32, whatever their order."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def _sums(grad: Tensor, indices: Tensor, num_rows: int) -> Tensor:
    total = torch.zeros(num_rows, grad.shape[-1], dtype=torch.float64)
    rows = grad.cpu().double().reshape(-1, grad.shape[-1])
    return total.index_add(0, indices.cpu().long().reshape(-1), rows).to(grad.dtype)


@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_forward_of_any_width_is_a_copy(
    chip: Chip, width: int, dtype: torch.dtype, index: torch.dtype
) -> None:
    weight = torch.randn(11, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    indices = torch.tensor([[0, 10, 3], [3, 10, 5]], dtype=index)
    y = _forward(chip, indices.to(chip.device), weight.to(chip.device))
    assert torch.equal(y.cpu(), weight[indices.long()])


@pytest.mark.parametrize("wrong", [11, -1, 2**40])
def test_index_that_is_no_row_gives_nan_in_its_row_alone(chip: Chip, wrong: int) -> None:
    weight = _integers((11, 24), torch.bfloat16).to(chip.device)
    indices = torch.tensor([4, wrong, 10], device=chip.device)
    y = weight.new_zeros(3, 24)
    if chip.device.type == "cpu":
        with pytest.raises(IndexError, match="embedding: indices must be from 0 to 10"):
            _forward(chip, indices, weight)
    chip.kernels.native.embedding_forward(
        indices.data_ptr(), True, weight.data_ptr(), y.data_ptr(), 3, 11, 24,
        chip.kernels.codes[torch.bfloat16], *chip.kernels.place(weight),
    )  # fmt: skip
    dweight = _backward(chip, torch.ones_like(y), indices, 11)
    assert y.isnan().all(-1).tolist() == [False, True, False]
    assert torch.equal(y[[0, 2]], weight[[4, 10]])
    assert dweight.sum(-1).tolist() == [0, 0, 0, 0, 24, 0, 0, 0, 0, 0, 24]


# Up to 64 places of one index are summed by a warp; more of them in tiles of 64 places. Segments
# begin and end at, before and behind the tiles' ends; several in a tile, one over many tiles.
SEGMENTS = {
    "all-once": [1] * 9, "gaps": [0, 2, 0, 0, 3, 0], "one-warp": [64, 64, 0, 63, 65],
    "just-long": [65, 65, 1, 128, 129], "tile-by-tile": [128, 64, 192],
    "inside-a-tile": [3, 70, 2, 66, 1], "very-long": [5, 1000, 7], "all-the-same": [640],
    "all-the-same-and-one": [641], "short-then-none": [63, 0, 0],
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", SEGMENTS.values(), ids=SEGMENTS)
def test_gradient_of_any_pattern_is_the_exact_sum(
    chip: Chip, lengths: list[int], dtype: torch.dtype
) -> None:
    indices = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    indices = indices[torch.randperm(len(indices), generator=torch.Generator().manual_seed(3))]
    grad = _integers((len(indices), 8), dtype)
    got = _backward(chip, grad.to(chip.device), indices.to(chip.device), len(lengths))
    assert torch.equal(got.cpu(), _sums(grad, indices, len(lengths)))


@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_gradient_of_any_width_is_the_exact_sum(
    chip: Chip, width: int, dtype: torch.dtype, index: torch.dtype
) -> None:
    indices = torch.tensor([2] * 70 + [0, 4, 4, 0, 5], dtype=index)
    grad = _integers((75, width), dtype)
    got = _backward(chip, grad.to(chip.device), indices.to(chip.device), 6)
    assert torch.equal(got.cpu(), _sums(grad, indices, 6))


def test_gradient_adds_the_rows_of_an_index_in_their_order(chip: Chip) -> None:
    generator = torch.Generator().manual_seed(5)
    indices = torch.randint(3, (100,), generator=generator)
    grad = torch.randn(100, 24, generator=generator)
    want = torch.zeros(3, 24)
    for place, index in enumerate(indices.tolist()):
        want[index] += grad[place]
    got = _backward(chip, grad.to(chip.device), indices.to(chip.device), 3)
    assert torch.equal(got.cpu(), want)


def test_rows_behind_2_to_the_31_elements_are_found(chip: Chip) -> None:
    # 4 GiB of addresses, of which a few pages are touched.
    width, last = 1032, 2**31 // 1032 + 1
    table = torch.empty(last + 1, width, dtype=torch.bfloat16, device=chip.device)
    table[0], table[last] = 3.0, _integers((width,), torch.bfloat16).to(chip.device)
    order = torch.tensor([0, last], device=chip.device)
    sorted_indices = torch.tensor([1, 1], device=chip.device)
    dweight, starts = table.new_empty(2, width), order.new_empty(3)
    codes = (chip.kernels.codes[torch.bfloat16], chip.kernels.multiprocessors(table))
    y = _forward(chip, torch.tensor([last], device=chip.device), table)
    chip.kernels.native.embedding_backward(
        table.data_ptr(), sorted_indices.data_ptr(), True, order.data_ptr(), dweight.data_ptr(),
        starts.data_ptr(), 0, 2, 2, width, *codes, *chip.kernels.place(table),
    )  # fmt: skip
    assert torch.equal(y[0], table[last])
    assert not dweight[0].any()
    assert torch.equal(dweight[1], table[last] + 3.0)
