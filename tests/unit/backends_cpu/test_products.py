"""The native product of matrices, and what is given to it: each result is held against float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from anychip import ops
from anychip_cpu import linear_loss, native, products
from tests.unit.dispatch.calls import bits
from tests.unit.operators.exactness import assert_close

pytestmark = pytest.mark.skipif(native.kernels is None, reason=str(native.problem))

SIZES = [(64, 64, 64), (97, 131, 519), (1, 1, 1), (5, 0, 3), (7, 3, 0), (70, 2070, 65)]
"""Rows, columns and depth: of whole tiles and not, of several parts, of nothing."""


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["own", "torch"])
def least(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(products, "OWN_PRODUCT_FROM", 0 if request.param == "own" else 1 << 62)
    monkeypatch.setattr(products, "_NARROW", 0)
    return request.param


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_product_of_matrices_and_views_equals_that_in_float64(
    sizes: tuple[int, int, int], transposed: tuple[bool, bool], least: str
) -> None:
    """A term passes a rounding for each term of its part, and one for each part; then the sums."""
    rows, columns, depth = sizes
    left, right = drawn(rows, depth, seed=0), drawn(depth, columns, seed=1)
    left, right = (
        t.t().contiguous().t() if turned else t
        for t, turned in zip((left, right), transposed, strict=True)
    )
    bias, before = drawn(columns, 2, seed=2)[:, 0], drawn(rows, columns, seed=3)
    exact, count = left.double() @ right.double(), min(depth, 256) + depth / 256 + 3
    terms = max(1.0, float((left.abs() @ right.abs()).max()) if exact.numel() else 0.0)
    bound = count * terms / max(1.0, float(exact.abs().max()) if exact.numel() else 0.0)
    assert_close(products.multiply(left, right), exact, bound)
    assert_close(products.multiply(left, right, bias=bias), exact + bias, bound)
    out = before.clone()
    assert products.multiply(left, right, out, adds=True) is out
    assert_close(out, exact + before, bound)


WIDE = [(1, 1, 1), (5, 0, 3), (7, 3, 0), (33, 70, 1090), (129, 65, 31), (260, 64, 2048),
        (600, 9, 17), (544, 70, 512)]  # fmt: skip
"""Rows, columns and depth: in several parts, filled up, in place (from 2^24 multiplications on)."""


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("sizes", WIDE, ids=str)
def test_sums_of_16_bit_factors_are_those_of_float32(
    sizes: tuple[int, int, int], transposed: tuple[bool, bool]
) -> None:
    """A product of two bfloat16 numbers is exact in float32: what is rounded are sums."""
    rows, columns, depth = sizes
    left, right = (
        t.bfloat16() for t in (drawn(rows, depth, seed=0), drawn(depth, columns, seed=1))
    )
    left, right = (
        t.t().contiguous().t() if turned else t
        for t, turned in zip((left, right), transposed, strict=True)
    )
    bias, before = drawn(columns, seed=2), drawn(rows, columns, seed=3)
    exact, size = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    bound = (depth + 2) * 2.0**-24 * (size + before.abs() + bias.abs())
    for factor in (right, products.Panels(right)):
        out = torch.full((rows, columns), torch.nan)
        assert products.multiply(left, factor, out) is out
        assert ((out - exact).abs() <= bound).all()
        products.multiply(left, factor, out, bias=bias)
        assert ((out - exact - bias).abs() <= bound).all()
        out = before.clone()
        products.multiply(left, factor, out, adds=True)
        assert ((out - exact - before).abs() <= bound).all()


@pytest.mark.parametrize("place", [(0, 0), (40, 70), (66, 64)], ids=str)
def test_what_is_not_finite_stays_in_its_row_and_column(place: tuple[int, int], least: str) -> None:
    left, right = drawn(67, 71, seed=0), drawn(71, 65, seed=1)
    left[place] = torch.inf
    assert torch.equal((~products.multiply(left, right).isfinite()).any(1).nonzero()[:, 0],
                       torch.tensor([place[0]]))  # fmt: skip
    right[place[1], 5] = torch.nan
    found = products.multiply(left, right).isnan()
    assert found[:, 5].all()
    assert not found[torch.arange(67) != place[0]][:, torch.arange(65) != 5].any()


def test_bits_of_a_row_are_those_of_the_row_alone(least: str) -> None:
    if least == "torch":
        pytest.skip("MKL's depend on how many rows there are")
    left, right = drawn(67, 300, seed=0), drawn(300, 65, seed=1)
    whole = products.multiply(left, right)
    assert bits([products.multiply(left[13:14], right)]) == bits([whole[13:14]])


def test_gradient_of_a_transposed_weight_of_a_loss_is_that_of_the_weight(least: str) -> None:
    x, weight, target = (
        drawn(70, 66, seed=0), drawn(65, 66, seed=1), torch.arange(65).repeat(2)[:70],
    )  # fmt: skip
    found = []
    for leaf in (weight.clone(), weight.t().contiguous().t()):
        ops.linear_cross_entropy(x, leaf.requires_grad_(), target).backward()
        found.append(leaf.grad)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("rows", [0, 70, 1100])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_loss_by_16_bit_products_is_that_of_float32_ones(
    rows: int, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several chunks, and several of these at once; gradients from both directions."""
    found = []
    for dtypes in (frozenset[torch.dtype](), frozenset({torch.bfloat16})):
        monkeypatch.setattr(linear_loss, "INTO_FLOAT32", dtypes)
        monkeypatch.setattr(linear_loss, "CHUNK", 1 << 12)
        leaves = [
            (drawn(*shape, seed=k) / 4).bfloat16().requires_grad_()
            for k, shape in enumerate([(rows, 36), (65, 36), (65,)])
        ]
        loss = ops.linear_cross_entropy(
            leaves[0], leaves[1], torch.arange(rows) % 65, leaves[2], reduction=reduction
        )
        loss.sum().backward()
        found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for wide, narrow in zip(*found, strict=True):
        assert wide is not None
        torch.testing.assert_close(narrow, wide, rtol=2**-7, atol=2**-8 * max(1.0, rows / 65))


