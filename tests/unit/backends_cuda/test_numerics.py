"""Are torch's switches where a row needs them, and afterwards where they were?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from anychip_cuda.numerics import ExactProducts, SameBits

_C: Any = torch._C


def products() -> tuple[Any, ...]:
    return (
        _C._get_fp32_precision_getter("cuda", "matmul"),
        _C._get_cublas_allow_bf16_reduced_precision_reduction(),
        _C._get_cublas_allow_fp16_reduced_precision_reduction(),
        _C._get_cublas_allow_fp16_accumulation(),
    )


def bits() -> tuple[bool, ...]:
    return (
        _C._get_deterministic_algorithms(),
        _C._get_deterministic_algorithms_warn_only(),
        _C._get_deterministic_fill_uninitialized_memory(),
    )


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """Puts back what a test sets."""
    before = products()
    yield
    _C._set_fp32_precision_setter("cuda", "matmul", before[0])
    _C._set_cublas_allow_bf16_reduced_precision_reduction(*before[1])
    _C._set_cublas_allow_fp16_reduced_precision_reduction(*before[2])
    _C._set_cublas_allow_fp16_accumulation(before[3])
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


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
    with ExactProducts():
        inside = products()
    assert products() == before
    assert inside[0] in ("ieee", "none")
    assert inside[1:] == ((False, True), (False, split), False)


def test_exact_products_after_an_error_are_put_back() -> None:
    _C._set_fp32_precision_setter("cuda", "matmul", "tf32")
    before = products()
    with pytest.raises(KeyError), ExactProducts():
        raise KeyError
    assert products() == before


def test_exact_products_leaves_the_older_interface_usable() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with ExactProducts():
            pass
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("mode", ["off", "on", "warn only"])
@pytest.mark.parametrize("fills", [True, False], ids=["fills", "leaves"])
def test_same_bits_asks_for_deterministic_kernels_and_puts_it_back(mode: str, fills: bool) -> None:
    torch.use_deterministic_algorithms(mode != "off", warn_only=mode == "warn only")
    torch.utils.deterministic.fill_uninitialized_memory = fills
    before = bits()
    with SameBits():
        assert bits() == (True, False, False)
    assert bits() == before
