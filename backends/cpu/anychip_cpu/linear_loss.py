"""The output layer and the loss on the host: torch's products, and between them the native loss."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from anychip import operators
from anychip.contract.operator import Function
from anychip.operators.linear_cross_entropy import chunks
from anychip.operators.loss import check_targets
from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import Needs, declared

_kernels: Any = native.kernels


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Always in float32: torch has no product of 16-bit factors with a float32 result on a host.
    wide = rows.float()
    return wide @ weight.t() if bias is None else torch.addmm(bias, wide, weight.t())


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    num_classes = weight.shape[0]
    check_targets("linear_cross_entropy", target, num_classes, ignore_index)
    rows, labels = x.reshape(target.numel(), x.shape[-1]), target.reshape(-1).contiguous()
    wide, wide_bias = weight.float(), None if bias is None else bias.float()
    loss, lse = wide.new_empty(target.shape), wide.new_empty(target.shape)
    for chunk in chunks(rows.shape[0], num_classes):
        logits = _logits(rows[chunk], wide, wide_bias)
        _kernels.cross_entropy_forward(
            logits.data_ptr(),
            labels[chunk].data_ptr(),
            loss.view(-1)[chunk].data_ptr(),
            lse.view(-1)[chunk].data_ptr(),
            logits.shape[0],
            num_classes,
            ignore_index,
            label_smoothing,
            z_loss,
            _kernels.REDUCTION_NONE,
            CODES[torch.float32],
        )
    if reduction == "none":
        return loss, lse
    total = loss.sum() if reduction == "sum" else loss.sum() / (labels != ignore_index).sum()
    return total, lse


def linear_cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    rows, labels = x.reshape(target.numel(), x.shape[-1]), target.reshape(-1).contiguous()
    wide, wide_bias = weight.float(), None if bias is None else bias.float()
    lse = lse.contiguous()
    slope = grad / (labels != ignore_index).sum() if reduction == "mean" else grad
    slope = slope.expand(target.shape).reshape(-1).contiguous()
    dx = rows.new_empty(rows.shape) if needs[0] else None
    dweight = torch.zeros_like(wide) if needs[1] else None
    dbias = wide.new_zeros(wide.shape[0]) if needs[2] else None
    for chunk in chunks(rows.shape[0], wide.shape[0]):
        logits = _logits(rows[chunk], wide, wide_bias)
        dlogits = torch.empty_like(logits)
        _kernels.cross_entropy_backward(
            slope[chunk].data_ptr(),
            logits.data_ptr(),
            labels[chunk].data_ptr(),
            lse.view(-1)[chunk].data_ptr(),
            dlogits.data_ptr(),
            logits.shape[0],
            wide.shape[0],
            ignore_index,
            label_smoothing,
            z_loss,
            _kernels.REDUCTION_NONE,
            CODES[torch.float32],
        )
        if dx is not None:
            dx[chunk] = dlogits @ wide
        if dweight is not None:
            dweight.addmm_(dlogits.t(), rows[chunk].float())
        if dbias is not None:
            dbias += dlogits.sum(0)
    return (
        None if dx is None else dx.view(x.shape),
        None if dweight is None else dweight.to(weight.dtype),
        None if dbias is None else dbias.to(weight.dtype),
    )


if native.kernels is not None:
    declared.forward("linear_cross_entropy", kind="mapped")(linear_cross_entropy)
    declared.backward("linear_cross_entropy", kind="mapped")(linear_cross_entropy_backward)

# torch's products and sums, as of the reference: there is no native part that would be faster.
_partials = operators.linear_cross_entropy_partials
declared.forward(_partials.name, kind="mapped")(_partials.forward)
declared.backward(_partials.name, kind="mapped")(cast(Function, _partials.backward))
