"""attention_varlen on the host: all sequences in one native call, or each by torch's kernel."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from anychip.operators.varlen import refuse_no_packing
from anychip_cpu import tiled_attention
from anychip_cpu.attention import attention, attention_backward, flash_is_quicker, takes_flash
from anychip_cpu.table import FLOATS, Needs, declared


def _queries(q: Tensor, cu_seqlens: Tensor) -> int:
    """Of a sequence, on average."""
    return q.shape[0] // max(cu_seqlens.numel() - 1, 1)


_LONG = 256
"""Queries of a sequence, on average, from where on torch's kernel is quicker, which is asked once
for each: of 256 it takes 0.5 and 0.9 of the native one's time, of 128 0.7 and 1.2, of 64 1.5 and
1.9 (measured, as :func:`.attention.flash_is_quicker`)."""


@declared.forward(
    "attention_varlen",
    dtypes=FLOATS,
    accepts=lambda q, k, v, ends, *_, **attrs: (
        tiled_attention.takes(q, k, v, queries=_queries(q, ends))
        and not (_queries(q, ends) >= _LONG and flash_is_quicker(q, k, v, **attrs))
    ),
)
def native_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **attrs: Any
) -> tuple[Tensor, Tensor]:
    refuse_no_packing(q, k, cu_seqlens_q, cu_seqlens_k)
    return tiled_attention.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, **attrs)


@declared.backward(
    "attention_varlen",
    dtypes=FLOATS,
    accepts=lambda grad, q, k, v, y, lse, ends, *_, **__: tiled_attention.takes_backward(
        grad, q, k, v, y, queries=_queries(q, ends)
    ),
)
def native_attention_varlen_backward(
    *saved: Tensor, **attrs: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return tiled_attention.backward(*saved, **attrs)


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    """The queries and the keys of every sequence that has some of both."""
    queries, keys = (itertools.pairwise(t.tolist()) for t in (cu_seqlens_q, cu_seqlens_k))
    pairs = zip(queries, keys, strict=True)
    return [(slice(a, b), slice(c, d)) for (a, b), (c, d) in pairs if a < b and c < d]


def _takes(q: Tensor, k: Tensor, v: Tensor, **attrs: Any) -> bool:
    return not q.shape[0] or not k.shape[0] or takes_flash(q, k, v, **attrs)


@declared.forward(
    "attention_varlen",
    kind="mapped",
    dtypes=FLOATS,
    accepts=lambda q, k, v, *ends, **attrs: _takes(q, k, v, **attrs),
)
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool,
    scale: float | None,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    refuse_no_packing(q, k, cu_seqlens_q, cu_seqlens_k)
    y = torch.zeros_like(q, dtype=out_dtype, memory_format=torch.contiguous_format)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf)
    for own, seen in _sequences(cu_seqlens_q, cu_seqlens_k):
        given = (q[None, own], k[None, seen], v[None, seen])
        found = attention(*given, causal=causal, scale=scale, out_dtype=out_dtype)
        y[own], lse[:, own] = found[0][0], found[1][0]
    return y, lse


@declared.backward(
    "attention_varlen",
    kind="mapped",
    dtypes=FLOATS,
    accepts=lambda grad, q, k, v, *saved, **attrs: _takes(q, k, v, **attrs),
)
def attention_varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool,
    scale: float | None,
    out_dtype: torch.dtype | None,
    needs: Needs,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    for own, seen in _sequences(cu_seqlens_q, cu_seqlens_k):
        dq[None, own], dk[None, seen], dv[None, seen] = attention_backward(
            grad[None, own],
            q[None, own],
            k[None, seen],
            v[None, seen],
            y[None, own],
            lse[None, :, own],
            causal=causal,
            scale=scale,
            out_dtype=out_dtype,
            needs=needs,
        )
    return dq, dk, dv
