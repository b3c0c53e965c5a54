"""Rows for attention over packed sequences, mapped to npu_fusion_attention in layout TND.

The kernel takes the ends of the sequences from the host. They are read once per packing, not once
per layer; while a graph is recorded the reference serves. The kernel is given no row of padding, no
sequence without queries or without keys, and no query that sees no key: the rows between are cut
out, which copies them where there are some.

Source: packing: Dao 2023, arXiv:2307.08691; the limits are those of
https://gitcode.com/Ascend/op-plugin/blob/master/docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anychip.contract.settings import SameBits
from anychip.operators.attention import widened
from anychip.operators.ragged import ReadOnce
from anychip_npu.attention import (
    HEAD_DIMS,
    HEADS,
    STATISTICS,
    lse_of,
    masking,
    statistics_of,
    takes,
    true_scale,
)
from anychip_npu.soc import is_recording
from anychip_npu.table import Needs, declared

_MOST_TOKENS = 1_000_000
_MOST_SEQUENCES = 1024
_LIMITS = {
    "head_dim": HEAD_DIMS,
    "heads": HEADS,
    "tokens": range(1, _MOST_TOKENS + 1),
    "keys": range(1, _MOST_TOKENS + 1),
    "sequences": range(_MOST_SEQUENCES + 1),
}


Range = tuple[int, int]


class Rows(NamedTuple):
    """Ranges of the rows of a packed tensor, in order, that a kernel gets one after the other."""

    ranges: Sequence[Range]

    def ends(self) -> list[int]:
        """Where each range ends among them."""
        return list(itertools.accumulate(end - start for start, end in self.ranges))

    def of(self, x: Tensor) -> Tensor:
        """Those rows, contiguous."""
        parts = [x[start:end] for start, end in self._joined()]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def back(self, x: Tensor, tokens: int, value: float = 0.0) -> Tensor:
        """Those rows at their places among ``tokens``, and the value in all others."""
        joined = self._joined()
        parts = list(x.split([end - start for start, end in joined]))
        edges = [0, *itertools.chain.from_iterable(joined), tokens]
        between = zip(edges[::2], edges[1::2], strict=True)
        gaps = [x.new_full((end - start, *x.shape[1:]), value) for start, end in between]
        pieces = [gaps[0], *itertools.chain.from_iterable(zip(parts, gaps[1:], strict=True))]
        pieces = [piece for piece in pieces if piece.shape[0]]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)

    def _joined(self) -> list[Range]:
        """The same rows in as few ranges as there can be."""
        joined: list[Range] = []
        for start, end in self.ranges:
            begin = joined.pop()[0] if joined and joined[-1][1] == start else start
            joined.append((begin, end))
        return joined


@ReadOnce
def _read(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[Range, Range]]:
    """The queries and the keys of each sequence. The host waits for the device."""
    queries, keys = (itertools.pairwise(t.tolist()) for t in (cu_seqlens_q, cu_seqlens_k))
    return list(zip(queries, keys, strict=True))


def seeing(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool) -> tuple[Rows, Rows]:
    """The queries that see a key, and the keys of their sequences; a range for each sequence."""
    found = []
    for (first, last), (start, end) in _read(cu_seqlens_q, cu_seqlens_k):
        begin = max(first, last - (end - start)) if causal else first
        if begin < last and start < end:
            found.append(((begin, last), (start, end)))
    return Rows([queries for queries, _ in found]), Rows([keys for _, keys in found])


def _is_supported(q: Tensor, k: Tensor, v: Tensor, *_: Tensor, **__: Any) -> bool:
    most = max(q.shape[0], k.shape[0])
    return takes(q, k, v) and most <= _MOST_TOKENS and not is_recording(q)


@declared.forward(
    "attention_varlen",
    calls={"npu::npu_fusion_attention": "aclnnFlashAttentionVarLenScore"},
    limits=_LIMITS,
    accepts=_is_supported,
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
    """Limits of tokens, sequences, heads, head_dim and series:
    https://gitcode.com/Ascend/op-plugin/blob/master/docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md
    """
    q, k, v = widened(q, out_dtype, q, k, v)
    tokens, heads, _dim = q.shape
    own, seen = seeing(cu_seqlens_q, cu_seqlens_k, causal)
    if not own.ranges:
        y = torch.zeros_like(q, memory_format=torch.contiguous_format)
        return y, q.new_full((heads, tokens), -math.inf, dtype=torch.float32)
    y, largest, total = torch.ops.npu.npu_fusion_attention(
        own.of(q),
        seen.of(k),
        seen.of(v),
        heads,
        "TND",
        scale=true_scale(q, scale),
        actual_seq_qlen=own.ends(),
        actual_seq_kvlen=seen.ends(),
        **masking(q.device, causal),
    )[:3]
    # Of shape (tokens, heads, 8); in memory the heads come first, as the page of CANN has it.
    lse = lse_of(*(t.view(heads, y.shape[0], STATISTICS) for t in (largest, total)))
    return own.back(y, tokens), own.back(lse.t(), tokens, -math.inf).t().contiguous()


@declared.backward(
    "attention_varlen",
    calls={"npu::npu_fusion_attention_grad": "aclnnFlashAttentionUnpaddingScoreGrad"},
    limits=_LIMITS,
    accepts=lambda grad, q, k, v, *saved, **_: _is_supported(q, k, v),
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
) -> tuple[Tensor, ...]:
    """By the deterministic kernel: sums over queries and heads are atomic otherwise.

    https://gitcode.com/Ascend/op-plugin/blob/master/docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md
    """
    own, seen = seeing(cu_seqlens_q, cu_seqlens_k, causal)
    if not own.ranges:
        return tuple(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    dtype = q.dtype
    grad, q, k, v, y = widened(q, out_dtype, grad, q, k, v, y)
    given = own.of(q)
    shape = (*given.shape[:2], STATISTICS)
    largest, total = (t.view(shape) for t in statistics_of(own.of(lse.t()).t()))
    with SameBits():
        found = torch.ops.npu.npu_fusion_attention_grad(
            given,
            seen.of(k),
            seen.of(v),
            own.of(grad),
            q.shape[1],
            "TND",
            softmax_max=largest,
            softmax_sum=total,
            attention_in=own.of(y),
            scale_value=true_scale(q, scale),
            actual_seq_qlen=own.ends(),
            actual_seq_kvlen=seen.ends(),
            **masking(q.device, causal),
        )
    dq, dk, dv = (t.to(dtype) for t in found[:3])
    return own.back(dq, q.shape[0]), *(seen.back(t, k.shape[0]) for t in (dk, dv))
