"""Rows for attention over packed sequences: flash attention; to float32 one call per sequence.

Flash attention's grid is made for the longest sequence, a number that the host needs and the device
has. It is read once per packing, not once per layer; while a graph is recorded, where nothing can
be read and the numbers may change from replay to replay, the number of tokens stands for it. Its
rows of padding are as they were, and its lse of a query that sees no key is +inf.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from anychip.contract.settings import SameBits
from anychip.operators.ragged import ReadOnce
from anychip.operators.varlen import blind_queries
from anychip_cuda.attention import (
    HALVES,
    HEAD_DIMS,
    attention_backward_by_efficient,
    attention_backward_by_products,
    attention_by_efficient,
    attention_by_products,
    filled,
    flash_goes_back,
    no_rng,
    takes_efficient,
    takes_flash,
    true_scale,
)
from anychip_cuda.table import Needs, declared

_aten = torch.ops.aten


def _recording(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def longest(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[int, int]:
    """Rows of the most queries and keys of a sequence, or numbers that are not below them.

    At least 1, for the grid, and 2 queries: with 1 and groups of heads torch takes each row of q
    for a sequence, without a look at where they end. There is at least one sequence.
    """
    if _recording(cu_seqlens_q):
        return max(q.shape[0], 2), k.shape[0]
    return _longest(cu_seqlens_q, cu_seqlens_k)


@ReadOnce
def _longest(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[int, int]:
    most = torch.stack([torch.diff(t).max().long() for t in (cu_seqlens_q, cu_seqlens_k)])
    queries, keys = most.clamp(min=1).tolist()
    return max(queries, 2), keys


def _takes_flash(q: Tensor, k: Tensor, v: Tensor, *_: Tensor, **attrs: Any) -> bool:
    return takes_flash(q, k, v, **attrs)


def _packing(q: Tensor, k: Tensor, *ends: Tensor) -> tuple[Tensor | int, ...]:
    """How the kernels take it: where the sequences end, and the longest of each."""
    return (*(t.to(torch.int32).contiguous() for t in ends), *longest(q, k, *ends))


@declared.forward(
    "attention_varlen",
    kind="mapped",
    dtypes=HALVES,
    limits={"head_dim": HEAD_DIMS},
    accepts=_takes_flash,
)
def attention_varlen_by_flash(
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
    if cu_seqlens_q.shape[0] < 2:
        lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32)
        return torch.zeros_like(q, memory_format=torch.contiguous_format), lse
    found = _aten._flash_attention_forward(
        *(filled(t) for t in (q, k, v)),
        *_packing(q, k, cu_seqlens_q, cu_seqlens_k),
        0.0,
        causal,
        False,
        scale=true_scale(q, scale),
    )
    blind = blind_queries(q.shape[0], cu_seqlens_q, cu_seqlens_k, causal)
    y = found[0][..., : q.shape[-1]].masked_fill(blind[:, None, None], 0.0)
    return y.contiguous(), found[1].masked_fill(blind, -math.inf)


def _goes_back_by_flash(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor, **attrs: Any
) -> bool:
    return q.dtype in HALVES and _takes_flash(q, k, v, **attrs) and flash_goes_back(q)


@declared.backward(
    "attention_varlen", kind="mapped", limits={"head_dim": HEAD_DIMS}, accepts=_goes_back_by_flash
)
def attention_varlen_backward_by_flash(
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
) -> tuple[Tensor, ...]:
    if cu_seqlens_q.shape[0] < 2:
        return tuple(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    blind = blind_queries(q.shape[0], cu_seqlens_q, cu_seqlens_k, causal)
    with SameBits():
        found = _aten._flash_attention_backward(
            *(filled(t) for t in (grad, q, k, v, y)),
            # exp(score - inf) is 0 whatever the score is.
            lse.masked_fill(blind, math.inf).contiguous(),
            *_packing(q, k, cu_seqlens_q, cu_seqlens_k),
            0.0,
            causal,
            *no_rng(q.device),
            scale=true_scale(q, scale),
        )
    unseen = torch.arange(k.shape[0], device=k.device) >= cu_seqlens_k[-1]
    pairs = zip(found, (blind, unseen, unseen), strict=False)
    wholes = (t[..., : q.shape[-1]].masked_fill(rows[:, None, None], 0.0) for t, rows in pairs)
    return tuple(t.contiguous() for t in wholes)


# float32, or a result of it: one call per sequence


def _takes_each(q: Tensor, k: Tensor, v: Tensor, **attrs: Any) -> bool:
    wide = torch.float32 in (q.dtype, attrs["out_dtype"])
    return wide and takes_efficient(q, k, v, **attrs) and not _recording(q)


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    """The queries and keys of every sequence that has some of both. Waits for the device."""
    queries, keys = (itertools.pairwise(t.tolist()) for t in (cu_seqlens_q, cu_seqlens_k))
    pairs = zip(queries, keys, strict=True)
    return [(slice(a, b), slice(c, d)) for (a, b), (c, d) in pairs if a < b and c < d]


@declared.forward(
    "attention_varlen",
    kind="mapped",
    accepts=lambda q, k, v, *ends, **attrs: _takes_each(q, k, v, **attrs),
)
def attention_varlen_by_sequence(
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
    attend = attention_by_efficient if q.dtype in HALVES else attention_by_products
    y = torch.zeros_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32)
    for own, seen in _sequences(cu_seqlens_q, cu_seqlens_k):
        given = (q[None, own], k[None, seen], v[None, seen])
        found = attend(*given, causal=causal, scale=scale, out_dtype=out_dtype)
        y[own], lse[:, own] = found[0][0], found[1][0]
    return y, lse


@declared.backward(
    "attention_varlen",
    kind="mapped",
    accepts=lambda grad, q, k, v, *saved, **attrs: _takes_each(q, k, v, **attrs),
)
def attention_varlen_backward_by_sequence(
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
) -> tuple[Tensor, ...]:
    is_narrow = q.dtype in HALVES
    go_back = attention_backward_by_efficient if is_narrow else attention_backward_by_products
    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    for own, seen in _sequences(cu_seqlens_q, cu_seqlens_k):
        dq[None, own], dk[None, seen], dv[None, seen] = go_back(
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
