"""Activations of the CUDA kernels: values of every dtype, tails, columns, misaligned arrays."""

import pytest
import torch
from torch import Tensor

from tests.unit.backends_cuda.conftest import Chip, drawn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Round a vector (4 or 8), a block of 2 x 256 vectors in 16-bit types, and its tail.
LENGTHS = (0, 1, 7, 8, 9, 4096, 4099)
# Columns beside a vector, a warp's 32 vectors (128 or 256 columns) and two tiles; rows beside the
# rows that a block has at a time (16 for wide rows).
MATRICES = ((1, 1), (3, 7), (5, 8), (600, 24), (17, 264), (70, 128), (33, 516))
UNIT = 2**-24


def _double(operator: str, *args: Tensor, approximate: str = "none") -> Tensor:
    first, *others = args
    if operator == "swiglu":
        return torch.nn.functional.silu(first) * others[0]
    if operator == "bias_gelu":
        first = first + others[0]
    y = torch.nn.functional.gelu(first, approximate=approximate)
    return y * others[0] if operator == "geglu" else y


def _gradients(operator: str, grad: Tensor, *args: Tensor, **attrs: str) -> tuple[Tensor, ...]:
    doubles = [a.double().requires_grad_() for a in args]
    return torch.autograd.grad(_double(operator, *doubles, **attrs), doubles, grad.double())


def _is_near(got: Tensor, want: Tensor, scale: Tensor, roundings: float) -> bool:
    """Within half a unit of got's dtype, and float32 roundings of what was computed with."""
    half = torch.finfo(got.dtype).eps / 2
    tiny = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
    error = (got.cpu().double() - want).abs()
    return bool(torch.all(error <= half * want.abs() + roundings * UNIT * scale + tiny))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_of_any_length_is_that_of_float64(
    chip: Chip, dtype: torch.dtype, numel: int, approximate: str
) -> None:
    x = torch.linspace(-6.0, 6.0, numel, dtype=torch.float64).to(dtype)
    grad = drawn(numel, dtype=dtype)
    y = chip.call("gelu", "forward", x, approximate=approximate)
    (dx,) = chip.call("gelu", "backward", grad, x, approximate=approximate, needs=(True,))
    (want,) = _gradients("gelu", grad, x, approximate=approximate)
    assert y.dtype == dx.dtype == dtype
    assert _is_near(y, _double("gelu", x.double(), approximate=approximate), x.double().abs(), 8)
    assert _is_near(dx, want, grad.double().abs(), 24)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_numbers_without_end_is_their_limit(chip: Chip, approximate: str) -> None:
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e30, -1e30])
    ones = torch.ones(5)
    y = chip.call("gelu", "forward", x, approximate=approximate).cpu()
    (dx,) = chip.call("gelu", "backward", ones, x, approximate=approximate, needs=(True,))
    assert y[0] == torch.inf
    assert y[2].isnan()
    assert y[3] == x[3]
    assert y[4] == 0.0
    assert torch.equal(dx.cpu()[[0, 1, 3, 4]], torch.tensor([1.0, 0.0, 1.0, 0.0]))
    assert dx.cpu()[2].isnan()


@pytest.mark.parametrize("operator", ["swiglu", "geglu"])
@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_of_any_length_is_that_of_float64(
    chip: Chip, dtype: torch.dtype, numel: int, operator: str
) -> None:
    gate, up, grad = (drawn(numel, dtype=dtype, seed=seed) for seed in range(3))
    attrs = {} if operator == "swiglu" else {"approximate": "none"}
    y = chip.call(operator, "forward", gate, up, **attrs)
    made = chip.call(operator, "backward", grad, gate, up, needs=(True, True), **attrs)
    alone = chip.call(operator, "backward", grad, gate, up, needs=(False, True), **attrs)
    wide = (1 + gate.double().abs()) * (1 + up.double().abs())
    assert _is_near(y, _double(operator, gate.double(), up.double()), wide, 12)
    for got, want in zip(made, _gradients(operator, grad, gate, up), strict=True):
        assert _is_near(got, want, wide * grad.double().abs(), 24)
    assert alone[0] is None
    assert torch.equal(alone[1], made[1])


