"""Rows of the loss: cross_entropy, and linear_cross_entropy in chunks of rows.

A target that is no class gives NaN in its row's loss and gradient on a device, which cannot raise;
on a host it is an IndexError.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anychip.operators.loss import check_targets
from anychip_cuda.native import Kernels, address, empty_like
from anychip_cuda.table import Needs, declared


class Options(NamedTuple):
    """What the kernels take of the operators' attributes, in their order."""

    ignore_index: int
    label_smoothing: float
    z_loss: float


def rows_of(logits: Tensor, num_rows: int) -> Tensor:
    """(rows, V) with the logits of a row next to each other; a view wherever there is one."""
    rows = logits.reshape(num_rows, logits.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def loss_of_rows(
    kernels: Kernels, logits: Tensor, target: Tensor, loss: Tensor, lse: Tensor, options: Options
) -> None:
    """Writes loss and lse of (rows, V) logits."""
    kernels.native.cross_entropy_forward(
        logits.data_ptr(),
        logits.stride(0),
        *map(address, (target, loss, lse)),
        *logits.shape,
        *options,
        kernels.codes[logits.dtype],
        *kernels.place(logits),
    )


def gradient_of_rows(
    kernels: Kernels,
    grad: Tensor,
    count: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    dlogits: Tensor,
    options: Options,
) -> None:
    """Writes the gradient of (rows, V) logits; ``dlogits`` may be the logits.

    Args:
        grad: of the loss: one number, or one per row.
        count: what the loss was divided by, or None.
    """
    kernels.native.cross_entropy_backward(
        grad.data_ptr(),
        grad.dim() > 0,
        *map(address, (count, logits)),
        logits.stride(0),
        *map(address, (target, lse, dlogits)),
        dlogits.stride(0),
        *logits.shape,
        *options,
        kernels.codes[logits.dtype],
        kernels.codes[dlogits.dtype],
        *kernels.place(logits),
    )


def _reduce(
    kernels: Kernels,
    losses: Tensor | None,
    target: Tensor,
    total: Tensor | None,
    count: Tensor | None,
    ignore_index: int,
    mean: bool,
) -> None:
    num_rows = target.numel()
    scratch = torch.empty(
        kernels.native.reduction_scratch(num_rows), dtype=torch.float32, device=target.device
    )
    kernels.native.reduce_losses(
        *map(address, (losses, target, total, count, scratch)),
        num_rows,
        ignore_index,
        mean,
        *kernels.place(target),
    )


def reduced(
    kernels: Kernels, losses: Tensor, target: Tensor, ignore_index: int, reduction: str
) -> Tensor:
    """The losses of rows by ``reduction``."""
    if reduction == "none":
        return losses
    total = losses.new_empty(())
    _reduce(kernels, losses, target, total, None, ignore_index, reduction == "mean")
    return total


def divisor(kernels: Kernels, target: Tensor, ignore_index: int, reduction: str) -> Tensor | None:
    """How many targets count, as float32, where the loss is a mean; else None."""
    if reduction != "mean":
        return None
    count = torch.empty((), dtype=torch.float32, device=target.device)
    _reduce(kernels, None, target, None, count, ignore_index, False)
    return count


@declared.forward("cross_entropy")
def cross_entropy(
    kernels: Kernels,
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    check_targets("cross_entropy", target, logits.shape[-1], ignore_index)
    rows, target = rows_of(logits, target.numel()), target.contiguous()
    losses = torch.empty(target.shape, dtype=torch.float32, device=target.device)
    lse = torch.empty_like(losses)
    options = Options(ignore_index, label_smoothing, z_loss)
    loss_of_rows(kernels, rows, target, losses, lse, options)
    return reduced(kernels, losses, target, ignore_index, reduction), lse


@declared.backward("cross_entropy")
def cross_entropy_backward(
    kernels: Kernels,
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
    # Not in place: a graph that is kept asks for the logits again.
    grad, target, lse = grad.contiguous(), target.contiguous(), lse.contiguous()
    rows = rows_of(logits, target.numel())
    dlogits = empty_like(logits)
    gradient_of_rows(
        kernels,
        grad if reduction == "none" else grad.reshape(()),
        divisor(kernels, target, ignore_index, reduction),
        rows,
        target,
        lse,
        dlogits.view(rows.shape),
        Options(ignore_index, label_smoothing, z_loss),
    )
    return (dlogits,)
