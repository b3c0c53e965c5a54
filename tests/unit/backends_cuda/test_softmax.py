"""softmax of the CUDA kernels: rows of every length, hidden keys, biases of every shape."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.backends_cuda.conftest import Chip, drawn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# One key; beside a vector and a warp's vectors; to the last key of a warp's registers (256, 512,
# 1,024), of a block's (8,192 or 16,384), and behind it; those that are no multiple of a vector;
# more than shared memory holds of float32 (58,072), or of two arrays of 16 bits.
KEYS = (1, 8, 17, 250, 256, 264, 512, 516, 1024, 1025, 1032, 8192, 8200, 8203, 16384, 16392, 58109)


def _forward(chip: Chip, *args: Tensor | None, scale: float = 1.0, causal: bool = False) -> Tensor:
    x, mask, bias = (*args, None, None)[:3]
    y: Tensor = chip.call("softmax", "forward", x, mask, bias, scale=scale, causal=causal)
    return y


def _backward(chip: Chip, *args: Tensor, needs: Any = (True, True), **attrs: Any) -> Any:
    grad, y, bias = (*args, None)[:3]
    given = {"scale": 1.0, "causal": False, **attrs}
    return chip.call("softmax", "backward", grad, y, bias, **given, needs=needs)


def _double(x: Tensor, *extras: Tensor, scale: float = 1.0, causal: bool = False) -> Tensor:
    mask, bias = (*extras, None, None)[:2]
    scores = x.double() * scale + (0.0 if bias is None else bias.double())
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if causal:
        queries, keys = x.shape[-2:]
        later = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
        scores = scores.masked_fill(later, -torch.inf)
    hidden = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(hidden, 0.0), -1).masked_fill(hidden, 0.0)


def _is_near(got: Tensor, want: Tensor, scale: Tensor | float = 0.0, roundings: float = 64) -> bool:
    """Half a unit of got's dtype, and float32 roundings: a sum of up to 32 a thread in trees."""
    half = torch.finfo(got.dtype).eps / 2
    tiny = torch.finfo(got.dtype).smallest_normal
    error = (got.double() - want).abs()
    return bool(torch.all(error <= half * want.abs() + roundings * 2**-24 * (want.abs() + scale)
                          + tiny))  # fmt: skip


def _dscores(grad: Tensor, y: Tensor) -> Tensor:
    grad, y = grad.double(), y.double()
    return y * (grad - (grad * y).sum(-1, keepdim=True))


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_length_are_those_of_float64(chip: Chip, dtype: torch.dtype, keys: int) -> None:
    x, grad = drawn(3, keys, dtype=dtype), drawn(3, keys, dtype=dtype, seed=1)
    mask = torch.arange(keys) % 7 != 3
    bias = drawn(keys, dtype=dtype, seed=2)
    y = _forward(chip, x, mask, bias, scale=0.5)
    dx, dbias = _backward(chip, grad, y, bias, scale=0.5)
    want = _dscores(grad, y)
    size = y.double() * (grad.double().abs() + (grad.double() * y.double()).abs().sum(-1)[:, None])
    assert _is_near(y, _double(x, mask, bias, scale=0.5))
    assert not y[:, 3::7].any()
    assert _is_near(dx, 0.5 * want, size)
    assert _is_near(dbias, want.sum(0), size.sum(0))


@pytest.mark.parametrize("keys", [16391, 58109])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_rows_have_the_same_bits_at_any_place(chip: Chip, dtype: Any, keys: int) -> None:
    # Rows behind a boundary by other numbers of elements, and those of results by others again.
    rows = [drawn(1, keys, dtype=dtype, seed=seed).repeat(3, 1) for seed in (0, 1)]
    bias, attrs = torch.zeros(3, 1, device=chip.device), {"scale": 0.5, "causal": False}
    forward, backward = (chip.table.rows("softmax", d)[0].function for d in ("forward", "backward"))
    found = []
    for shift in (0, 3):
        x, grad = (chip.at(t.flatten(), shift).view(3, keys) for t in rows)
        y = forward(x, None, None, **attrs)
        given = (grad, chip.at(y.flatten(), shift).view(3, keys), bias)
        alone = backward(*given, **attrs, needs=(False, True))[1]
        found += [*torch.cat((y, alone, *backward(*given, **attrs, needs=(True, True))), 1)]
    assert all(torch.equal(found[0], one) for one in found)


