"""Rows over lists of tensors on the host: addresses of all of them, in one native call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anychip.operators.squares import WIDTH
from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import declared

_kernels: Any = native.kernels


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Of each tensor."""
    return [t.data_ptr() for t in tensors]


def held(tensors: Sequence[Tensor]) -> Any:
    """A list as the kernels take it."""
    return _kernels.Tensors(*described(tensors))


def described(tensors: Sequence[Tensor]) -> tuple[list[int], list[int], list[int]]:
    """Addresses, elements, and dtypes."""
    return (
        addresses(tensors),
        [t.numel() for t in tensors],
        [CODES[t.dtype] for t in tensors],
    )


@declared.forward("sums_of_squares")
def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    whole = [t.contiguous() for t in tensors]
    found = torch.empty(len(tensors), WIDTH, dtype=torch.int64)
    _kernels.sums_of_squares(held(whole), found.data_ptr())
    return found


@declared.forward("l2_norm", contiguous=True, accepts=lambda tensors: len(tensors) > 0)
def l2_norm(tensors: Sequence[Tensor]) -> Tensor:
    total = torch.empty((), dtype=torch.float32)
    _kernels.l2_norm(held(tensors), total.data_ptr())
    return total


@declared.forward("clip", contiguous=True)
def clip(tensors: Sequence[Tensor], norm: Tensor, *, max_norm: float) -> None:
    _kernels.clip(held(tensors), norm.data_ptr(), max_norm)


@declared.forward("unscale_and_check", contiguous=True)
def unscale_and_check(grads: Sequence[Tensor], scale: Tensor, found_inf: Tensor) -> None:
    _kernels.unscale_and_check(held(grads), scale.data_ptr(), found_inf.data_ptr())
