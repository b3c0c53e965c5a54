"""The mapped rows of products: switches, groups as torch's kernel takes them, which row is asked.

Their values, and those of the row by groups, are asked in test_mapped.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from anychip import operators as specs
from anychip_cuda import products
from anychip_cuda.table import make_table
from tests.unit.backends_cuda.conftest import Chip, drawn
from tests.unit.operators.exactness import assert_close as assert_near


def assert_close(got: Tensor, want: Tensor, count: float) -> None:
    """Near in the sense of the references' tests, and finite: NaN is as far as nothing there."""
    assert got.isfinite().all()
    assert_near(got, want, count)


def turned(x: Tensor) -> Tensor:
    """The same values in memory the other way round."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x


def test_linear_backward_gives_only_what_is_needed() -> None:
    x, weight, grad = drawn(3, 4), drawn(2, 4), drawn(3, 2)
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        found = products.linear_backward(grad, x, weight, out_dtype=None, needs=needs)
        assert tuple(g is not None for g in found) == needs


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("rows", [(7,), (2, 3), (), (0,)], ids=str)
def test_linear_of_16_bits_gives_float32_by_the_product_that_cublas_has(
    rows: tuple[int, ...], with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host torch has no such product: the row refuses; the call is what is looked at here."""
    product, narrow = torch.mm, torch.bfloat16
    x, weight = drawn(*rows, 33, dtype=narrow), drawn(5, 33, dtype=narrow, seed=1)
    bias = drawn(5, dtype=narrow, seed=2) if with_bias else None
    forward = make_table(None).rows("linear", "forward")[0]
    assert forward.accepts is not None
    assert not forward.accepts(x, weight, bias, out_dtype=torch.float32)
    assert forward.accepts(x, weight, bias, out_dtype=narrow)
    monkeypatch.setattr(
        torch, "mm", lambda a, b, *, out_dtype: product(a.to(out_dtype), b.to(out_dtype))
    )
    y = products.linear(x, weight, bias, out_dtype=torch.float32)
    assert y.dtype == torch.float32
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    assert_close(y, torch.nn.functional.linear(*wide), 35.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [(), (5,), (0,)], ids=str)
def test_bias_of_a_small_product_is_added_before_the_one_rounding(
    rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS rounds in between, as it does here, and torch does for a single row."""
    product, narrow = torch.mm, torch.bfloat16
    monkeypatch.setattr(
        torch.nn.functional, "linear",
        lambda a, b, c: product(a.float(), b.float().t()).to(narrow) + c,
    )  # fmt: skip
    monkeypatch.setattr(
        torch, "mm", lambda a, b, *, out_dtype: product(a.to(out_dtype), b.to(out_dtype))
    )
    monkeypatch.setattr(products, "_has_product", lambda *_: True)
    x, weight = drawn(*rows, 33, dtype=narrow), drawn(64, 33, dtype=narrow, seed=1)
    bias = drawn(64, dtype=narrow, seed=2)
    y = products.linear(x, weight, bias, out_dtype=None)
    wide = x.double() @ weight.double().t() + bias.double()
    assert y.shape == wide.shape
    assert_close(y, wide, 35.0)
    apart = (y.double() - wide.to(narrow).double()).abs()
    assert bool((apart <= 2.0**-16 * wide.abs().clamp(min=1.0)).all())


def test_linear_takes_a_float32_gradient_unrounded() -> None:
    narrow = torch.bfloat16
    x, weight = drawn(9, 33, dtype=narrow), drawn(5, 33, dtype=narrow, seed=1)
    grad = drawn(9, 5, seed=3)
    found = products.linear_backward(
        grad, x, weight, out_dtype=torch.float32, needs=(True, True, True)
    )
    wide = (grad.double() @ weight.double(), grad.double().t() @ x.double(), grad.double().sum(0))
    for got, want in zip(found, wide, strict=True):
        assert got is not None
        assert torch.equal(got, want.to(narrow))


def test_linear_bias_gradient_of_16_bit_rows_is_summed_in_float32() -> None:
    grad = torch.ones(1000, 1, dtype=torch.bfloat16)  # sums in 16 bits stop at 256
    x, weight = torch.ones(1000, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    dbias = products.linear_backward(grad, x, weight, out_dtype=None, needs=(False, False, True))[2]
    assert dbias is not None
    assert dbias.tolist() == [1000.0]


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (300, 264), (0, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_bias_gradient_is_the_sum_of_the_columns_by_the_kernel(
    chip: Chip, dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_LONG", 0)
    grad, x, weight = drawn(*shape, dtype=dtype), drawn(shape[0], 1), drawn(shape[1], 1)
    attrs: Any = {"out_dtype": None, "needs": (False, False, True)}
    dx, dweight, dbias = chip.call("linear", "backward", grad, x, weight, **attrs)
    assert dx is dweight is None
    limit = shape[0] * 2.0**-24 * grad.double().abs().sum(0)
    assert bool(((dbias.double() - grad.double().sum(0)).abs() <= limit).all())


def test_rows_of_products_hold_the_switches_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cuBLAS would be told during the call, as the process allows TF32."""
    seen: list[str] = []
    inner = torch.nn.functional.linear

    def spy(*args: Any) -> Tensor:
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return inner(*args)

    monkeypatch.setattr(torch.nn.functional, "linear", spy)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        products.linear(drawn(2, 3), drawn(4, 3), None, out_dtype=None)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert seen == ["ieee"]


# Ends of groups, rows in all: empty groups at either end and in the middle, rows without a group.
GROUPS = [([3, 3, 8], 8), ([4, 5], 7), ([0, 6], 6), ([6, 6], 6), ([0, 0], 3), ([2, 2, 2, 9], 11)]


def like_the_device(inner: Any) -> Any:
    """torch's grouped product with the device's conditions, and NaN where it writes nothing."""

    def grouped(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        assert offs.dtype == torch.int32
        for t in (a, b):
            row = max(s for s in t.stride()[-2:])
            assert t.data_ptr() % 16 == 0
            assert row * t.element_size() % 16 == 0
            assert 1 in t.stride()[-2:]
        y: Tensor = inner(a, b, offs=offs)
        if y.dim() == 2:
            y[int(offs[-1]) :] = torch.nan
        else:
            y[torch.diff(offs, prepend=offs.new_zeros(1)) == 0] = torch.nan
        return y

    return grouped


@pytest.mark.parametrize(("ends", "rows"), GROUPS, ids=str)
def test_grouped_linear_by_torchs_kernel_equals_the_reference(
    ends: list[int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_grouped_mm", like_the_device(torch._grouped_mm))
    bf16 = torch.bfloat16
    x, weight = drawn(rows, 16, dtype=bf16), drawn(len(ends), 8, 16, dtype=bf16, seed=1)
    offsets, grad = torch.tensor(ends), drawn(rows, 8, dtype=bf16, seed=2)
    # Views that begin at an odd element, which the kernel does not take.
    shifted = torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    y = products.grouped_linear(shifted, turned(weight), offsets, out_dtype=None)
    found = products.grouped_linear_backward(
        turned(grad), x, weight, offsets, out_dtype=None, needs=(True, True)
    )
    wide, same = (x.float(), weight.float(), offsets), {"out_dtype": None}
    assert_close(y, specs.grouped_linear.forward(*wide, **same).double(), 18.0)
    assert specs.grouped_linear.backward is not None
    wanted = specs.grouped_linear.backward(grad.float(), *wide, **same, needs=(True, True))
    for got, want in zip(found, wanted, strict=True):
        assert got is not None
        assert got.is_contiguous()
        assert_close(got, want.double(), rows + 18.0)


@pytest.mark.parametrize(
    ("capability", "dtype", "inputs", "outputs", "taken"),
    [
        ((9, 0), torch.bfloat16, 16, 8, True), ((10, 0), torch.bfloat16, 16, 8, True),
        ((8, 0), torch.bfloat16, 16, 8, False), ((12, 0), torch.bfloat16, 16, 8, False),
        ((0, 0), torch.bfloat16, 16, 8, False), ((9, 0), torch.float16, 16, 8, False),
        ((9, 0), torch.bfloat16, 12, 8, False), ((9, 0), torch.bfloat16, 16, 9, False),
        ((9, 0), torch.bfloat16, 0, 8, False),
    ],
)  # fmt: skip
def test_torchs_grouped_kernel_is_asked_only_for_what_it_takes(
    capability: tuple[int, int], dtype: torch.dtype, inputs: int, outputs: int, taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(products, "capability", lambda tensor: capability)
    x, weight = torch.zeros(4, inputs, dtype=dtype), torch.zeros(2, outputs, inputs, dtype=dtype)
    offsets = torch.tensor([1, 4])
    assert products._is_grouped(x, weight, offsets, out_dtype=None) is taken
    assert not products._is_grouped(x, weight, offsets, out_dtype=torch.float32)


def test_capability_of_a_host_tensor_is_none_of_a_device() -> None:
    assert products.capability(torch.zeros(1)) == (0, 0)
