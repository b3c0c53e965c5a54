"""bias_gelu and bias_dropout_add natively: rows of every width, and those that have numbers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import anychip
from anychip import operators, ops
from anychip_cpu import native
from tests.unit.dispatch.calls import bits
from tests.unit.operators.exactness import assert_close

pytestmark = pytest.mark.skipif(native.kernels is None, reason=str(native.problem))

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Narrow rows are taken together; of wide ones the random words come in parts.
SHAPES = [(0, 8), (5, 0), (1, 1), (700, 1), (301, 3), (97, 64), (33, 255), (9, 256), (5, 2051)]


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    with anychip.policy(fallback="strict"):
        yield


def _normal(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _both(operator: str, *args: Any, **attrs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of float tensors: ours, and those of the reference."""
    found = []
    for pin in (None, "reference"):
        given = [a.clone().requires_grad_() if _is_float(a) else a for a in args]
        leaves = [a for a in given if _is_float(a)]
        with anychip.policy(pin={} if pin is None else {operator: pin}):
            y = getattr(ops, operator)(*given, **attrs)
            grad = _normal(9, *y.shape, dtype=y.dtype)
            found.append([y.detach(), *torch.autograd.grad(y, leaves, grad)])
    return found[0], found[1]


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_gelu_of_rows_of_any_width(shape: tuple[int, int], dtype: torch.dtype) -> None:
    args = (_normal(0, *shape, dtype=dtype), _normal(1, shape[1], dtype=torch.float32))
    (y, dx, dbias), (want, want_dx, want_dbias) = _both("bias_gelu", *args, approximate="tanh")
    assert_close(y, want.double(), 12)
    assert_close(dx, want_dx.double(), 12)
    assert_close(dbias, want_dbias.double(), 60 + shape[0])


@pytest.mark.parametrize("numbers", [None, "in order", "apart"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_dropout_add_has_the_bits_of_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, numbers: str | None
) -> None:
    rng = torch.tensor([3, 2**32 - 5])
    x, residual = _normal(0, *shape, dtype=dtype), _normal(1, *shape, dtype=dtype)
    bias = _normal(2, shape[1], dtype=torch.float32)
    rows = None
    if numbers is not None:
        rows = torch.arange(shape[0]) - 2
        rows = rows if numbers == "in order" else rows * rows - 5
    attrs = {"p": 0.3} if rows is None else {"p": 0.3, "width": shape[1]}
    ours, want = _both("bias_dropout_add", x, residual, rng, bias, rows, **attrs)
    assert bits(ours[:3]) == bits(want[:3])
    assert_close(ours[3], want[3].double(), 60 + shape[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(301, 3), (9, 256), (5, 2051)], ids=str)
def test_gradient_of_a_dropped_norm_is_dropped_where_the_sum_was(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    rng = torch.tensor([3, 7])
    x, residual = _normal(0, *shape, dtype=dtype), _normal(1, *shape, dtype=dtype)
    x.requires_grad_(), residual.requires_grad_()
    y, _ = ops.dropout_add_rms_norm(x, residual, torch.ones(shape[1]).to(dtype), rng, p=0.3)
    dx, dresidual = torch.autograd.grad(y, (x, residual), _normal(9, *shape, dtype=dtype))
    kept = operators.dropout.forward(torch.ones(shape), rng, p=0.3) != 0
    assert not dx[~kept].any()
    assert_close(dx[kept], dresidual[kept].double() / 0.7, 4, ulps=1.5)
