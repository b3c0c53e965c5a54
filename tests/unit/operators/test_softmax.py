"""softmax: rows that see nothing, twice differentiated; what the bias gets; what is refused."""

import math

import pytest
import torch
from torch import Tensor

from anychip import ops
from tests.unit.dispatch.calls import bits

NAMES = ("softmax",)
pytestmark = pytest.mark.usefixtures("pin")


HIDDEN = {
    "mask": lambda x: (x, torch.zeros(3, 1, dtype=torch.bool), None),
    "bias": lambda x: (x, None, torch.full((5,), -math.inf)),
    "scores": lambda x: (torch.full_like(x, -math.inf), None, None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("by", HIDDEN)
def test_row_without_a_visible_key_is_zero_with_zero_gradient(by: str, dtype: torch.dtype) -> None:
    x, mask, bias = HIDDEN[by](torch.randn(3, 5, dtype=dtype))
    x.requires_grad_()
    y = ops.softmax(x, mask, bias)
    assert bits(y) == bits(torch.zeros(3, 5, dtype=dtype))
    (first,) = torch.autograd.grad(y, x, torch.randn(3, 5).to(dtype), create_graph=True)
    assert not first.any()
    (second,) = torch.autograd.grad(first.sum(), x, allow_unused=True, materialize_grads=True)
    assert not second.any()


def test_function_transforms_of_a_hidden_row_give_no_nan(pin: str) -> None:
    x, mask = torch.randn(2, 3), torch.tensor([[True], [False]])
    loss = lambda a: ops.softmax(a, mask)[:, 0].sum()  # noqa: E731
    gradient = torch.func.grad(loss)(x)
    assert bool(torch.isfinite(gradient).all())
    assert gradient[0].any()
    assert not gradient[1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradient_of_the_bias_is_added_up_in_float32(dtype: torch.dtype) -> None:
    """Each row gives 1/4 and -1/4: a sum in bfloat16 stops at 64, one in float16 at 512."""
    x, bias = torch.zeros(3001, 2, dtype=dtype), torch.zeros(2, requires_grad=True)
    y = ops.softmax(x, None, bias)
    y.backward(torch.tensor([1.0, 0.0], dtype=dtype).expand(3001, 2))
    assert bias.grad is not None
    assert bias.grad.dtype == torch.float32
    assert bias.grad.tolist() == [750.25, -750.25]


def test_compiled_call_of_any_width_takes_a_bias_of_that_width() -> None:
    def call(x: Tensor, bias: Tensor, biased: bool) -> Tensor:
        return ops.softmax(x, None, bias if biased else None)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    bias = torch.randn(5)
    compiled(torch.randn(3, 7), bias, False)  # from the second width on it is a symbol
    x = torch.randn(3, 5)
    torch.testing.assert_close(compiled(x, bias, True), call(x, bias, True))


def test_compiled_call_gives_the_bias_its_gradient() -> None:
    compiled = torch.compile(ops.softmax, backend="aot_eager", fullgraph=True)
    x, bias = torch.randn(3, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    found = [
        torch.autograd.grad(f(x, None, bias, scale=0.5).square().sum(), (x, bias))
        for f in (compiled, ops.softmax)
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
