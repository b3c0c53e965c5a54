"""Fused operators against the operators that they fuse: the same numbers, rounded once."""

import pytest
import torch
from torch import Tensor

from anychip import ops
from tests.unit.dispatch.calls import DTYPES, bits

RNG = torch.tensor([5, 2**32 - 9])
NAMES = [
    "add_rms_norm", "add_layer_norm", "bias_dropout_add", "dropout_add_rms_norm",
    "dropout_add_layer_norm", "rms_norm", "layer_norm", "dropout",
]  # fmt: skip
pytestmark = pytest.mark.usefixtures("pin")


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


# A norm after the residual's sum


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_add_norm_has_the_bits_of_a_sum_and_a_norm(norm: str, dtype: torch.dtype) -> None:
    x, residual, weight = (normal(*s, dtype=dtype) for s in ((7, 33), (7, 33), (33,)))
    y, total = getattr(ops, f"add_{norm}")(x, residual, weight, eps=1e-5)
    assert bits(total) == bits(x + residual)
    assert bits(y) == bits(getattr(ops, norm)(x + residual, weight, eps=1e-5))


def test_add_norm_gradients_of_x_and_residual_are_two_tensors() -> None:
    x, residual = normal(4, 8).requires_grad_(), normal(4, 8).requires_grad_()
    y, total = ops.add_rms_norm(x, residual, normal(8))
    dx, dresidual = torch.autograd.grad((y, total), (x, residual), (normal(4, 8), normal(4, 8)))
    assert bits(dx) == bits(dresidual)
    assert dx.data_ptr() != dresidual.data_ptr()


# Dropout between a bias and the residual


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_bias_dropout_add_in_float32_has_the_bits_of_its_parts(p: float) -> None:
    x, residual, bias = normal(9, 31), normal(9, 31), normal(31)
    got = ops.bias_dropout_add(x, residual, RNG, bias, p=p)
    assert bits(got) == bits(residual + ops.dropout(x + bias, RNG, p=p))
    got = ops.bias_dropout_add(x, residual, RNG, p=p)
    assert bits(got) == bits(residual + ops.dropout(x, RNG, p=p))


# Dropout before the residual's sum and a norm


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_dropout_add_norm_has_the_bits_of_its_parts(
    norm: str, dtype: torch.dtype, p: float
) -> None:
    x, residual, weight = (normal(*s, dtype=dtype) for s in ((7, 33), (7, 33), (33,)))
    y, total = getattr(ops, f"dropout_add_{norm}")(x, residual, weight, RNG, p=p, eps=1e-5)
    assert bits(total) == bits(ops.bias_dropout_add(x, residual, RNG, p=p))
    assert bits(y) == bits(getattr(ops, norm)(total, weight, eps=1e-5))