@pytest.mark.parametrize("operator", ["swiglu", "geglu"])
def test_gated_of_two_dtypes_is_computed_in_float32(chip: Chip, operator: str) -> None:
    gate, up = drawn(5, 9, dtype=torch.bfloat16), drawn(5, 9, dtype=torch.float32, seed=1)
    grad = drawn(5, 9, dtype=torch.bfloat16, seed=2)
    attrs = {} if operator == "swiglu" else {"approximate": "tanh"}
    wide = (grad.float(), gate.float(), up)
    y = chip.call(operator, "forward", gate, up, **attrs)
    dgate, dup = chip.call(operator, "backward", grad, gate, up, needs=(True, True), **attrs)
    exact = chip.call(operator, "forward", *wide[1:], **attrs)
    slopes = chip.call(operator, "backward", *wide, needs=(True, True), **attrs)
    assert torch.equal(y, exact.bfloat16())
    assert torch.equal(dgate, slopes[0].bfloat16())
    assert torch.equal(dup, slopes[1])


@pytest.mark.parametrize("shape", MATRICES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_gelu_of_any_matrix_is_that_of_float64(
    chip: Chip, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x, grad = drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype, seed=1)
    bias = drawn(shape[1], dtype=torch.float16, seed=2)
    attrs = {"approximate": "none"}
    y = chip.call("bias_gelu", "forward", x, bias, **attrs)
    dx, dbias = chip.call("bias_gelu", "backward", grad, x, bias, needs=(True, True), **attrs)
    wide = x.double().abs() + bias.double().abs()
    slopes = grad.double().abs() * (1 + wide)
    want_x, want_bias = _gradients("bias_gelu", grad, x, bias)
    assert _is_near(y, _double("bias_gelu", x.double(), bias.double()), wide, 10)
    assert _is_near(dx, want_x, slopes, 26)
    assert dbias.dtype == torch.float16
    assert _is_near(dbias, want_bias, slopes.sum(0), 26 + shape[0])


def test_every_part_of_the_scratch_is_written(chip: Chip) -> None:
    x = drawn(40, 264, dtype=torch.bfloat16).to(chip.device)
    bias = torch.zeros(264, dtype=torch.float32, device=chip.device)
    dbias, dx, parts = torch.empty_like(bias), torch.empty_like(x), 7
    partial = torch.full((parts, 264), torch.nan, device=chip.device)
    code = chip.kernels.codes
    chip.kernels.native.bias_gelu_backward(
        x.data_ptr(), x.data_ptr(), bias.data_ptr(), dx.data_ptr(), dbias.data_ptr(),
        partial.data_ptr(), 40, 264, parts, False, code[x.dtype], code[bias.dtype],
        *chip.kernels.place(x),
    )  # fmt: skip
    (want,) = _gradients("gelu", x.cpu(), x.cpu())
    assert _is_near(dbias, want.sum(0), x.cpu().double().square().sum(0) + 40, 66)


@pytest.mark.parametrize(
    ("rows", "hidden", "parts"),
    [(8192, 4096, 24), (8192, 1024, 99), (10, 4096, 1), (0, 8, 1), (5, 0, 1), (2**20, 8, 396),
     (64, 2**20, 1)],
)  # fmt: skip
def test_column_parts_fill_the_device_once(chip: Chip, rows: int, hidden: int, parts: int) -> None:
    # 132 multiprocessors with 3 blocks each, of 256 columns in 16-bit types.
    code = chip.kernels.codes[torch.bfloat16]
    assert chip.kernels.native.column_parts(rows, hidden, code, 132) == parts
