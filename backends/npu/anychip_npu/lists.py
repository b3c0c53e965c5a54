"""Rows over lists of tensors: l2_norm and unscale_and_check; why clip has none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anychip_npu.soc import is_a2_or_a3, keeps_infinities
from anychip_npu.table import declared, left_to_reference


def by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors that have elements, in lists of one dtype."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            found.setdefault(tensor.dtype, []).append(tensor)
    return list(found.values())


def _is_measurable(tensors: Sequence[Tensor]) -> bool:
    return len(tensors) > 0 and is_a2_or_a3(tensors[0])


@declared.forward(
    "l2_norm",
    calls={"aten::_foreach_norm.Scalar": "aclnnForeachNorm"},
    accepts=_is_measurable,
)
def l2_norm(tensors: Sequence[Tensor]) -> Tensor:
    """In float32, to which torch_npu casts what is not; then the norm of the tensors' norms:
    https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/83RC1alpha003/API/aolapi/context/aclnnForeachNorm.md
    """
    norms = [
        norm
        for same in by_dtype(tensors)
        for norm in torch._foreach_norm(same, 2, dtype=torch.float32)
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=tensors[0].device)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _takes_gradients(grads: Sequence[Tensor], scale: Tensor, found_inf: Tensor) -> bool:
    return keeps_infinities(scale)


@declared.forward(
    "unscale_and_check",
    calls={
        "aten::_amp_foreach_non_finite_check_and_unscale_": "aclnnForeachNonFiniteCheckAndUnscale"
    },
    contiguous=True,
    accepts=_takes_gradients,
)
def unscale_and_check(grads: Sequence[Tensor], scale: Tensor, found_inf: Tensor) -> None:
    """Times 1 / scale; what was stored is looked at by a second pass with the factor 1, since the
    kernel looks at a number before it is scaled. Contiguous tensors of one dtype in a list:
    https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/850alpha001/API/aolapi/context/aclnnForeachNonFiniteCheckAndUnscale.md
    """
    run = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_
    inverse, unread = scale.reciprocal(), torch.zeros_like(found_inf)
    one = torch.ones_like(scale)
    for same in by_dtype(grads):
        run(same, unread, inverse)
        run(same, found_inf, one)


left_to_reference(
    "clip",
    "forward",
    reason=(
        "torch_npu 2.13.0 has no product of a list with a number on the device: "
        "_foreach_mul_.Tensor is one product per tensor, as the reference has it"
    ),
)
left_to_reference(
    "sums_of_squares",
    "forward",
    reason="CANN's norms round, and this operator's sums are exact",
)
