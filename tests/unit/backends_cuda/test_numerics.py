"""Are torch's switches where a row needs them, and afterwards where they were?"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from anychip_cuda.numerics import exact_convolutions, exact_products

_C: Any = torch._C


def products() -> tuple[Any, ...]:
    return (
        _C._get_fp32_precision_getter("cuda", "matmul"),
        _C._get_cublas_allow_bf16_reduced_precision_reduction(),
        _C._get_cublas_allow_fp16_reduced_precision_reduction(),
        _C._get_cublas_allow_fp16_accumulation(),
    )


def convolutions() -> tuple[Any, ...]:
    precision = _C._get_fp32_precision_getter("cuda", "conv")
    return precision, _C._get_cudnn_deterministic(), _C._get_cudnn_benchmark()


def set_convolutions(precision: str, deterministic: bool, benchmark: bool) -> None:
    _C._set_fp32_precision_setter("cuda", "conv", precision)
    _C._set_cudnn_deterministic(deterministic)
    _C._set_cudnn_benchmark(benchmark)


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """Puts back what a test sets."""
    before, of_convolutions = products(), convolutions()
    yield
    set_convolutions(*of_convolutions)
    _C._set_fp32_precision_setter("cuda", "matmul", before[0])
    _C._set_cublas_allow_bf16_reduced_precision_reduction(*before[1])
    _C._set_cublas_allow_fp16_reduced_precision_reduction(*before[2])
    _C._set_cublas_allow_fp16_accumulation(before[3])


@pytest.mark.parametrize("precision", ["tf32", "ieee", "none"])
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("sums", [True, False], ids=["half sums", "float sums"])
def test_exact_products_switches_off_what_costs_digits_and_puts_it_back(
    precision: str, split: bool, sums: bool
) -> None:
    _C._set_fp32_precision_setter("cuda", "matmul", precision)
    _C._set_cublas_allow_bf16_reduced_precision_reduction(True, True)
    _C._set_cublas_allow_fp16_reduced_precision_reduction(split, split)
    _C._set_cublas_allow_fp16_accumulation(sums)
    before = products()
    with exact_products:
        inside = products()
    assert products() == before
    assert inside[0] in ("ieee", "none")
    assert inside[1:] == ((False, True), (False, split), False)


def test_exact_products_after_an_error_are_put_back() -> None:
    _C._set_fp32_precision_setter("cuda", "matmul", "tf32")
    before = products()
    with pytest.raises(KeyError), exact_products:
        raise KeyError
    assert products() == before


@pytest.mark.parametrize("switched", [("tf32", False, True), ("ieee", True, False)])
def test_exact_convolutions_switches_off_what_costs_digits_and_puts_it_back(
    switched: tuple[str, bool, bool],
) -> None:
    set_convolutions(*switched)
    with exact_convolutions:
        assert convolutions() == ("ieee", True, False)
    assert convolutions() == switched


def test_exact_products_leaves_the_older_interface_usable() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with exact_products:
            pass
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    "exact", [exact_products, exact_convolutions], ids=["products", "convolutions"]
)
def test_calls_that_overlap_leave_the_switches_as_they_were(exact: Any) -> None:
    """As those of two threads do."""
    _C._set_fp32_precision_setter("cuda", "matmul", "tf32")
    before = products(), convolutions(), torch.backends.cudnn.allow_tf32
    exact.__enter__()
    inside = products(), convolutions()
    exact.__enter__()
    exact.__exit__(None, None, None)
    assert (products(), convolutions()) == inside
    exact.__exit__(None, None, None)
    assert (products(), convolutions(), torch.backends.cudnn.allow_tf32) == before
    assert inside != before[:2]
