"""Rows of permute and unpermute: tokens to the experts that were chosen for them, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anychip.operators.permutation import as_given, in_order_of_key
from anychip_npu.soc import is_a2_or_a3
from anychip_npu.table import Needs, declared

_MOST_CHOICES = 512
_SORTED = 2**24 - 1
"""The experts' numbers are sorted as float32, and so many of them: both must be below."""
_CHOICES = {"choices": range(1, _MOST_CHOICES + 1)}


def _is_permutable(x: Tensor, indices: Tensor, *_: Tensor | None, num_experts: int) -> bool:
    countable = 0 < indices.numel() < _SORTED and num_experts < _SORTED
    return countable and x.numel() > 0 and is_a2_or_a3(x)


@declared.forward(
    "permute",
    calls={"npu::npu_moe_token_permute": "aclnnMoeTokenPermute"},
    limits=_CHOICES,
    accepts=_is_permutable,
)
def permute(
    x: Tensor,
    indices: Tensor,
    key: Tensor | None,
    num_tokens: Tensor | None,
    *,
    num_experts: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers from 0 to 2^24 - 2, up to 512 for a token:
    https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/850alpha002/API/aolapi/context/aclnnMoeTokenPermute.md
    Of equal ones the first comes first, as the sort that it is made of says:
    https://www.hiascend.com/document/detail/zh/canncommercial/850/API/ascendcopapi/atlasascendc_api_07_0231.html
    """
    indices, order = in_order_of_key(indices, key, num_tokens)
    x = x if order is None else x.index_select(0, order)
    # What belongs to no expert stands behind the last one.
    outside = (indices < 0) | (indices >= num_experts)
    chosen = indices.masked_fill(outside, num_experts).contiguous()
    y, places = torch.ops.npu.npu_moe_token_permute(x.contiguous(), chosen)
    flat = chosen.reshape(-1).to(torch.int64)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    offsets = counts[:num_experts].cumsum(0, dtype=torch.int64)
    row_map = places.to(torch.int64).view(indices.shape)
    return y, as_given(row_map, order), offsets


def _takes_permuted(grad: Tensor, _: Tensor, __: Tensor, row_map: Tensor, **___: Any) -> bool:
    some = grad.numel() > 0 and row_map.shape[1] <= _MOST_CHOICES
    return some and grad.shape[0] == row_map.numel() < _SORTED and is_a2_or_a3(grad)


@declared.backward(
    "permute",
    calls={"npu::npu_moe_token_permute_grad": "aclnnMoeTokenPermuteGrad"},
    accepts=_takes_permuted,
)
def permute_backward(
    grad: Tensor, _: Tensor, __: Tensor, row_map: Tensor, *, num_experts: int, needs: Needs
) -> tuple[Tensor]:
    """https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/82RC1alpha003/API/aolapi/context/aclnnMoeTokenPermuteGrad.md"""
    grad, places = grad.contiguous(), row_map.reshape(-1).to(torch.int32)
    # Of the tokens only shape and dtype are read, and of the experts how many a token has.
    like = grad[: row_map.shape[0]]
    return (torch.ops.npu.npu_moe_token_permute_grad(like, grad, row_map, places),)


def _places_and_weights(
    x: Tensor, row_map: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Without weights the kernel takes one choice for each token, so that ones are given."""
    if weights is None:
        weights = x.new_ones(row_map.shape)
    return row_map.reshape(-1).to(torch.int32), weights.contiguous()


def _is_permuted(x: Tensor, row_map: Tensor, weights: Tensor | None) -> bool:
    return 0 < x.numel() and row_map.numel() < _SORTED and is_a2_or_a3(x)


@declared.forward(
    "unpermute",
    calls={"npu::_npu_moe_token_unpermute": "aclnnMoeTokenUnpermute"},
    limits=_CHOICES,
    accepts=_is_permuted,
)
def unpermute(x: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    """Up to 512 choices for a token:
    https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/850alpha002/API/aolapi/context/aclnnMoeTokenUnpermute.md
    """
    places, weights = _places_and_weights(x, row_map, weights)
    found: Tensor = torch.ops.npu._npu_moe_token_unpermute(x.contiguous(), places, weights)[0]
    return found


@declared.backward(
    "unpermute",
    calls={"npu::npu_moe_token_unpermute_grad": "aclnnMoeTokenUnpermuteGrad"},
    limits=_CHOICES,
    accepts=lambda grad, x, row_map, weights, **_: _is_permuted(x, row_map, weights),
)
def unpermute_backward(
    grad: Tensor, x: Tensor, row_map: Tensor, weights: Tensor | None, *, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    """https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/82RC1alpha003/API/aolapi/context/aclnnMoeTokenUnpermuteGrad.md"""
    places, given = _places_and_weights(x, row_map, weights)
    dx, dweights = torch.ops.npu.npu_moe_token_unpermute_grad(
        x.contiguous(), grad.contiguous(), places, given
    )
    wants_weights = needs[1] and weights is not None
    return (dx if needs[0] else None), (dweights if wants_weights else None)
