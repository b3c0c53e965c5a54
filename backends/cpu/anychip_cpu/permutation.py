"""permute and unpermute on the host: native kernels.

Each direction is a sum of chosen rows, or gives a row to each place where it was chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anychip.operators.permutation import as_given, in_order_of_key, refuse_no_permutation
from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import Needs, address, declared, have_one_dtype, wanted

_kernels: Any = native.kernels


def _added(rows: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    """Each token's rows in the order of its choices."""
    rows, row_map = rows.contiguous(), row_map.contiguous()
    weights = None if weights is None else weights.contiguous()
    y = torch.empty((row_map.shape[0], rows.shape[1]), dtype=rows.dtype)
    addresses = (rows.data_ptr(), row_map.data_ptr(), address(weights), y.data_ptr())
    codes = (CODES[rows.dtype], CODES[(rows if weights is None else weights).dtype])
    _kernels.sum_rows(*addresses, *row_map.shape, *rows.shape, *codes)
    return y


def _spread(
    y: Tensor, x: Tensor | None, row_map: Tensor, weights: Tensor | None, dx: int, dweights: int
) -> None:
    """Gradients of :func:`_added`, of which y is given, at these addresses."""
    y, row_map = y.contiguous(), row_map.contiguous()
    x, weights = (None if t is None else t.contiguous() for t in (x, weights))
    given = (y.data_ptr(), address(x), row_map.data_ptr(), address(weights))
    codes = (CODES[y.dtype], CODES[(y if weights is None else weights).dtype])
    _kernels.spread_rows(*given, dx, dweights, *row_map.shape, y.shape[1], *codes)


@declared.forward("permute")
def permute(
    x: Tensor,
    indices: Tensor,
    key: Tensor | None,
    num_tokens: Tensor | None,
    *,
    num_experts: int,
) -> tuple[Tensor, Tensor, Tensor]:
    indices, by_key = in_order_of_key(indices, key, num_tokens)
    experts = indices.long().contiguous()
    row_map, choice = torch.empty_like(experts), torch.empty_like(experts)
    offsets = torch.empty(num_experts, dtype=torch.int64)
    addresses = (t.data_ptr() for t in (experts, row_map, choice, offsets))
    _kernels.places_by_expert(*addresses, experts.numel(), num_experts)
    token = choice.view(-1, 1).div_(experts.shape[1], rounding_mode="floor")
    token = token if by_key is None else by_key[token]
    return _added(x, token, None), as_given(row_map, by_key), offsets


@declared.backward("permute")
def permute_backward(
    grad: Tensor, _: Tensor, __: Tensor, row_map: Tensor, *, num_experts: int, needs: Needs
) -> tuple[Tensor]:
    return (_added(grad, row_map, None),)


@declared.forward("unpermute")
def unpermute(x: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    row_map = row_map.contiguous()
    if not _kernels.is_permutation(row_map.data_ptr(), row_map.numel()):
        refuse_no_permutation(row_map)  # which says in what
    return _added(x, row_map, weights)


@declared.backward("unpermute", accepts=have_one_dtype)
def unpermute_backward(
    grad: Tensor, x: Tensor, row_map: Tensor, weights: Tensor | None, *, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    dx, dx_address = wanted(needs[0], x)
    dweights, dweights_address = (None, 0) if weights is None else wanted(needs[1], weights)
    _spread(grad, x, row_map, weights, dx_address, dweights_address)
    return dx, dweights