@pytest.mark.parametrize("shape", [(2, 3, 9, 9), (2, 7, 3), (3, 1, 40), (2, 40, 1032)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal_rows_see_no_later_key(
    chip: Chip, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x, grad = drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype, seed=1)
    later = torch.ones(shape[-2:], dtype=torch.bool).triu(shape[-1] - shape[-2] + 1)
    x = x.masked_fill(later, torch.nan)
    y = _forward(chip, x, scale=0.7, causal=True)
    (dx, _) = _backward(chip, grad, y, scale=0.7, causal=True, needs=(True, False))
    size = y.double() * (grad.double().abs() + (grad * y).double().abs().sum(-1, keepdim=True))
    assert _is_near(y, _double(x, scale=0.7, causal=True))
    assert _is_near(dx, 0.7 * _dscores(grad, y), size)


@pytest.mark.parametrize(
    "extra", [(2, 3, 5, 24), (3, 1, 24), (2, 1, 1, 24), (24,), (5, 1), (3, 1, 1), (1,), ()], ids=str
)
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float32], ids=str)
def test_masks_and_biases_are_broadcast(
    chip: Chip, other: torch.dtype, extra: tuple[int, ...]
) -> None:
    x, grad = (drawn(2, 3, 5, 24, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    bias = drawn(*extra, dtype=other, seed=2)
    mask = drawn(*extra, dtype=torch.float32, seed=3) > -1.5
    y = _forward(chip, x, mask, bias)
    both = _backward(chip, grad, y, bias)
    alone = _backward(chip, grad, y, bias, needs=(False, True))
    want, size = _dscores(grad, y), y.double() * (grad.double().abs() + 6)
    assert _is_near(y, _double(x, mask, bias))
    assert _is_near(both[0], want, size)
    assert both[1].dtype == other
    assert both[1].shape == bias.shape
    assert _is_near(both[1], want.sum_to_size(bias.shape), size.sum_to_size(bias.shape))
    assert alone[0] is None
    assert torch.equal(alone[1], both[1])


@pytest.mark.parametrize("keys", [64, 1])
def test_bias_gradient_over_many_rows_goes_over_parts(chip: Chip, keys: int) -> None:
    grad, y = (drawn(700, 3, 64, dtype=torch.float32, seed=seed) for seed in (0, 1))
    bias = torch.zeros(3, keys)
    y = y.softmax(-1)
    _, dbias = _backward(chip, grad, y, bias)
    again = _backward(chip, grad, y, bias)[1]
    want = _dscores(grad, y).sum_to_size(bias.shape)
    assert torch.equal(dbias, again)
    assert _is_near(dbias, want, 700 * 0.2 * 64 / keys)


@pytest.mark.parametrize("keys", [24, 2000, 9000])
def test_rows_without_a_visible_key_and_with_nan(chip: Chip, keys: int) -> None:
    # 9,000 keys by ones: read twice.
    x = drawn(6, keys + 1, dtype=torch.float32)[:, 1:] if keys == 9000 else drawn(
        6, keys, dtype=torch.float32
    )  # fmt: skip
    x = x.clone(memory_format=torch.contiguous_format)
    mask = torch.ones(6, keys, dtype=torch.bool)
    mask[0], mask[1, 1:], x[2, 5], x[3] = False, False, torch.nan, -torch.inf
    x[4, 7], mask[4, 7] = torch.nan, False
    x[5, :8] = 300.0
    bias = torch.zeros(6, 1)
    bias[1] = 1e4
    y = _forward(chip, x, mask, bias)
    assert not y[0].any()
    assert torch.equal(y[1], torch.eye(1, keys)[0])
    assert y[2].isnan().all()
    assert not y[3].any()
    assert y[4, 7] == 0.0
    assert _is_near(y[4:], _double(x, mask, bias)[4:])


def test_extras_behind_2_to_the_31_elements_are_found(chip: Chip) -> None:
    # 6 GiB of addresses, of which a few pages are touched.
    bias = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=chip.device)
    mask = torch.empty(2**31 + 64, dtype=torch.bool, device=chip.device)
    bias, mask = (t.as_strided((2, 1, 24), (2**31, 24, 1)) for t in (bias, mask))
    bias.copy_(drawn(2, 1, 24, dtype=torch.bfloat16))
    mask.copy_(torch.arange(48).view(2, 1, 24) % 5 != 0)
    x = drawn(2, 3, 24, dtype=torch.bfloat16, seed=1)
    (row,) = chip.table.rows("softmax", "forward")
    y = row.function(x.to(chip.device), mask, bias, scale=1.0, causal=False).cpu()
    assert _is_near(y, _double(x, mask.cpu(), bias.cpu()))


def test_rows_of_too_many_dims_are_left_to_the_reference(chip: Chip) -> None:
    (row,) = chip.table.rows("softmax", "forward")
    x, bias = torch.empty(2, 2, 2, 2, 2, 2), torch.empty(2)
    assert row.accepts is not None
    assert not row.accepts(x, None, bias, scale=1.0, causal=False)
    assert row.accepts(x, None, None, scale=1.0, causal=False)
    assert row.accepts(x[0], None, bias, scale=1.0, causal=False)
    assert not row.accepts(torch.empty(2**31, 1, device="meta"), None, None)
