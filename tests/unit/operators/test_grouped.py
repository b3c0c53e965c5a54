"""grouped_linear: what is not finite stays in its group; what is refused; one graph for all."""

import math

import pytest
import torch
from torch import Tensor

import anychip
from anychip import ops
from tests.unit.dispatch.calls import bits

NAMES = ("grouped_linear",)


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


@pytest.mark.grid
def test_compiled_call_does_not_look_at_the_offsets() -> None:
    """One graph serves every packing: group sizes are values, not shapes."""
    compiled = torch.compile(ops.grouped_linear, fullgraph=True, backend="aot_eager")
    with anychip.policy(pin={"grouped_linear": "reference"}):
        for lengths in ([2, 3, 5], [0, 10, 0], [4, 4, 1]):
            x, weight, offsets = grouped(lengths, rest=10 - sum(lengths))
            want = row_by_row(x, weight, offsets)
            torch.testing.assert_close(compiled(x, weight, offsets), want, rtol=1e-5, atol=1e-5)
