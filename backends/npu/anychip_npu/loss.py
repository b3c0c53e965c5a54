"""Rows of the loss: cross_entropy, without label smoothing and z-loss.

CANN takes a negative ignore_index to mean that no row is ignored, and gives the loss in the dtype
of the logits. So each row's loss is asked for, of float32 logits, with a class that exists in place
of an ignored one; what is ignored is left out here. A target that is no class gives NaN in its
row's loss and gradient: a device cannot raise.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from anychip.contract.operator import Pair
from anychip_npu.soc import is_a2_or_a3
from anychip_npu.table import Needs, declared, left_to_reference

_MOST_ROWS = 200_000
_PAGE = (
    "https://gitcode.com/Ascend/op-plugin/blob/26.1.0/docs/en/custom_APIs/torch_npu/"
    "torch_npu-npu_cross_entropy_loss.md"
)

left_to_reference(
    "cross_entropy",
    part="z_loss",
    reason="lse_square_scale_for_zloss and return_zloss are not supported yet",
    page=_PAGE,
)
left_to_reference(
    "cross_entropy",
    part="label_smoothing",
    reason="with a gradient only the default of label_smoothing is taken",
    page=_PAGE,
)
_IN_PARTS = (
    "https://gitcode.com/Ascend/op-plugin/blob/master/docs/zh/custom_APIs/torch_npu/"
    "torch_npu-npu_fused_linear_cross_entropy_loss_with_max_sum_backward.md"
)
left_to_reference(
    "linear_cross_entropy",
    reason="CANN's is for a vocabulary split over ranks, in three calls that keep the softmax",
    page=_IN_PARTS,
)
left_to_reference(
    "linear_cross_entropy_partials",
    reason="CANN's three calls keep the softmax, and have no sum of the logits",
    page=_IN_PARTS,
)


def _is_covered(
    logits: Tensor, target: Tensor, *, label_smoothing: float, z_loss: float, **_: object
) -> bool:
    fits = 0 < target.numel() <= _MOST_ROWS and is_a2_or_a3(logits)
    return fits and not label_smoothing and not z_loss


def _labels(target: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of (rows,): a class for every row, which rows count, and which name a class that is none."""
    target = target.reshape(-1)
    counted = target != ignore_index
    # Not "&", which torch_npu has no aclnn function for.
    is_class = torch.logical_and(target >= 0, target < classes)
    is_wrong = torch.logical_and(counted, is_class.logical_not())
    return torch.where(is_class, target, 0), counted, is_wrong


def _log_probabilities(logits: Tensor, target: Tensor, **_: Any) -> tuple[Tensor, ...]:
    return (logits.new_empty((target.numel(), logits.shape[-1]), dtype=torch.float32),)


def _backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    log_probability: Tensor,
    *,
    ignore_index: int,
    reduction: str,
    needs: Needs,
    **_: object,
) -> tuple[Tensor]:
    labels, counted, is_wrong = _labels(target, logits.shape[-1], ignore_index)
    weight = grad.float().reshape(-1)
    if reduction == "mean":
        weight = weight / counted.sum()
    weight = torch.where(counted, weight, 0.0).masked_fill(is_wrong, math.nan)
    slope = torch.ops.npu.npu_cross_entropy_loss_backward(
        weight, log_probability, labels, reduction="none"
    )
    # Logits of an ignored row may be anything, and 0 times infinity is not 0.
    slope = slope.masked_fill(counted.logical_not().unsqueeze(1), 0.0)
    return (slope.view(logits.shape).to(logits.dtype),)


@declared.forward(
    "cross_entropy",
    paired=Pair(_backward, num_residuals=1, fake_residuals=_log_probabilities),
    calls={
        "npu::npu_cross_entropy_loss": "aclnnCrossEntropyLoss",
        "npu::npu_cross_entropy_loss_backward": "aclnnCrossEntropyLossGrad",
    },
    accepts=_is_covered,
)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """The loss, and the logarithms of probabilities for the backward; up to 200,000 rows.

    https://gitcode.com/Ascend/op-plugin/blob/26.1.0/docs/en/custom_APIs/torch_npu/torch_npu-npu_cross_entropy_loss.md
    """
    rows = logits.float().reshape(target.numel(), logits.shape[-1])
    labels, counted, is_wrong = _labels(target, logits.shape[-1], ignore_index)
    loss, log_probability, *_ = torch.ops.npu.npu_cross_entropy_loss(
        rows.contiguous(), labels, reduction="none"
    )
    loss = torch.where(counted, loss, 0.0).masked_fill(is_wrong, math.nan)
    if reduction == "none":
        return loss.view(target.shape), log_probability
    total = loss.sum()
    return total / counted.sum() if reduction == "mean" else total, log_probability
