"""linear and grouped_linear with a float32 result of 16-bit operands: rounded once, both ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import anychip
from anychip import ops
from tests.unit.dispatch.calls import bits

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
UNIT = 2.0**-24
WIDE = pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
DOORS = pytest.mark.parametrize("door", [ops, torch.ops.anychip], ids=["short cut", "library"])


@pytest.fixture(params=["cpu", "reference"], autouse=True)
def implementation(request: pytest.FixtureRequest) -> object:
    anychip.use("cpu")
    with anychip.policy(pin={"linear": request.param, "grouped_linear": request.param}):
        yield request.param


def _drawn(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def _within(got: Tensor, want: Tensor, sizes: Tensor, count: int) -> bool:
    """Half an ULP of the result's type for its own rounding, and one of float32 per term."""
    ulp = torch.finfo(got.dtype).eps * want.abs()
    return bool(((got.double() - want).abs() <= ulp / 2 + count * UNIT * sizes).all())


@WIDE
@DOORS
def test_float32_result_and_gradients_are_rounded_once(door: object, dtype: torch.dtype) -> None:
    linear: Callable[..., Tensor] = door.linear  # type: ignore[attr-defined]
    x, weight, bias = _drawn((2, 9, 130), (17, 130), (17,), dtype=dtype)
    y = linear(x, weight, bias, out_dtype=F32)
    wide = [t.detach().double() for t in (x, weight, bias)]
    want, sizes = (torch.nn.functional.linear(*f) for f in (wide, [t.abs() for t in wide]))
    assert y.dtype == F32
    assert _within(y, want, sizes, 132)
    assert not torch.equal(y, y.to(dtype).float()), "its digits beyond the operands' are there"
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(y, (x, weight, bias), grad)
    rows, inputs = grad.double().reshape(-1, 17), wide[0].reshape(-1, 130)
    parts = ((rows, wide[1]), (rows.t(), inputs), (torch.ones(1, 18).double(), rows))
    for got, (left, right) in zip(found, parts, strict=True):
        assert got.dtype == dtype
        exact, size = left @ right, left.abs() @ right.abs()
        assert _within(got, exact.view(got.shape), size.view(got.shape), 132)


@WIDE
def test_grouped_linear_gives_what_linear_gives_of_each_group(dtype: torch.dtype) -> None:
    x, weight = _drawn((9, 33), (3, 5, 33), dtype=dtype)
    y = ops.grouped_linear(x, weight, torch.tensor([4, 4, 8]), out_dtype=F32)
    parts = [ops.linear(x[a:b], weight[g], out_dtype=F32) for g, a, b in ((0, 0, 4), (2, 4, 8))]
    want = torch.cat([*parts, torch.zeros(1, 5)])
    assert y.dtype == F32
    torch.testing.assert_close(y, want, rtol=0, atol=35 * UNIT * 33 * 16)
    grad = torch.randn(9, 5, generator=torch.Generator().manual_seed(1))
    for got, other in zip(
        torch.autograd.grad(y, (x, weight), grad),
        torch.autograd.grad(want, (x, weight), grad),
        strict=True,
    ):
        assert got.dtype == dtype
        torch.testing.assert_close(got, other, rtol=torch.finfo(dtype).eps, atol=1e-6)


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


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (
            F16,
            ValueError,
            "out_dtype must be torch.bfloat16, which the operands have, or float32; got",
        ),
        (torch.int8, ValueError, "out_dtype must be torch.bfloat16"),
        ("float32", TypeError, "out_dtype must be a torch.dtype or None, got 'float32'"),
        (1, TypeError, "out_dtype must be a torch.dtype or None, got 1"),
    ],
)
def test_other_result_is_refused(wrong: object, error: type[Exception], words: str) -> None:
    x, weight = _drawn((3, 4), (5, 4), dtype=BF16)
    for call in (ops.linear, lambda *a, **k: ops.grouped_linear(*a, torch.tensor([3]), **k)):
        given = (x, weight) if call is ops.linear else (x, weight[None])
        with pytest.raises(error, match=words):
            call(*given, out_dtype=wrong)
