"""linear and grouped_linear with a float32 result of 16-bit operands: rounded once, both ways."""

import pytest
import torch
from torch import Tensor

import anychip
from anychip import ops
from tests.unit.dispatch.calls import bits

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(params=["cpu", "reference"], autouse=True)
def implementation(request: pytest.FixtureRequest) -> object:
    anychip.use("cpu")
    with anychip.policy(pin={"linear": request.param, "grouped_linear": request.param}):
        yield request.param


def _drawn(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def test_autocast_lowers_the_operands_and_leaves_the_result() -> None:
    x, weight = (t.detach() for t in _drawn((3, 40), (5, 40), dtype=F32))
    want = ops.linear(x.to(BF16), weight.to(BF16), out_dtype=F32)
    with torch.autocast("cpu", BF16):
        assert bits(ops.linear(x, weight, out_dtype=F32)) == bits(want)


def test_the_dtype_of_x_asked_for_gives_the_same_bits() -> None:
    x, weight = (t.detach() for t in _drawn((3, 40), (5, 40), dtype=BF16))
    assert bits(ops.linear(x, weight, out_dtype=BF16)) == bits(ops.linear(x, weight))


@pytest.mark.grid
def test_compiled_call_keeps_the_dtype() -> None:
    x, weight = _drawn((3, 40), (5, 40), dtype=BF16)
    compiled = torch.compile(
        lambda *args: ops.linear(*args, out_dtype=F32), fullgraph=True, backend="aot_eager"
    )
    found = [f(x, weight) for f in (compiled, lambda *args: ops.linear(*args, out_dtype=F32))]
    assert bits(found[0]) == bits(found[1])
    grads = [torch.autograd.grad(y.sum(), (x, weight)) for y in found]
    assert bits(grads[0]) == bits(grads[1])
