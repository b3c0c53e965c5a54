"""softmax on the host: torch's, of float32 scores."""

from __future__ import annotations

import torch
from torch import Tensor

from anychip import operators
from anychip_cpu.numerics import rowwise
from anychip_cpu.table import Needs, declared

_aten = torch.ops.aten


def _offset(x: Tensor, mask: Tensor | None, bias: Tensor | None, causal: bool) -> Tensor | None:
    """What is added to the scores: the bias, and -inf for what is hidden."""
    offset = None if bias is None else bias.float()
    if mask is not None:
        hidden = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        offset = hidden if offset is None else offset + hidden
    if causal:
        queries, keys = x.shape[-2:]
        later = torch.full((queries, keys), -torch.inf).triu_(keys - queries + 1)
        offset = later if offset is None else offset + later
    return offset


@declared.forward("softmax", kind="mapped")
def softmax(
    x: Tensor, mask: Tensor | None, bias: Tensor | None, *, scale: float, causal: bool
) -> Tensor:
    offset = _offset(x, mask, bias, causal)
    scores = x.float() * scale if offset is None else torch.add(offset, x, alpha=scale)
    y = torch.softmax(scores, -1)
    if y[..., :1].isnan().any():
        # A row without a visible key, which is NaN throughout; or one with a NaN, or with an Inf or
        # NaN that is hidden and must not count.
        y.masked_fill_((scores == -torch.inf).all(-1, keepdim=True), 0.0)
        if y[..., :1].isnan().any():
            exact: Tensor = operators.softmax.forward(x, mask, bias, scale=scale, causal=causal)
            return exact
    return y.to(x.dtype).contiguous()


def _score_gradients(grad: Tensor, y: Tensor) -> Tensor:
    dscores: Tensor = _aten._softmax_backward_data(grad.float(), y.float(), -1, torch.float32)
    return dscores


@declared.backward("softmax", kind="mapped")
def softmax_backward(
    grad: Tensor, y: Tensor, bias: Tensor | None, *, scale: float, causal: bool, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    if bias is not None and needs[1]:
        # Not by blocks: the sums for the bias go across rows, and are float32.
        dscores = _score_gradients(grad, y)
        dbias = dscores.sum_to_size(bias.shape).to(bias.dtype).contiguous()
        return ((dscores * scale).to(y.dtype).contiguous() if needs[0] else None), dbias

    def compute(grad: Tensor, y: Tensor) -> tuple[Tensor]:
        return (_score_gradients(grad, y).mul_(scale).contiguous(),)

    (dx,) = rowwise(compute, (grad, y), (y,))
    return dx, None
