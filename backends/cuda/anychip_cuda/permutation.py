"""Rows of permute and unpermute, for up to 1,024 experts: a block's counters lie in its memory."""

from __future__ import annotations

import torch
from torch import Tensor

from anychip.operators.permutation import as_given, in_order_of_key
from anychip_cuda.native import Kernels, address
from anychip_cuda.table import Needs, declared

_MOST_EXPERTS = 1024
_MOST_CHOICES = 2**31 - 1
"""Of all tokens together: the sort counts them in 32 bits."""


def _are_countable(x: Tensor, indices: Tensor, *_: Tensor | None, num_experts: int) -> bool:
    return num_experts <= _MOST_EXPERTS and indices.numel() <= _MOST_CHOICES


@declared.forward("permute", accepts=_are_countable)
def permute(
    kernels: Kernels,
    x: Tensor,
    indices: Tensor,
    key: Tensor | None = None,
    num_tokens: Tensor | None = None,
    *,
    num_experts: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernels sort by expert alone; a key's order is torch's, of the tokens before them."""
    indices, order = in_order_of_key(indices, key, num_tokens)
    x, indices = x.contiguous(), indices.contiguous()
    (tokens, choices), place = indices.shape, kernels.place(x)
    y = x.new_empty((tokens * choices, x.shape[1]))
    row_map = torch.empty(indices.shape, dtype=torch.int64, device=x.device)
    offsets = torch.empty(num_experts, dtype=torch.int64, device=x.device)
    scratch = torch.empty(
        kernels.native.permutation_scratch(indices.numel(), num_experts),
        dtype=torch.int32,
        device=x.device,
    )
    kernels.native.permutation_map(
        indices.data_ptr(),
        indices.dtype == torch.int64,
        row_map.data_ptr(),
        offsets.data_ptr(),
        scratch.data_ptr(),
        indices.numel(),
        num_experts,
        *place,
    )
    row_map = as_given(row_map, order)
    kernels.native.permute_rows(
        x.data_ptr(),
        row_map.data_ptr(),
        y.data_ptr(),
        tokens,
        choices,
        x.shape[1] * x.element_size(),
        *place,
    )
    return y, row_map, offsets


@declared.backward("permute")
def permute_backward(
    kernels: Kernels,
    grad: Tensor,
    _: Tensor,
    __: Tensor,
    row_map: Tensor,
    *,
    num_experts: int,
    needs: Needs,
) -> tuple[Tensor]:
    if grad.shape[0] != row_map.numel():
        # Nothing else that a backward is given says how many rows there are.
        raise ValueError(
            f"permute_backward: grad0 must have {row_map.numel()} rows, as y1 says, got "
            f"{grad.shape[0]}"
        )
    return (_combined(kernels, grad, row_map, None),)


@declared.forward("unpermute")
def unpermute(kernels: Kernels, x: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    return _combined(kernels, x, row_map, weights)


def _combined(kernels: Kernels, x: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    x, row_map = x.contiguous(), row_map.contiguous()
    weights = None if weights is None else weights.contiguous()
    y = x.new_empty((row_map.shape[0], x.shape[1]))
    kernels.native.combine_rows(
        x.data_ptr(),
        row_map.data_ptr(),
        address(weights),
        y.data_ptr(),
        *row_map.shape,
        x.shape[1],
        kernels.codes[x.dtype],
        kernels.codes[x.dtype if weights is None else weights.dtype],
        *kernels.place(x),
    )
    return y


@declared.backward("unpermute")
def unpermute_backward(
    kernels: Kernels,
    grad: Tensor,
    x: Tensor,
    row_map: Tensor,
    weights: Tensor | None,
    *,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None]:
    grad, x, row_map = grad.contiguous(), x.contiguous(), row_map.contiguous()
    weights = None if weights is None else weights.contiguous()
    dx = torch.empty_like(x) if needs[0] else None
    dweights = torch.empty_like(weights) if needs[1] and weights is not None else None
    kernels.native.combine_rows_backward(
        grad.data_ptr(),
        x.data_ptr(),
        row_map.data_ptr(),
        address(weights),
        address(dx),
        address(dweights),
        *row_map.shape,
        x.shape[1],
        kernels.codes[x.dtype],
        kernels.codes[x.dtype if weights is None else weights.dtype],
        *kernels.place(x),
    )
    return dx, dweights
