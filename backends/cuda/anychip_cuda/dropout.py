"""Rows of dropout and bias_dropout_add. The stream's numbers are read on the device.

The kernels know the whole tensor only: calls with rows, which are parts of one, are not theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anychip_cuda.columns import column_sums, rows_of
from anychip_cuda.native import Kernels, address, empty_like
from anychip_cuda.table import Needs, declared


def _whole(x: Tensor, rng: Tensor, rows: Tensor | None, **_: object) -> bool:
    return rows is None


@declared.forward("dropout", accepts=_whole)
def dropout(
    kernels: Kernels, x: Tensor, rng: Tensor, rows: None = None, *, p: float, **_: int
) -> Tensor:
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


@declared.backward("dropout", accepts=_whole)
def dropout_backward(
    kernels: Kernels, grad: Tensor, rng: Tensor, rows: None = None, *, p: float, **_: object
) -> tuple[Tensor]:
    return (dropout(kernels, grad, rng, p=p),)


@declared.forward("bias_dropout_add", accepts=lambda *args, **_: args[4] is None)
def bias_dropout_add(
    kernels: Kernels,
    x: Tensor,
    residual: Tensor,
    rng: Tensor,
    bias: Tensor | None,
    rows: None = None,
    *,
    p: float,
    **_: int,
) -> Tensor:
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


@declared.backward("bias_dropout_add", accepts=_whole)
def bias_dropout_add_backward(
    kernels: Kernels,
    grad: Tensor,
    rng: Tensor,
    rows: None = None,
    *,
    p: float,
    needs: Needs,
    **_: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx is in grad's dtype, the residual's, as the spec has it; dbias is float32."""
    grad, rng = grad.contiguous(), rng.contiguous()
    count, hidden = rows_of(grad) if grad.dim() else (1, 1)
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
        count,
        hidden,
        parts,
        p,
        kernels.codes[grad.dtype],
        *kernels.place(grad),
    )
    return dx, dresidual, dbias
