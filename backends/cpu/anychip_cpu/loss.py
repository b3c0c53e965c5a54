"""The loss on the host, by native kernels: cross_entropy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import Needs, declared

_kernels: Any = native.kernels


def _reduction(name: str) -> int:
    codes = {
        "none": _kernels.REDUCTION_NONE,
        "mean": _kernels.REDUCTION_MEAN,
        "sum": _kernels.REDUCTION_SUM,
    }
    return int(codes[name])


@declared.forward("cross_entropy")
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    logits, target = logits.contiguous(), target.contiguous()
    lse = target.new_empty(target.shape, dtype=torch.float32)
    loss = torch.empty_like(lse) if reduction == "none" else lse.new_empty(())
    _kernels.cross_entropy_forward(
        logits.data_ptr(),
        target.data_ptr(),
        loss.data_ptr(),
        lse.data_ptr(),
        target.numel(),
        logits.shape[-1],
        ignore_index,
        label_smoothing,
        z_loss,
        _reduction(reduction),
        CODES[logits.dtype],
    )
    return loss, lse


@declared.backward("cross_entropy")
def cross_entropy_backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    needs: Needs,
) -> tuple[Tensor]:
    grad, logits, target, lse = (t.contiguous() for t in (grad, logits, target, lse))
    dlogits = torch.empty_like(logits)
    _kernels.cross_entropy_backward(
        grad.data_ptr(),
        logits.data_ptr(),
        target.data_ptr(),
        lse.data_ptr(),
        dlogits.data_ptr(),
        target.numel(),
        logits.shape[-1],
        ignore_index,
        label_smoothing,
        z_loss,
        _reduction(reduction),
        CODES[logits.dtype],
    )
    return (dlogits,)
