"""Rows of dropout and bias_dropout_add. The stream's numbers are read on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from anychip_cuda.columns import column_sums, rows_of
from anychip_cuda.native import Kernels, address, empty_like
from anychip_cuda.table import Needs, declared


@declared.forward("dropout")
def dropout(kernels: Kernels, x: Tensor, rng: Tensor, *, p: float) -> Tensor:
    x, rng = x.contiguous(), rng.contiguous()
    y = empty_like(x)
    kernels.native.dropout(
        x.data_ptr(),
        rng.data_ptr(),
        y.data_ptr(),
        x.numel(),
        p,
        kernels.codes[x.dtype],
        *kernels.place(x),
    )
    return y


@declared.backward("dropout")
def dropout_backward(
    kernels: Kernels, grad: Tensor, rng: Tensor, *, p: float, needs: Needs
) -> tuple[Tensor]:
    return (dropout(kernels, grad, rng, p=p),)


@declared.forward("bias_dropout_add")
def bias_dropout_add(
    kernels: Kernels, x: Tensor, residual: Tensor, rng: Tensor, bias: Tensor | None, *, p: float
) -> Tensor:
    x, residual, rng = x.contiguous(), residual.contiguous(), rng.contiguous()
    bias = None if bias is None else bias.contiguous()
    y = empty_like(residual)
    rows, hidden = rows_of(x) if x.dim() else (1, 1)
    kernels.native.bias_dropout_add_forward(
        x.data_ptr(),
        residual.data_ptr(),
        rng.data_ptr(),
        address(bias),
        y.data_ptr(),
        rows,
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
    kernels: Kernels, grad: Tensor, rng: Tensor, *, p: float, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx is in grad's dtype, the residual's, as the spec has it; dbias is float32."""
    grad, rng = grad.contiguous(), rng.contiguous()
    rows, hidden = rows_of(grad) if grad.dim() else (1, 1)
    dx, dresidual = (empty_like(grad) if need else None for need in needs[:2])
    dbias = grad.new_empty((hidden,), dtype=torch.float32) if needs[2] else None
    parts, partial = column_sums(kernels, grad, wanted=needs[2])
    kernels.native.bias_dropout_add_backward(
        grad.data_ptr(),
        rng.data_ptr(),
        address(dx),
        address(dresidual),
        address(dbias),
        address(partial),
        rows,
        hidden,
        parts,
        p,
        kernels.codes[grad.dtype],
        *kernels.place(grad),
    )
    return dx, dresidual, dbias
