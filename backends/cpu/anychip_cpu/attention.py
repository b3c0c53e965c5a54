"""Attention on the host: a native kernel or torch's flash attention, which keep no scores.

torch's kernel aligns its causal mask to the first key. Where queries and keys differ in length, a
(queries, keys) mask is made for it, one for all batches and heads; a single query needs none.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from anychip import operators
from anychip.operators.attention import widened
from anychip_cpu import tiled_attention
from anychip_cpu.products import IN_TILES, OWN_BELOW
from anychip_cpu.table import FLOATS, Needs, declared

_aten = torch.ops.aten


def flash_is_quicker(
    q: Tensor, k: Tensor, v: Tensor, *, out_dtype: torch.dtype | None = None, **attrs: Any
) -> bool:
    """Whether torch's flash attention, by the processor's tiles, is quicker than the native kernel.

    Measured (bfloat16, heads of 64 and 128, 16 to 2,048 keys): 1.05 to 2.5 times as fast.
    """
    is_kept = out_dtype in (None, q.dtype)
    return q.dtype in IN_TILES and is_kept and takes_flash(q, k, v, **attrs)


_MANY_KEYS = 768
"""From so many keys that a query sees on, torch's gradients are quicker too: of 512 the native ones
are 1.2 times as fast, of 1,024 torch's are."""


def _flash_gradients_are_quicker(q: Tensor, k: Tensor, v: Tensor, **attrs: Any) -> bool:
    seen = k.shape[1] // 2 if attrs["causal"] else k.shape[1]
    return seen >= _MANY_KEYS and flash_is_quicker(q, k, v, **attrs)


@declared.forward(
    "attention",
    accepts=lambda q, k, v, **attrs: (
        not flash_is_quicker(q, k, v, **attrs)
        and tiled_attention.takes(q, k, v, queries=q.shape[1])
    ),
)
def native_attention(q: Tensor, k: Tensor, v: Tensor, **attrs: Any) -> tuple[Tensor, Tensor]:
    return tiled_attention.forward(q, k, v, **attrs)


@declared.backward(
    "attention",
    dtypes=FLOATS,
    accepts=lambda grad, q, k, v, y, lse, **attrs: (
        not _flash_gradients_are_quicker(q, k, v, **attrs)
        and tiled_attention.takes_backward(grad, q, k, v, y, queries=q.shape[1])
    ),
)
def native_attention_backward(
    *saved: Tensor, **attrs: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return tiled_attention.backward(*saved, **attrs)


def takes_flash(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, **_: Any) -> bool:
    # torch's kernel divides by the number of heads, takes one dtype, and multiplies the -inf of
    # the causal mask by the scale.
    one_dtype = q.dtype == k.dtype == v.dtype
    some = q.numel() > 0 and k.numel() > 0
    return some and one_dtype and (scale is None or scale > 0.0)


_FEW_QUERIES = 64
"""Fewer do not pay for keys and values that are made wide."""


def _inner_dtype(q: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """In which torch's kernel is quicker: q's 16 bits or, by its products, float32."""
    own = max(OWN_BELOW.get(q.dtype, 0), _FEW_QUERIES)
    return q.dtype if out_dtype in (None, q.dtype) and q.shape[1] < own else torch.float32


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


@declared.forward("attention", kind="mapped", accepts=takes_flash)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    dtype = q.dtype
    q, k, v = widened(q, _inner_dtype(q, out_dtype), q, k, v)
    attrs: dict[str, Any] = {"causal": causal, "scale": scale, "out_dtype": None}
    blind = _blind(q, k, causal)
    if blind:
        batch, length, heads, _dim = q.shape
        y = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = torch.full((batch, heads, length), -math.inf)
        y[:, blind:], lse[..., blind:] = attention(q[:, blind:], k, v, **attrs)
        return y.to(out_dtype or dtype), lse
    is_causal, mask = _mask(q, k, causal)
    # torch's kernel takes the last dim to have stride 1, without looking.
    by_head = (t.contiguous().transpose(1, 2) for t in (q, k, v))
    y, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        *by_head, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    if not lse.all():
        # torch gives a row whose scores are all NaN the lse 0 and the result 0, as if it were
        # masked. A true lse of 0 is rare, and then this only costs time.
        exact, lse = operators.attention.forward(q, k, v, **attrs)
        return exact.to(out_dtype or dtype), lse
    return y.transpose(1, 2).contiguous().to(out_dtype or dtype), lse.contiguous()


@declared.backward(
    "attention",
    kind="mapped",
    dtypes=FLOATS,
    accepts=lambda grad, q, k, v, y, lse, **attrs: takes_flash(q, k, v, **attrs),
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
    out_dtype: torch.dtype | None,
    needs: Needs,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = q.dtype
    grad, q, k, v, y = widened(q, _inner_dtype(q, out_dtype), grad, q, k, v, y)
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
    dq = dq.transpose(1, 2).to(dtype)
    return (
        torch.nn.functional.pad(dq, (0, 0, 0, 0, blind, 0)) if blind else dq.contiguous(),
        _sum_groups(dk.transpose(1, 2), kv_heads).to(dtype),
        _sum_groups(dv.transpose(1, 2), kv_heads).to(dtype),
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
