"""Rows of dropout and bias_dropout_add. The stream's numbers are read on the device.

Of a part of a whole, which has rows, a kernel of its own drops, and torch adds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anychip_cuda.columns import rows_of, scratch_for_sums
from anychip_cuda.native import Kernels, address, empty_like
from anychip_cuda.table import Needs, declared


@declared.forward("dropout")
def dropout(
    kernels: Kernels,
    x: Tensor,
    rng: Tensor,
    rows: Tensor | None = None,
    *,
    p: float,
    width: int = 0,
    column: int = 0,
) -> Tensor:
    x, rng = x.contiguous(), rng.contiguous()
    y = empty_like(x)
    last = (p, kernels.codes[x.dtype], *kernels.place(x))
    if rows is None:
        kernels.native.dropout(x.data_ptr(), rng.data_ptr(), y.data_ptr(), x.numel(), *last)
        return y
    rows = rows.contiguous()
    addresses = map(address, (x, rng, y, rows))
    kernels.native.dropout_rows(*addresses, rows.numel(), x.shape[-1], width, column, *last)
    return y


@declared.backward("dropout")
def dropout_backward(
    kernels: Kernels,
    grad: Tensor,
    rng: Tensor,
    rows: Tensor | None = None,
    *,
    needs: Needs,
    **attrs: Any,
) -> tuple[Tensor]:
    return (dropout(kernels, grad, rng, rows, **attrs),)


@declared.forward("bias_dropout_add")
def bias_dropout_add(
    kernels: Kernels,
    x: Tensor,
    residual: Tensor,
    rng: Tensor,
    bias: Tensor | None,
    rows: Tensor | None = None,
    *,
    p: float,
    **place: int,
) -> Tensor:
    if rows is not None:
        inner = x.float() if bias is None else x.float() + bias
        dropped = dropout(kernels, inner, rng, rows, p=p, **place)
        return dropped.add_(residual).to(residual.dtype)
    x, residual, rng = x.contiguous(), residual.contiguous(), rng.contiguous()
    bias = None if bias is None else bias.contiguous()
    y = empty_like(residual)
    count, hidden = rows_of(x) if x.dim() else (1, 1)
    kernels.native.bias_dropout_add_forward(
        x.data_ptr(),
        residual.data_ptr(),
        rng.data_ptr(),
        address(bias),
        y.data_ptr(),
        count,
        hidden,
        p,
        kernels.codes[x.dtype],
        kernels.codes[residual.dtype],
        kernels.codes[(x if bias is None else bias).dtype],
        *kernels.place(x),
    )
    return y


@declared.backward("bias_dropout_add")
def bias_dropout_add_backward(
    kernels: Kernels,
    grad: Tensor,
    rng: Tensor,
    rows: Tensor | None = None,
    *,
    p: float,
    needs: Needs,
    **place: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx is in grad's dtype, the residual's, as the spec has it; dbias is float32."""
    if rows is not None:
        wide = (
            dropout(kernels, grad.float(), rng, rows, p=p, **place)
            if needs[0] or needs[2]
            else grad
        )
        return (
            wide.to(grad.dtype) if needs[0] else None,
            grad.clone(memory_format=torch.contiguous_format) if needs[1] else None,
            wide.unsqueeze(0).flatten(0, -2).sum(0) if needs[2] else None,
        )
    grad, rng = grad.contiguous(), rng.contiguous()
    count, hidden = rows_of(grad) if grad.dim() else (1, 1)
    dx, dresidual = (empty_like(grad) if need else None for need in needs[:2])
    dbias = grad.new_empty((hidden,), dtype=torch.float32) if needs[2] else None
    parts, partial = scratch_for_sums(kernels, grad, wanted=needs[2])
    kernels.native.bias_dropout_add_backward(
        grad.data_ptr(),
        rng.data_ptr(),
        address(dx),
        address(dresidual),
        address(dbias),
        address(partial),
        count,
        hidden,
        parts,
        p,
        kernels.codes[grad.dtype],
        *kernels.place(grad),
    )
    return dx, dresidual, dbias
