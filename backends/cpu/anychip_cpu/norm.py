"""group_norm on the host: the native kernel of layer_norm, with a group as a row.

Not torch's, which computes ``x * scale + shift``: of two numbers that lie close to each other that
leaves fewer digits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anychip.operators.norm import channel_sum
from anychip_cpu import operators
from anychip_cpu.table import Needs, declared, has_elements


def _rows(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """(N * groups, numbers of a group), and a weight of ones for it."""
    wide = x.float().reshape(x.shape[0] * num_groups, -1)
    return wide, torch.ones(wide.shape[1])


def _by_channel(x: Tensor, values: Tensor) -> Tensor:
    return values.float().reshape(-1, *[1] * (x.dim() - 2))


@declared.forward("group_norm", accepts=has_elements)
def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, num_groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    normed, mean, rstd = operators.layer_norm(*_rows(x, num_groups), None, eps=eps)
    y = normed.view(x.shape).mul_(_by_channel(x, weight))
    if bias is not None:
        y.add_(_by_channel(x, bias))
    return y.to(x.dtype), mean.view(-1, num_groups), rstd.view(-1, num_groups)


@declared.backward("group_norm", accepts=has_elements)
def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    num_groups: int,
    eps: float,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    rows, ones = _rows(x, num_groups)
    dx = dweight = dbias = None
    if needs[0]:
        scaled = (grad.float() * _by_channel(x, weight)).reshape(rows.shape)
        saved: Any = (scaled, rows, ones, mean.reshape(-1), rstd.reshape(-1))
        found = operators.layer_norm_backward(*saved, eps=eps, needs=(True, False, False))[0]
        assert found is not None
        dx = found.view(x.shape).to(x.dtype)
    if needs[1]:
        normed = (rows - mean.reshape(-1, 1)).mul_(rstd.reshape(-1, 1)).view(x.shape)
        dweight = channel_sum(normed.mul_(grad)).to(weight.dtype)
    if needs[2]:
        dbias = channel_sum(grad.float()).to(weight.dtype)
    return dx, dweight, dbias
