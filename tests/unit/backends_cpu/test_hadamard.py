"""The native hadamard has the bits of the reference, at every length and in every dtype."""

import pytest
import torch

import anychip
from anychip import operators, ops
from anychip_cpu import native
from tests.unit.dispatch.calls import bits

pytestmark = pytest.mark.skipif(native.kernels is None, reason=str(native.problem))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, 32, 64, 128, 512, 8192])
def test_transform_has_the_bits_of_the_reference(block: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 2, 3 * block, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = x.transpose(0, 1).requires_grad_()
    with anychip.policy(fallback="strict"):
        y = ops.hadamard(x, block=block)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert bits([y]) == bits([operators.hadamard.forward(x.detach(), block=block)])
    ones = torch.ones(x.shape, dtype=dtype)
    assert bits([dx]) == bits([operators.hadamard.forward(ones, block=block)])
