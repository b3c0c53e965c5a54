"""Rows of softmax: the gradient. Masks are the reference's, which hides a key wholly."""

from __future__ import annotations

import torch
from torch import Tensor

from anychip_npu.soc import is_a2_or_a3
from anychip_npu.table import Needs, declared, left_to_reference

left_to_reference(
    "softmax",
    "forward",
    reason=(
        "npu_scaled_masked_softmax gives a masked score the value -10000 and a row that is masked "
        "whole equal weights; it takes 4 dims of 32 to 4096, by 32"
    ),
    page=(
        "https://gitcode.com/cann/ops-nn/blob/master/vfusion/scaled_masked_softmax_v2/op_kernel/"
        "scaled_masked_softmax_v2.h"
    ),
)


def _has_elements(grad: Tensor, y: Tensor, bias: Tensor | None, **_: object) -> bool:
    return y.numel() > 0 and is_a2_or_a3(y)


@declared.backward(
    "softmax",
    calls={"aten::_softmax_backward_data": "aclnnSoftmaxBackward"},
    accepts=_has_elements,
)
def softmax_backward(
    grad: Tensor,
    y: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    causal: bool,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None]:
    """y (grad - sum(grad y)) in float32, rounded once after the scale; hidden keys have y = 0.

    https://gitcode.com/cann/ops-nn/blob/master/activation/softmax_grad/docs/aclnnSoftmaxBackward.md
    """
    rows = (t.float().reshape(-1, y.shape[-1]) for t in (grad, y))
    found = torch.ops.aten._softmax_backward_data(*rows, -1, torch.float32)
    dscores = found.view(y.shape)
    dx = (dscores * scale).to(y.dtype) if needs[0] else None
    dbias = None
    if needs[1] and bias is not None:
        dbias = dscores.sum_to_size(bias.shape).to(bias.dtype)
    return dx, dbias
