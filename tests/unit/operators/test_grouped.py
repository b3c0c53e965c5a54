"""grouped_linear: groups of any length, rows of no group, and gradients that repeat."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import anychip
from anychip import ops
from anychip.conformance.oracles.reference import InFloat64
from tests.unit.dispatch.calls import DTYPES, SPECS, bits


@pytest.fixture(params=["cpu", "reference"])
def pin(request: pytest.FixtureRequest) -> Iterator[str]:
    with anychip.policy(pin={"grouped_linear": request.param}):
        yield request.param


def grouped(
    lengths: list[int], rest: int = 0, inputs: int = 16, outputs: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(len(lengths))
    x = torch.randn(sum(lengths) + rest, inputs)
    offsets = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    return x, torch.randn(len(lengths), outputs, inputs), offsets


def row_by_row(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The definition: the group of a row is the first one that ends after it."""
    y = torch.zeros(x.shape[0], weight.shape[1], dtype=x.dtype)
    for row in range(x.shape[0]):
        ends_after = [g for g, end in enumerate(offsets.tolist()) if row < end]
        if ends_after:
            y[row] = weight[ends_after[0]] @ x[row]
    return y


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 6), max_size=5), rest=st.integers(0, 3))
def test_grouped_linear_equals_the_definition_row_by_row(lengths: list[int], rest: int) -> None:
    x, weight, offsets = grouped(lengths, rest)
    want = row_by_row(x.double(), weight.double(), offsets)
    for implementation in ("cpu", "reference"):
        with anychip.policy(pin={"grouped_linear": implementation}):
            got = ops.grouped_linear(x, weight, offsets)
        # Sums of 16 products of size 1.
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
        assert not got[sum(lengths) :].any()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_grouped_linear_equals_the_grouped_product_of_torch(dtype: torch.dtype, pin: str) -> None:
    x, weight, offsets = (
        t.to(dtype) if t.is_floating_point() else t for t in grouped([3, 0, 9, 4])
    )
    want = torch._grouped_mm(x, weight.transpose(-2, -1), offs=offsets.int())
    got = ops.grouped_linear(x, weight, offsets)
    near = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}[dtype]
    torch.testing.assert_close(got, want, rtol=near, atol=near)


def test_gradients_are_sums_over_the_rows_of_the_group_alone(pin: str) -> None:
    x, weight, offsets = grouped([2, 0, 5], rest=3)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    y = ops.grouped_linear(*leaves, offsets)
    slope = torch.randn(y.shape)
    dx, dweight = torch.autograd.grad(y, leaves, slope)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    want = torch.autograd.grad(row_by_row(*exact, offsets), exact, slope.double())
    for got, other in zip((dx, dweight), want, strict=True):
        torch.testing.assert_close(got.double(), other, rtol=1e-5, atol=1e-5)
    assert not dx[7:].any()
    assert not dweight[1].any()


def test_gradients_have_the_same_bits_in_every_run(pin: str) -> None:
    x, weight, offsets = grouped([130, 0, 67, 3], rest=2, inputs=33, outputs=29)
    slope, found = torch.randn(202, 29), []
    for _ in range(5):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = ops.grouped_linear(*leaves, offsets)
        found.append(bits([y, torch.autograd.grad(y, leaves, slope)]))
    assert all(other == found[0] for other in found)


def test_what_is_not_finite_stays_in_its_group(pin: str) -> None:
    x, weight, offsets = grouped([3, 4, 2], rest=2)
    clean = ops.grouped_linear(x, weight, offsets)
    slope = torch.ones_like(clean)
    x[4, 0], x[10, 0], weight[1, 0, 0] = math.nan, math.nan, math.inf
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    y = ops.grouped_linear(*leaves, offsets)
    others = [0, 1, 2, 7, 8]
    torch.testing.assert_close(y[others], clean[others], rtol=1e-6, atol=1e-6)
    assert bits(y[9:]) == bits(torch.zeros(2, 8))
    assert y[4].isnan().all()
    slope[9:] = math.nan
    dx, dweight = torch.autograd.grad(y, leaves, slope)
    assert dx[others].isfinite().all()
    assert not dx[9:].any()
    assert dweight[[0, 2]].isfinite().all()
    assert dweight[1].isnan().any()


def test_offsets_of_32_bits_give_the_bits_of_64(pin: str) -> None:
    x, weight, offsets = grouped([2, 0, 5, 1], rest=3)
    found = []
    for ends in (offsets, offsets.int()):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = ops.grouped_linear(*leaves, ends)
        found.append(bits([y, torch.autograd.grad(y.square().sum(), leaves)]))
    assert found[0] == found[1]


@pytest.mark.parametrize("width", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("ends", [[3, 2, 5], [0, 1, 6], [-1, 2, 3]], ids=str)
def test_offsets_that_are_no_ends_are_refused(
    ends: list[int], width: torch.dtype, pin: str
) -> None:
    x, weight, _ = grouped([1, 2, 2])
    with pytest.raises(
        ValueError, match=r"grouped_linear: offsets must be sorted, from 0 to the 5"
    ):
        ops.grouped_linear(x, weight, torch.tensor(ends, dtype=width))


def test_compiled_call_does_not_look_at_the_offsets() -> None:
    """One graph serves every packing: group sizes are values, not shapes."""
    compiled = torch.compile(ops.grouped_linear, fullgraph=True, backend="aot_eager")
    with anychip.policy(pin={"grouped_linear": "reference"}):
        for lengths in ([2, 3, 5], [0, 10, 0], [4, 4, 1]):
            x, weight, offsets = grouped(lengths, rest=10 - sum(lengths))
            want = row_by_row(x, weight, offsets)
            torch.testing.assert_close(compiled(x, weight, offsets), want, rtol=1e-5, atol=1e-5)


def test_reference_backward_is_the_derivative_of_the_forward_and_so_is_its_own() -> None:
    spec, offsets = SPECS["grouped_linear"], torch.tensor([2, 2, 4])
    torch.manual_seed(0)
    leaves = [torch.randn(5, 3).double().requires_grad_(), torch.randn(3, 2, 3).double()]
    leaves[1].requires_grad_()
    slope = torch.randn(5, 2).double()

    def gradients(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        assert spec.backward is not None
        with InFloat64():
            return tuple(spec.backward(slope, x, weight, offsets, needs=(True, True)))

    with InFloat64():
        y = spec.forward(*leaves, offsets)
    want = torch.autograd.grad(y, leaves, slope)
    torch.testing.assert_close(gradients(*leaves), want, rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradcheck(gradients, leaves)
