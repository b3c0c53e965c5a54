"""attention_varlen on the host: attention of each sequence by itself."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from anychip.operators.ragged import refuse_unsorted
from anychip_cpu.attention import attention, attention_backward, takes_flash
from anychip_cpu.table import FLOATS, Needs, declared


def _sequences(cu_seqlens: Tensor) -> list[slice]:
    """The rows of every sequence that has some."""
    ends = cu_seqlens.tolist()
    return [slice(a, b) for a, b in itertools.pairwise(ends) if a < b]


@declared.forward(
    "attention_varlen",
    kind="mapped",
    dtypes=FLOATS,
    accepts=lambda q, k, v, cu_seqlens, **attrs: not q.shape[0] or takes_flash(q, k, v, **attrs),
)
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    refuse_unsorted("attention_varlen", "cu_seqlens", cu_seqlens, q.shape[0], starts_at_zero=True)
    y = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf)
    for rows in _sequences(cu_seqlens):
        found = attention(q[None, rows], k[None, rows], v[None, rows], causal=causal, scale=scale)
        y[rows], lse[:, rows] = found[0][0], found[1][0]
    return y, lse


@declared.backward(
    "attention_varlen",
    kind="mapped",
    dtypes=FLOATS,
    accepts=lambda grad, q, k, v, y, lse, cu_seqlens, **attrs: (
        not q.shape[0] or takes_flash(q, k, v, **attrs)
    ),
)
def attention_varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    *,
    causal: bool,
    scale: float | None,
    needs: Needs,
) -> tuple[Tensor, Tensor, Tensor]:
    found = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    for rows in _sequences(cu_seqlens):
        own_grad, own_q, own_k, own_v, own_y = (t[None, rows] for t in (grad, q, k, v, y))
        parts = attention_backward(
            own_grad,
            own_q,
            own_k,
            own_v,
            own_y,
            lse[None, :, rows],
            causal=causal,
            scale=scale,
            needs=needs,
        )
        for whole, part in zip(found, parts, strict=True):
            whole[rows] = part[0]
    dq, dk, dv = found
    return dq, dk, dv
