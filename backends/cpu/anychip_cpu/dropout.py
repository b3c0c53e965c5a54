"""Dropout on the host: the native kernel, and torch's sums around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.numerics import column_sum
from anychip_cpu.table import Needs, declared

_kernels: Any = native.kernels


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
    place = () if rows is None else (rows.data_ptr(), x.shape[-1], width, column)
    addresses = (x.data_ptr(), rng.data_ptr(), y.data_ptr())
    _kernels.dropout(*addresses, x.numel(), p, CODES[x.dtype], *place)
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
    **attrs: Any,
) -> Tensor:
    inner = x.float() if bias is None else x.float() + bias
    dropped = dropout(inner, rng, rows, **attrs)
    return dropped.add_(residual).to(residual.dtype)


@declared.backward("bias_dropout_add")
def bias_dropout_add_backward(
    grad: Tensor, rng: Tensor, rows: Tensor | None, *, needs: Needs, **attrs: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dx = dresidual = dbias = None
    if needs[0] or needs[2]:
        dropped = dropout(grad.float(), rng, rows, **attrs)
        dx = dropped.to(grad.dtype) if needs[0] else None
        dbias = column_sum(dropped) if needs[2] else None
    if needs[1]:
        dresidual = grad.clone(memory_format=torch.contiguous_format)
    return dx, dresidual, dbias
