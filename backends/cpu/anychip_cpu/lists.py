"""Rows over lists of tensors on the host: addresses of all of them, in one native call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anychip.operators.partials import grid_places
from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import declared

_kernels: Any = native.kernels


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Of each tensor."""
    return [t.data_ptr() for t in tensors]


def described(tensors: Sequence[Tensor]) -> tuple[list[int], list[int], list[int]]:
    """Addresses, elements, and dtypes."""
    return (
        addresses(tensors),
        [t.numel() for t in tensors],
        [CODES[t.dtype] for t in tensors],
    )


def places(
    tensors: Sequence[Tensor],
    offsets: Sequence[int] | None,
    sizes: Sequence[int] | None,
    block: int,
) -> tuple[list[int], int]:
    """Where each tensor's first block is among the blocks of all whole tensors; their number."""
    first, total = [], 0
    for place, count in grid_places(tensors, offsets, sizes, block):
        first.append(total + place)
        total += count
    return first, total


@declared.forward("l2_norm_partials")
def l2_norm_partials(
    tensors: Sequence[Tensor],
    *,
    offsets: Sequence[int] | None,
    sizes: Sequence[int] | None,
    block: int,
) -> Tensor:
    whole = [t.contiguous() for t in tensors]
    first, total = places(tensors, offsets, sizes, block)
    found = torch.zeros(total, dtype=torch.float32)
    if total:  # a tensor without elements has no address
        _kernels.l2_norm_partials(*described(whole), first, block, found.data_ptr())
    return found


@declared.forward("l2_norm", contiguous=True, accepts=lambda tensors: len(tensors) > 0)
def l2_norm(tensors: Sequence[Tensor]) -> Tensor:
    total = torch.empty((), dtype=torch.float32)
    _kernels.l2_norm(*described(tensors), total.data_ptr())
    return total


@declared.forward("clip", contiguous=True)
def clip(tensors: Sequence[Tensor], norm: Tensor, *, max_norm: float) -> None:
    _kernels.clip(*described(tensors), norm.data_ptr(), max_norm)


@declared.forward("unscale_and_check", contiguous=True)
def unscale_and_check(grads: Sequence[Tensor], scale: Tensor, found_inf: Tensor) -> None:
    _kernels.unscale_and_check(*described(grads), scale.data_ptr(), found_inf.data_ptr())
