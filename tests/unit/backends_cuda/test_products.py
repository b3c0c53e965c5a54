"""The mapped rows of products: on the host, where torch has the same operators, against float64."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from anychip import operators as specs
from anychip_cuda import products
from tests.unit.operators.exactness import assert_close as assert_near

# Rows, inputs, outputs: none of a size, one, odd, and a multiple of the grouped kernel's 16 bytes.
SIZES = [((3,), 8, 5), ((2, 4), 33, 17), ((0,), 4, 3), ((5, 2, 2), 64, 16)]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def assert_close(got: Tensor, want: Tensor, count: float) -> None:
    """Near in the sense of the references' tests, and finite: NaN is as far as nothing there."""
    assert got.isfinite().all()
    assert_near(got, want, count)


def turned(x: Tensor) -> Tensor:
    """The same values in memory the other way round."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES, ids=str)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("place", [torch.Tensor.contiguous, turned], ids=["dense", "turned"])
def test_linear_equals_the_product_in_float64(
    rows: tuple[int, ...], inputs: int, outputs: int, with_bias: bool, place: Any
) -> None:
    x, weight = place(drawn(*rows, inputs)), place(drawn(outputs, inputs, seed=1))
    bias = drawn(outputs, seed=2) if with_bias else None
    grad = place(drawn(*rows, outputs, seed=3))
    y = products.linear(x, weight, bias)
    wide = [t if t is None else t.double().requires_grad_() for t in (x, weight, bias)]
    want = torch.nn.functional.linear(*wide)  # type: ignore[arg-type]
    assert_close(y, want.detach(), inputs + 2.0)
    assert y.is_contiguous()
    leaves = [t for t in wide if t is not None]
    wanted = torch.autograd.grad(want, leaves, grad.double())
    found = products.linear_backward(grad, x, weight, needs=(True, True, with_bias))
    assert found[2] is None or with_bias
    for got, expected in zip((g for g in found if g is not None), wanted, strict=True):
        assert_close(got, expected, max(inputs, outputs, x.numel() // inputs) + 2.0)


def test_linear_backward_gives_only_what_is_needed() -> None:
    x, weight, grad = drawn(3, 4), drawn(2, 4), drawn(3, 2)
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        found = products.linear_backward(grad, x, weight, needs=needs)
        assert tuple(g is not None for g in found) == needs


def test_linear_bias_gradient_of_16_bit_rows_is_summed_in_float32() -> None:
    grad = torch.ones(1000, 1, dtype=torch.bfloat16)  # sums in 16 bits stop at 256
    x, weight = torch.ones(1000, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    dbias = products.linear_backward(grad, x, weight, needs=(False, False, True))[2]
    assert dbias is not None
    assert dbias.tolist() == [1000.0]


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
        products.linear(drawn(2, 3), drawn(4, 3), None)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert seen == ["ieee"]


@pytest.mark.parametrize("shape", [(4,), (2, 3), (), (0,)], ids=str)
def test_embedding_takes_rows_of_the_weight(shape: tuple[int, ...]) -> None:
    weight = drawn(10, 7)
    indices = torch.randint(10, shape, generator=torch.Generator().manual_seed(0))
    y = products.embedding(indices, weight)
    assert torch.equal(y, specs.embedding.forward(indices, weight))
    assert y.shape == (*shape, 7)


# Ends of groups, rows in all: empty groups at either end and in the middle, rows without a group.
GROUPS = [([3, 3, 8], 8), ([4, 5], 7), ([0, 6], 6), ([6, 6], 6), ([0, 0], 3), ([2, 2, 2, 9], 11)]


def by_group(x: Tensor, weight: Tensor, ends: Sequence[int]) -> Tensor:
    """y in float64, with rows of no group that are 0."""
    y = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float64)
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        y[start:end] = x.double()[start:end] @ weight.double()[group].t()
    return y


def gradients(x: Tensor, weight: Tensor, ends: Sequence[int], grad: Tensor) -> Sequence[Tensor]:
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    return torch.autograd.grad(
        (by_group_differentiably(*leaves, ends) * grad.double()).sum(), leaves
    )


def by_group_differentiably(x: Tensor, weight: Tensor, ends: Sequence[int]) -> Tensor:
    parts = [
        x[start:end] @ weight[group].t()
        for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    return torch.cat([*parts, 0.0 * x[ends[-1] :] @ weight[0].t()])


@pytest.mark.parametrize(("ends", "rows"), GROUPS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
def test_grouped_linear_by_group_equals_float64(
    ends: list[int], rows: int, dtype: torch.dtype
) -> None:
    x, weight = drawn(rows, 9), drawn(len(ends), 5, 9, seed=1)
    offsets, grad = torch.tensor(ends, dtype=dtype), drawn(rows, 5, seed=2)
    assert_close(
        products.grouped_linear_by_group(x, weight, offsets), by_group(x, weight, ends), 11.0
    )
    found = products.grouped_linear_backward_by_group(grad, x, weight, offsets, needs=(True, True))
    for got, want in zip(found, gradients(x, weight, ends, grad), strict=True):
        assert got is not None
        assert_close(got, want, rows + 11.0)


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
def test_grouped_linear_by_torchs_kernel_equals_float64(
    ends: list[int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_grouped_mm", like_the_device(torch._grouped_mm))
    bf16 = torch.bfloat16
    x, weight = drawn(rows, 16, dtype=bf16), drawn(len(ends), 8, 16, dtype=bf16, seed=1)
    offsets, grad = torch.tensor(ends), drawn(rows, 8, dtype=bf16, seed=2)
    # Views that begin at an odd element, which the kernel does not take.
    shifted = torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    y = products.grouped_linear(shifted, turned(weight), offsets)
    found = products.grouped_linear_backward(turned(grad), x, weight, offsets, needs=(True, True))
    assert_close(y, by_group(x, weight, ends), 18.0)
    for got, want in zip(found, gradients(x, weight, ends, grad), strict=True):
        assert got is not None
        assert got.is_contiguous()
        assert_close(got, want, rows + 18.0)


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
    capability: tuple[int, int],
    dtype: torch.dtype,
    inputs: int,
    outputs: int,
    taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "capability", lambda tensor: capability)
    x, weight = torch.zeros(4, inputs, dtype=dtype), torch.zeros(2, outputs, inputs, dtype=dtype)
    assert products._is_grouped(x, weight, torch.tensor([1, 4])) is taken


def test_capability_of_a_host_tensor_is_none_of_a_device() -> None:
    assert products.capability(torch.zeros(1)) == (0, 0)
