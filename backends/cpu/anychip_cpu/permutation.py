"""permute and unpermute on the host, mapped to torch's sort and selection of rows.

The reference holds all rows of all choices in float32 at once; here choices take turns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anychip import operators
from anychip.operators.permutation import refuse_no_permutation
from anychip_cpu.table import Needs, declared


def _added(rows: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    """Each token's rows in the order of its choices."""
    total = torch.empty(0)
    for choice, places in enumerate(row_map.unbind(1)):
        each = rows.index_select(0, places).float()
        if weights is not None:
            each = each * weights[:, choice, None].float()
        total = each if choice == 0 else total.add_(each)
    return total.to(rows.dtype)


@declared.forward("permute", kind="mapped")
def permute(
    x: Tensor, indices: Tensor, *given: Tensor | None, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    y, row_map, offsets = operators.permute.forward(x, indices, *given, num_experts=num_experts)
    return y, row_map, offsets


@declared.backward("permute", kind="mapped")
def permute_backward(
    grad: Tensor, _: Tensor, __: Tensor, row_map: Tensor, *, num_experts: int, needs: Needs
) -> tuple[Tensor]:
    return (_added(grad, row_map, None),)


@declared.forward("unpermute", kind="mapped")
def unpermute(x: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    refuse_no_permutation(row_map)
    return _added(x, row_map, weights)


@declared.backward("unpermute", kind="mapped")
def unpermute_backward(
    grad: Tensor, x: Tensor, row_map: Tensor, weights: Tensor | None, *, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    wide = grad.float()
    dx = torch.empty(x.shape, dtype=x.dtype) if needs[0] else None
    dweights = torch.empty(row_map.shape, dtype=torch.float32) if needs[1] else None
    for choice, places in enumerate(row_map.unbind(1)):
        if dx is not None:
            each = wide if weights is None else wide * weights[:, choice, None].float()
            dx.index_copy_(0, places, each.to(x.dtype))
        if dweights is not None:
            dweights[:, choice] = (wide * x.index_select(0, places).float()).sum(-1)
    if dweights is None or weights is None:
        return dx, None
    return dx, dweights.to(weights.dtype)
