"""Attention with dropout on the host, of which torch's kernel has none.

The scores of one key head of one batch are there at a time, and the native dropout kernel draws
the mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from anychip.operators.attention import attend, attend_backward, hidden_keys, weight_rows
from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import Needs, declared

_kernels: Any = native.kernels


def _key_heads(q: Tensor, k: Tensor) -> Iterator[tuple[int, int, slice]]:
    """Batch, key head, and its query heads, in the order of the (B, H, Sq, Sk) weights."""
    groups = q.shape[2] // k.shape[2]
    for batch in range(q.shape[0]):
        for head in range(k.shape[2]):
            yield batch, head, slice(head * groups, (head + 1) * groups)


def _factor(
    k: Tensor, rng: Tensor, rows: Tensor, key_index: Tensor | None, p: float, keys: int
) -> Tensor:
    """What the weights of the heads and queries of ``rows`` are multiplied by: (1, H, Sq, Sk)."""
    factor = torch.ones(1, *rows.shape, k.shape[1])
    columns, width = k.shape[1], keys or k.shape[1]
    if key_index is not None:
        # These need not follow each other: each is a row of one column.
        rows, columns, width = rows.unsqueeze(-1) * width + key_index, 1, 1
    rows, rng = rows.contiguous(), rng.contiguous()
    place = (rng.data_ptr(), p, rows.data_ptr(), width)
    given = (factor.data_ptr(), factor.data_ptr(), factor.numel(), columns, CODES[torch.float32])
    _kernels.dropout(*given, *place)
    return factor


def attention_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rng: Tensor,
    *index: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
    keys: int = 0,
    **sizes: int,
) -> tuple[Tensor, Tensor]:
    hidden, rows = hidden_keys(q, k, causal), weight_rows(q, index[:3], **sizes)
    y = q.new_empty(q.shape)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    for batch, head, heads in _key_heads(q, k):
        own_q = q[batch : batch + 1, :, heads]
        own_k, own_v = (t[batch : batch + 1, :, head : head + 1] for t in (k, v))
        factor = _factor(k, rng, rows[batch, heads], index[3], p, keys)
        found = attend(own_q, own_k, own_v, hidden, scale, factor)
        y[batch, :, heads], lse[batch, heads] = found[0][0], found[1][0]
    return y, lse


def attention_dropout_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    rng: Tensor,
    *index: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
    needs: Needs,
    keys: int = 0,
    **sizes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    hidden, rows = hidden_keys(q, k, causal), weight_rows(q, index[:3], **sizes)
    for batch, head, heads in _key_heads(q, k):
        own_grad, own_q, own_y = (t[batch : batch + 1, :, heads] for t in (grad, q, y))
        own_k, own_v = (t[batch : batch + 1, :, head : head + 1] for t in (k, v))
        factor = _factor(k, rng, rows[batch, heads], index[3], p, keys)
        own_lse = lse[batch : batch + 1, heads]
        found = attend_backward(
            own_grad, own_q, own_k, own_v, own_y, own_lse, hidden, scale, factor
        )
        dq[batch, :, heads] = found[0][0]
        dk[batch, :, head], dv[batch, :, head] = found[1][0, :, 0], found[2][0, :, 0]
    return dq, dk, dv


if native.kernels is not None:
    declared.forward("attention_dropout", kind="mapped")(attention_dropout)
    declared.backward("attention_dropout", kind="mapped")(attention_dropout_backward)
