"""Dropout on the host, alone and before a residual's sum: native kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import Needs, address, declared, rows_of, wanted

_kernels: Any = native.kernels


def places(rows: Tensor | None, width: int, column: int = 0) -> tuple[int, int, int]:
    """Which words elements have, as the kernels take it."""
    return address(rows), width, column


@declared.forward("dropout")
def dropout(
    x: Tensor,
    rng: Tensor,
    rows: Tensor | None = None,
    *,
    p: float,
    width: int = 0,
    column: int = 0,
) -> Tensor:
    x, rng = x.contiguous(), rng.contiguous()
    y = torch.empty_like(x)
    rows = None if rows is None else rows.contiguous()
    columns = 0 if rows is None else x.shape[-1]
    place = (rng.data_ptr(), p, *places(rows, width, column))
    _kernels.dropout(x.data_ptr(), y.data_ptr(), x.numel(), columns, CODES[x.dtype], *place)
    return y


@declared.backward("dropout")
def dropout_backward(
    grad: Tensor, rng: Tensor, rows: Tensor | None, *, needs: Needs, **attrs: Any
) -> tuple[Tensor]:
    return (dropout(grad, rng, rows, **attrs),)


@declared.forward("bias_dropout_add")
def bias_dropout_add(
    x: Tensor,
    residual: Tensor,
    rng: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    *,
    p: float,
    width: int = 0,
    column: int = 0,
) -> Tensor:
    x, residual, rng = x.contiguous(), residual.contiguous(), rng.contiguous()
    bias, rows = (None if t is None else t.contiguous() for t in (bias, rows))
    y = torch.empty_like(residual)
    _kernels.bias_dropout_add(
        *map(address, (x, residual, bias, y)),
        *rows_of(x),
        CODES[x.dtype],
        CODES[residual.dtype],
        CODES[x.dtype if bias is None else bias.dtype],
        rng.data_ptr(),
        p,
        *places(rows, width, column),
    )
    return y


@declared.backward("bias_dropout_add")
def bias_dropout_add_backward(
    grad: Tensor,
    rng: Tensor,
    rows: Tensor | None,
    *,
    needs: Needs,
    p: float,
    width: int = 0,
    column: int = 0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    grad, rng = grad.contiguous(), rng.contiguous()
    rows = None if rows is None else rows.contiguous()
    dx, dx_address = wanted(needs[0], grad)
    dbias = torch.empty(grad.shape[-1], dtype=torch.float32) if needs[2] else None
    if needs[0] or needs[2]:
        _kernels.bias_dropout_backward(
            *(grad.data_ptr(), dx_address, address(dbias)),
            *rows_of(grad),
            CODES[grad.dtype],
            rng.data_ptr(),
            p,
            *places(rows, width, column),
        )
    return dx, (grad.clone() if needs[1] else None), dbias
