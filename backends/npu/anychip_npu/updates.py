"""Rows of update rules by CANN's operators over lists: adamw, sgd and lion.

What is known on the host, the rates of the averages, goes into calls over lists; what lies on the
device, for which the host must not wait, into one product or sum per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from anychip.operators.update import bias_corrections
from anychip_npu.soc import is_a2_or_a3
from anychip_npu.table import declared, left_to_reference

_TOGETHER = 24
"""Tensors of one call: torch_npu cuts longer lists here, and little scratch is needed at once."""

_SUM = {"aten::_foreach_add_.List": "aclnnForeachAddListV2"}
_AVERAGE = {"aten::_foreach_mul_.Scalar": "aclnnForeachMulScalarV2", **_SUM}

Tensors = list[Tensor] | tuple[Tensor, ...]
Direction = Callable[[list[Tensor], list[Tensor], list[list[Tensor]]], Tensors]
"""``f(grads, params, states)`` moves the states, and returns what the rate is multiplied by."""


def _is_supported(params: Sequence[Tensor], *_: object, **__: object) -> bool:
    return len(params) > 0 and is_a2_or_a3(params[0])


def _scaled(grad: Tensor, scale: Tensor | None, clip: Tensor | None) -> Tensor:
    """The gradient in float32, without the loss scale, clipped; the gradient itself is kept."""
    grad = grad.float()
    if scale is not None:
        grad = grad / scale
    return grad if clip is None else grad * clip


def _step(
    direction: Direction,
    tensors: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Sequence[Tensor]]],
    scalars: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    low_precision: Sequence[Tensor] | None,
    *,
    rate: Tensor,
    decay: Tensor | None,
) -> None:
    """p = p decay - rate u for all parameters, unless found_inf.

    Args:
        tensors: parameters, gradients, and the lists of states, of which empty ones are left out.
        scalars: step, scale, clip and found_inf.
        decay: 0-dim; None for 1.
    """
    (params, grads, states), (step, scale, clip, found_inf) = tensors, scalars
    skip = torch.zeros_like(step, dtype=torch.bool) if found_inf is None else found_inf != 0.0
    checked = found_inf is not None
    for start in range(0, len(params), _TOGETHER):
        part = slice(start, start + _TOGETHER)
        own = [list(state[part]) for state in states if state]
        flat = [t for state in own for t in state] if checked else []
        before = [t.clone() for t in flat]
        scaled = [_scaled(grad, scale, clip) for grad in grads[part]]
        moving = list(params[part])
        for param, moves in zip(moving, direction(scaled, moving, own), strict=True):
            wide = param.float()
            moved = (wide if decay is None else wide * decay) - moves * rate
            param.copy_(torch.where(skip, wide, moved) if checked else moved)
        for now, then in zip(flat, before, strict=True):
            now.copy_(torch.where(skip, then, now))
    for low, param in zip(low_precision or (), params, strict=bool(low_precision)):
        low.copy_(torch.where(skip, low, param.to(low.dtype)) if checked else param)
    step.copy_(torch.where(skip, step, step + 1.0))


@declared.forward(
    "adamw",
    calls={
        **_AVERAGE,
        "aten::_foreach_addcmul_.Scalar": "aclnnForeachAddcmulScalarV2",
        "aten::_foreach_sqrt": "aclnnForeachSqrt",
        "aten::_foreach_div.List": "aclnnForeachDivList",
    },
    contiguous=True,
    accepts=_is_supported,
)
def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Averages and roots in float32, element by element:
    https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/83RC1alpha003/API/aolapi/context/aclnnForeachAddcmulScalarV2.md
    """
    correction1, correction2 = bias_corrections(step + 1.0, beta1, beta2)
    root = correction2.sqrt()

    def direction(grads: list[Tensor], _: object, averages: list[list[Tensor]]) -> Tensors:
        first, second = averages
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, grads, alpha=1.0 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1.0 - beta2)
        # m / c1 / (sqrt(v / c2) + eps), with the corrections taken together.
        roots = torch._foreach_sqrt(second)
        for divisor in roots:
            divisor.add_(eps * root)
        return torch._foreach_div(first, roots)

    _step(
        direction,
        (params, grads, (exp_avgs, exp_avg_sqs)),
        (step, scale, clip, found_inf),
        low_precision,
        rate=lr * (root / correction1),
        decay=1.0 - lr * weight_decay,
    )


@declared.forward("sgd", calls=_AVERAGE, contiguous=True, accepts=_is_supported)
def sgd(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    *,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """Buffers in float32, element by element:
    https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/83RC1alpha003/API/aolapi/context/aclnnForeachAddListV2.md
    """

    def direction(
        grads: list[Tensor], params: list[Tensor], buffers: list[list[Tensor]]
    ) -> Tensors:
        slopes: Tensors = grads
        if not decoupled:
            wide = [param.float() for param in params]
            slopes = torch._foreach_add(grads, wide, alpha=weight_decay)
        if not momentum:
            return slopes
        torch._foreach_mul_(buffers[0], momentum)
        torch._foreach_add_(buffers[0], slopes)
        return torch._foreach_add(slopes, buffers[0], alpha=momentum) if nesterov else buffers[0]

    _step(
        direction,
        (params, grads, (momentum_buffers,)),
        (step, scale, clip, found_inf),
        low_precision,
        rate=lr,
        decay=1.0 - lr * weight_decay if decoupled else None,
    )


@declared.forward(
    "lion",
    calls={**_AVERAGE, "aten::_foreach_mul.Scalar": "aclnnForeachMulScalarV2"},
    contiguous=True,
    accepts=_is_supported,
)
def lion(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    *,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """Averages in float32, element by element:
    https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/83RC1alpha003/API/aolapi/context/aclnnForeachAddListV2.md
    """

    def direction(grads: list[Tensor], _: object, averages: list[list[Tensor]]) -> Tensors:
        mixed = torch._foreach_mul(averages[0], beta1)
        torch._foreach_add_(mixed, grads, alpha=1.0 - beta1)
        torch._foreach_mul_(averages[0], beta2)
        torch._foreach_add_(averages[0], grads, alpha=1.0 - beta2)
        return [torch.sign(t) for t in mixed]

    _step(
        direction,
        (params, grads, (exp_avgs,)),
        (step, scale, clip, found_inf),
        low_precision,
        rate=lr,
        decay=1.0 - lr * weight_decay,
    )


left_to_reference(
    "adamw",
    "forward",
    part="as one fused step",
    reason=(
        "aclnnApplyAdamWV2 takes the rates of the averages as float32 and the learning rate from "
        "the host: 1 - 0.999 loses four digits, and a step would wait"
    ),
    page=(
        "https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/82RC1alpha001/API/aolapi/"
        "context/aclnnApplyAdamWV2.md"
    ),
)
for _rule in ("lamb", "adamw_8bit"):
    left_to_reference(_rule, "forward", reason="torch_npu 2.13.0 has no step of this rule")
left_to_reference(
    "lamb_sums_of_squares",
    "forward",
    reason="CANN's norms round, and this operator's sums are exact",
)
