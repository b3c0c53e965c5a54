"""Rows of hadamard and top_k, up to the lengths that the kernels' registers and keys hold."""

from __future__ import annotations

import torch
from torch import Tensor

from anychip_cuda.native import Kernels, empty_like
from anychip_cuda.table import Needs, declared

_LONGEST_BLOCK = 32_768
"""A longer one does not fit a block's registers."""
_LONGEST_ROW = 2**32 - 1
"""Keys of top_k hold an index of 32 bits."""


@declared.forward("hadamard", limits={"block": range(1, _LONGEST_BLOCK + 1)})
def hadamard(kernels: Kernels, x: Tensor, *, block: int | None) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    kernels.native.hadamard(
        x.data_ptr(),
        y.data_ptr(),
        x.numel(),
        x.shape[-1] if block is None else block,
        kernels.codes[x.dtype],
        *kernels.place(x),
    )
    return y


def _is_short_block(grad: Tensor, *, block: int | None, **_: object) -> bool:
    return (grad.shape[-1] if block is None else block) <= _LONGEST_BLOCK


@declared.backward("hadamard", accepts=_is_short_block)
def hadamard_backward(
    kernels: Kernels, grad: Tensor, *, block: int | None, needs: Needs
) -> tuple[Tensor]:
    """The matrix is symmetric: the transform is its own gradient."""
    return (hadamard(kernels, grad, block=block),)


def _rows(x: Tensor) -> int:
    length = x.shape[-1]
    return x.numel() // length if length else 0


def _is_short(x: Tensor, *, k: int) -> bool:
    return x.shape[-1] <= _LONGEST_ROW


@declared.forward("top_k", accepts=_is_short)
def top_k(kernels: Kernels, x: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    rows, length, cores = _rows(x), x.shape[-1], kernels.multiprocessors(x)
    values = x.new_empty((*x.shape[:-1], k))
    indices = x.new_empty((*x.shape[:-1], k), dtype=torch.int64)
    scratch = x.new_empty(kernels.native.top_k_scratch(rows, length, k, cores), dtype=torch.uint8)
    kernels.native.top_k(
        x.data_ptr(),
        values.data_ptr(),
        indices.data_ptr(),
        scratch.data_ptr(),
        rows,
        length,
        k,
        cores,
        kernels.codes[x.dtype],
        *kernels.place(x),
    )
    return values, indices


def _is_short_backward(grad: Tensor, _: Tensor, x: Tensor, *__: Tensor, **___: object) -> bool:
    return x.shape[-1] <= _LONGEST_ROW


@declared.backward("top_k", accepts=_is_short_backward)
def top_k_backward(
    kernels: Kernels,
    grad: Tensor,
    _: Tensor,
    x: Tensor,
    indices: Tensor,
    *,
    k: int,
    needs: Needs,
) -> tuple[Tensor]:
    grad, indices = grad.to(x.dtype).contiguous(), indices.contiguous()
    dx = empty_like(x)
    kernels.native.top_k_backward(
        grad.data_ptr(),
        indices.data_ptr(),
        dx.data_ptr(),
        _rows(x),
        x.shape[-1],
        k,
        kernels.codes[x.dtype],
        *kernels.place(x),
    )
    return (dx,)
