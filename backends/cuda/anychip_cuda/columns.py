"""Rows and columns of a call, sums down the columns, and the scratch that these need."""

from __future__ import annotations

import torch
from torch import Tensor

from anychip_cuda.native import Kernels, address


def rows_of(x: Tensor) -> tuple[int, int]:
    """How many rows there are along the last dim, and their width."""
    hidden = x.shape[-1]
    return (x.numel() // hidden if hidden else 0), hidden


def column_sums(kernels: Kernels, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The float32 sums down the columns of x (rows, hidden), as (hidden,) of ``dtype``."""
    x = x.contiguous()
    parts, partial = scratch_for_sums(kernels, x, wanted=True)
    sums = x.new_empty(x.shape[-1:], dtype=dtype)
    kernels.native.column_sums(
        *map(address, (x, sums, partial)),
        *rows_of(x),
        parts,
        kernels.codes[x.dtype],
        kernels.codes[dtype],
        *kernels.place(x),
    )
    return sums


def scratch_for_sums(kernels: Kernels, x: Tensor, *, wanted: bool) -> tuple[int, Tensor | None]:
    """Over how many parts a kernel of this call sums the columns of x, and where it puts them.

    Returns:
        parts and (parts, hidden) float32 on x's device; 1 and None when no sum is wanted.
    """
    if not wanted:
        return 1, None
    rows, hidden = rows_of(x)
    parts: int = kernels.native.column_parts(
        rows, hidden, kernels.codes[x.dtype], kernels.multiprocessors(x)
    )
    return parts, x.new_empty((parts, hidden), dtype=torch.float32)
