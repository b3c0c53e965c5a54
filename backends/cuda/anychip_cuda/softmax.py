"""Rows of softmax: masks and biases are read where they lie, broadcast by strides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anychip_cuda.columns import rows_of
from anychip_cuda.native import Kernels, address, empty_like
from anychip_cuda.table import Needs, declared

_ROW_DIMS = 4
"""Dims before the keys that the kernels tell apart."""
_MOST_ROWS = 2**31 - 1
_ROWS_PER_PART = 16
"""Rows that a thread sums at least, so that partial results are few against what is read."""

Dims = tuple[int, ...]


def _is_covered(x: Tensor, *extras: Tensor | None) -> bool:
    """Fewer than 2^31 rows, which the kernels divide in 32 bits; five dims with a bias or mask.

    A tensor of more rows, or of six dims, is the reference's: no model has one.
    """
    few_dims = x.dim() <= _ROW_DIMS + 1 or all(extra is None for extra in extras)
    return few_dims and rows_of(x)[0] <= _MOST_ROWS


def _merged(dims: Sequence[Sequence[int]]) -> list[Dims]:
    """(size, stride, ...) of dims, those that all strides walk through alike taken together.

    Returns:
        One tuple of length ``_ROW_DIMS`` for the sizes, then one for each stride.
    """
    found: list[list[int]] = []
    for size, *strides in dims:
        if size == 1:
            continue
        if found and all(
            outer == size * inner for outer, inner in zip(found[-1][1:], strides, strict=True)
        ):
            found[-1] = [found[-1][0] * size, *strides]
        else:
            found.append([size, *strides])
    count = len(dims[0]) if dims else 2
    padding = [[1] + [0] * (count - 1)] * (_ROW_DIMS - len(found))
    return [tuple(column) for column in zip(*padding, *found, strict=True)]


def _broadcast(extra: Tensor | None, x: Tensor) -> tuple[Tensor | None, Dims]:
    """A mask or bias whose keys are adjacent or one, and its strides along the dims of x."""
    if extra is None:
        return None, (0,) * x.dim()
    if extra.dim() and extra.shape[-1] > 1 and extra.stride(-1) != 1:
        extra = extra.contiguous()
    return extra, extra.expand(x.shape).stride()


def _accepts(x: Tensor, mask: Tensor | None, bias: Tensor | None, **_: Any) -> bool:
    return _is_covered(x, mask, bias)


@declared.forward("softmax", accepts=_accepts)
def softmax(
    kernels: Kernels,
    x: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    *,
    scale: float,
    causal: bool,
) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    if not x.numel():
        return y
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.float()
    mask, mask_strides = _broadcast(mask, x)
    bias, bias_strides = _broadcast(bias, x)
    if mask is None and bias is None:
        sizes, own_mask, own_bias = _merged([(1, 0, 0)])
    else:
        dims = list(zip(x.shape, mask_strides, bias_strides, strict=True))
        sizes, own_mask, own_bias = _merged(dims[:-1])
    rows, keys = rows_of(x)
    kernels.native.softmax_forward(
        x.data_ptr(),
        y.data_ptr(),
        (address(mask), own_mask, mask_strides[-1]),
        (address(bias), own_bias, bias_strides[-1]),
        sizes,
        rows,
        x.shape[-2] if causal else 1,
        keys,
        scale,
        causal,
        kernels.codes[x.dtype],
        kernels.codes[x.dtype if bias is None else bias.dtype],
        *kernels.place(x),
    )
    return y


def _accepts_gradient(grad: Tensor, y: Tensor, bias: Tensor | None, **_: Any) -> bool:
    return _is_covered(y, bias)


@declared.backward("softmax", accepts=_accepts_gradient)
def softmax_backward(
    kernels: Kernels,
    grad: Tensor,
    y: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    causal: bool,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None]:
    grad, y = grad.contiguous(), y.contiguous()
    dx = torch.empty_like(y) if needs[0] else None
    if not y.numel():
        return dx, None if bias is None or not needs[1] else torch.zeros_like(bias)
    rows, keys = rows_of(y)
    # A bias that is one for all keys sums over rows' sums; others over rows, which need what a
    # row's elements have in common.
    is_wanted = bias is not None and needs[1]
    by_rows = bias is not None and keys > 1 and (bias.dim() == 0 or bias.shape[-1] == 1)
    common = y.new_empty((rows,), dtype=torch.float32) if is_wanted else None
    kernels.native.softmax_backward(
        grad.data_ptr(),
        y.data_ptr(),
        address(dx),
        0 if by_rows else address(common),
        address(common) if by_rows else 0,
        rows,
        y.shape[-2] if causal else 1,
        keys,
        scale,
        causal,
        kernels.codes[y.dtype],
        *kernels.place(y),
    )
    if bias is None or common is None:
        return dx, None
    return dx, _bias_gradient(kernels, grad, y, common, bias, by_rows=by_rows)


def _bias_gradient(
    kernels: Kernels, grad: Tensor, y: Tensor, common: Tensor, bias: Tensor, *, by_rows: bool
) -> Tensor:
    """The sums over the rows that share an entry of the bias.

    Args:
        common: (rows,) float32, the rows' sums of their gradients when ``by_rows``, and else what
            is taken off a row's gradients.
    """
    dbias = empty_like(bias)
    leading = (1,) * (y.dim() - bias.dim()) + tuple(bias.shape)
    kept: list[tuple[int, int]] = []
    reduced: list[tuple[int, int]] = []
    stride = 1
    for size, own in reversed(list(zip(y.shape[:-1], leading[:-1], strict=True))):
        (kept if own == size else reduced).insert(0, (size, stride))
        stride *= size
    num_reduced = math.prod(size for size, _ in reduced)
    # As many parts as fill the device, where the bias alone has too few entries.
    threads = max(dbias.numel() // 8, 1)
    wanted = kernels.multiprocessors(y) * 2048 // threads
    parts = max(1, min(wanted, num_reduced // _ROWS_PER_PART))
    partial = y.new_empty((parts, dbias.numel()), dtype=torch.float32)
    kernels.native.softmax_bias_gradient(
        0 if by_rows else grad.data_ptr(),
        address(common) if by_rows else y.data_ptr(),
        0 if by_rows else address(common),
        *_merged(kept or [(1, 0)]),
        *_merged(reduced or [(1, 0)]),
        1 if by_rows else y.shape[-1],
        partial.data_ptr(),
        parts,
        dbias.data_ptr(),
        kernels.codes[y.dtype],
        kernels.codes[bias.dtype],
        *kernels.place(y),
    )
    return dbias
