"""The host's rows for attention, mapped to torch's flash attention: no score is kept.

torch's kernel aligns its causal mask to the first key. Where queries and keys differ in length, a
(queries, keys) mask is made for it, one for all batches and heads; a single query needs none.

It has no dropout either. With dropout the scores of one key head of one batch are there at a time,
and the native dropout kernel draws the mask.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from anychip import operators
from anychip.operators.attention import attend, attend_backward, hidden_keys, weight_rows
from anychip.operators.ragged import refuse_unsorted
from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import FLOATS, Needs, declared

_aten = torch.ops.aten
_kernels: Any = native.kernels


def _flash(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, **_: Any) -> bool:
    # torch's kernel divides by the number of heads, takes one dtype, and multiplies the -inf of
    # the causal mask by the scale.
    one_dtype = q.dtype == k.dtype == v.dtype
    some = q.numel() > 0 and k.numel() > 0
    return some and one_dtype and (scale is None or scale > 0.0)


def _mask(q: Tensor, k: Tensor, causal: bool) -> tuple[bool, Tensor | None]:
    """torch's ``is_causal`` and ``attn_mask`` for queries that all see at least one key."""
    queries, keys = q.shape[1], k.shape[1]
    if not causal or queries == 1:
        return False, None
    if queries == keys:
        return True, None
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    return False, torch.zeros(queries, keys).masked_fill(hidden, -math.inf)


def _blind(q: Tensor, k: Tensor, causal: bool) -> int:
    """How many queries, the first ones, see no key."""
    return max(q.shape[1] - k.shape[1], 0) if causal else 0


@declared.forward("attention", kind="mapped", accepts=_flash)
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    blind = _blind(q, k, causal)
    if blind:
        batch, length, heads, _dim = q.shape
        y = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = torch.full((batch, heads, length), -math.inf)
        y[:, blind:], lse[..., blind:] = attention(q[:, blind:], k, v, causal=True, scale=scale)
        return y, lse
    is_causal, mask = _mask(q, k, causal)
    # torch's kernel takes the last dim to have stride 1, without looking.
    by_head = (t.contiguous().transpose(1, 2) for t in (q, k, v))
    y, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        *by_head, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    if not lse.all():
        # torch gives a row whose scores are all NaN the lse 0 and the result 0, as if it were
        # masked. A true lse of 0 is rare, and then this only costs time.
        exact: tuple[Tensor, Tensor] = operators.attention.forward(
            q, k, v, causal=causal, scale=scale
        )
        return exact
    return y.transpose(1, 2).contiguous(), lse.contiguous()


@declared.backward(
    "attention",
    kind="mapped",
    dtypes=FLOATS,
    accepts=lambda grad, q, k, v, y, lse, **attrs: _flash(q, k, v, **attrs),
)
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float | None,
    needs: Needs,
) -> tuple[Tensor, Tensor, Tensor]:
    blind, heads, kv_heads = _blind(q, k, causal), q.shape[2], k.shape[2]
    is_causal, mask = _mask(q[:, blind:], k, causal)
    grad, q, y = (t[:, blind:].contiguous() for t in (grad, q, y))
    k, v, lse = k.contiguous(), v.contiguous(), lse[..., blind:].contiguous()
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad.transpose(1, 2),
        q.transpose(1, 2),
        _by_head(k, heads),
        _by_head(v, heads),
        y.transpose(1, 2),
        lse,
        0.0,
        is_causal,
        attn_mask=mask,
        scale=scale,
    )
    dq = dq.transpose(1, 2)
    return (
        torch.nn.functional.pad(dq, (0, 0, 0, 0, blind, 0)) if blind else dq.contiguous(),
        _sum_groups(dk.transpose(1, 2), kv_heads).to(k.dtype),
        _sum_groups(dv.transpose(1, 2), kv_heads).to(v.dtype),
    )


def _by_head(x: Tensor, heads: int) -> Tensor:
    """(B, S, Hk, D) as (B, H, S, D), each key head repeated for its query heads."""
    groups = heads // x.shape[2]
    return (x if groups == 1 else x.repeat_interleave(groups, dim=2)).transpose(1, 2)


def _sum_groups(grad: Tensor, kv_heads: int) -> Tensor:
    batch, seq, heads, dim = grad.shape
    if heads == kv_heads:
        return grad.contiguous()
    return grad.reshape(batch, seq, kv_heads, heads // kv_heads, dim).float().sum(3)


def _sequences(cu_seqlens: Tensor) -> list[slice]:
    """The rows of every sequence that has some."""
    ends = cu_seqlens.tolist()
    return [slice(a, b) for a, b in itertools.pairwise(ends) if a < b]


@declared.forward(
    "attention_varlen",
    kind="mapped",
    dtypes=FLOATS,
    accepts=lambda q, k, v, cu_seqlens, **attrs: not q.shape[0] or _flash(q, k, v, **attrs),
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
        not q.shape[0] or _flash(q, k, v, **attrs)
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
    addresses = (factor.data_ptr(), rng.data_ptr(), factor.data_ptr())
    place = (rows.data_ptr(), columns, width, 0)
    _kernels.dropout(*addresses, factor.numel(), p, CODES[torch.float32], *place)
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
