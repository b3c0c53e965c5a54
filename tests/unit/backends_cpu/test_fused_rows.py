"""The cpu backend's fused rows at sizes at which they work by vectors and a rest."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import anychip
from anychip import ops
from anychip_cpu import native, softmax
from tests.unit.dispatch.calls import bits
from tests.unit.operators.exactness import assert_close

pytestmark = pytest.mark.skipif(native.kernels is None, reason=str(native.problem))

ROWS, WIDTH = 301, 1027  # no row ends at a vector's end
LOW = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with anychip.policy(fallback="strict"):
        yield
    torch.set_num_threads(before)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def run(function: Callable[..., Tensor], *args: Tensor) -> list[Tensor]:
    """The output, and gradients for a fixed gradient of it, of 64ths: exact in every dtype."""
    leaves = [a.clone().requires_grad_() for a in args]
    y = function(*leaves)
    grad = (torch.cos(torch.arange(y.numel())) * 64).round().div(64).view(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", ["geglu", "bias_gelu"])
def test_result_is_the_float32_result_rounded_once(name: str, dtype: torch.dtype) -> None:
    shapes = ((ROWS, WIDTH), (ROWS, WIDTH) if name == "geglu" else (WIDTH,))
    args = [normal(*shape, dtype=dtype) for shape in shapes]
    got = run(getattr(ops, name), *args)
    want = run(getattr(ops, name), *(a.float() for a in args))
    for one, other in zip(got, want, strict=True):
        assert bits(one) == bits(other.to(dtype))


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_softmax_gradient_follows_the_equation(dtype: torch.dtype) -> None:
    grad, y = normal(ROWS, WIDTH, dtype=dtype), torch.rand(ROWS, WIDTH).div(WIDTH).to(dtype)
    needs = (True, False)
    got, _ = softmax.softmax_backward(grad, y, None, scale=0.5, causal=False, needs=needs)
    wide, slope = y.double(), grad.double()
    want = wide * (slope - (wide * slope).sum(-1, keepdim=True)) * 0.5
    # The sum of 1027 products of numbers up to 4 / 1027 is what may cancel.
    assert_close(got, want, 16, ulps=0.51)


SHAPES: dict[str, Any] = {"no rows": (0, WIDTH), "no columns": (ROWS, 0), "0-dim": ()}


@pytest.mark.parametrize("label", SHAPES)
def test_result_of_an_empty_tensor_and_of_a_number(label: str) -> None:
    gate, up = (normal(*SHAPES[label], dtype=torch.bfloat16) for _ in range(2))
    got = run(ops.geglu, gate, up)
    want = run(ops.geglu, gate.float(), up.float())
    for one, other in zip(got, want, strict=True):
        assert bits(one) == bits(other.bfloat16())