def test_gradient_of_a_large_weight_has_float32_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "INTO_FLOAT32", frozenset({torch.bfloat16}))
    monkeypatch.setattr(products, "_LARGE", 1 << 14)
    monkeypatch.setattr(products, "_WIDE", 16)
    x, grad, weight = (
        drawn(*shape, seed=k).bfloat16() for k, shape in enumerate([(300, 24), (300, 40), (40, 24)])
    )
    found = products.linear_backward(grad, x, weight, out_dtype=None, needs=(False, True, False))[1]
    exact = grad.t().double() @ x.double()
    assert found is not None
    assert_close(found, exact, 1)
    wide = products.linear(x, weight, None, out_dtype=torch.float32)
    assert_close(wide, x.double() @ weight.double().t(), 30)


def test_bias_with_what_is_added_to_is_refused() -> None:
    assert native.kernels is not None
    room = torch.zeros(16)
    with pytest.raises(ValueError, match="a bias or what is added to, got both"):
        native.kernels.product(*[room.data_ptr()] * 4, 4, 4, 4, False, False, True)


@pytest.mark.parametrize("shape", [(40,), (6, 40), (2, 3, 40), (0, 40)], ids=str)
def test_linear_keeps_the_shape_of_x_in_both_directions(shape: tuple[int, ...], least: str) -> None:
    x, weight, bias = drawn(*shape, seed=0), drawn(5, 40, seed=1), drawn(5, seed=2)
    wide = [t.double().requires_grad_() for t in (x, weight, bias)]
    want = torch.nn.functional.linear(*wide)
    grad = drawn(*want.shape, seed=3)
    assert_close(products.linear(x, weight, bias, out_dtype=None), want.detach(), 300)
    want.backward(grad.double())
    found = products.linear_backward(grad, x, weight, out_dtype=None, needs=(True, True, True))
    for got, leaf in zip(found, wide, strict=True):
        assert got is not None
        assert leaf.grad is not None
        assert_close(got, leaf.grad, 300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_see_nothing_of_others_that_are_nan(dtype: torch.dtype) -> None:
    for inputs in (15, 34, 64, 100):
        x, weight = torch.randn(40, inputs).to(dtype), torch.randn(100, inputs).to(dtype)
        x[1::5] = torch.nan
        grad = torch.randn(40, 100).to(dtype)
        grad[1::5] = torch.nan
        y = products.linear(x, weight, None, out_dtype=None)
        offsets = torch.tensor([17, 40])
        grouped = products.grouped_linear(x, weight.expand(2, -1, -1), offsets, out_dtype=None)
        needs = (True, False, False)
        dx = products.linear_backward(grad, x, weight, out_dtype=None, needs=needs)[0]
        assert dx is not None
        for found in (y, grouped, dx):
            assert found.isnan().any(1).nonzero()[:, 0].tolist() == list(range(1, 40, 5)), inputs
