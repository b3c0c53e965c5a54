"""Rows for attention over packed sequences, mapped to npu_fusion_attention in layout TND.

The kernel takes the ends of the sequences from the host. They are read once per ``cu_seqlens``, not
once per layer; while a graph is recorded the reference serves. Empty sequences are left out, and
so are rows of no sequence: the kernel sees neither.

Source: packing: Dao 2023, arXiv:2307.08691; the limits are those of
https://gitcode.com/Ascend/op-plugin/blob/master/docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from anychip.contract.settings import SameBits
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
    "sequences": range(_MOST_SEQUENCES + 1),
}


@ReadOnce
def ends(cu_seqlens: Tensor) -> list[int]:
    """Where each sequence that has rows ends. The host waits for the device."""
    return [end for start, end in itertools.pairwise(cu_seqlens.tolist()) if start < end]


def _is_supported(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **_: Any) -> bool:
    return takes(q, k, v) and q.shape[0] <= _MOST_TOKENS and not is_recording(q)


def _padded(x: Tensor, tokens: int) -> Tensor:
    """With rows of zeros up to ``tokens``."""
    missing = tokens - x.shape[0]
    return pad(x, (0, 0, 0, 0, 0, missing)) if missing else x.contiguous()


@declared.forward(
    "attention_varlen",
    calls={"npu::npu_fusion_attention": "aclnnFlashAttentionVarLenScore"},
    limits=_LIMITS,
    accepts=_is_supported,
)
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Limits of tokens, sequences, heads, head_dim and series:
    https://gitcode.com/Ascend/op-plugin/blob/master/docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md
    """
    stops, (tokens, heads, _dim) = ends(cu_seqlens), q.shape
    if not stops:
        y = torch.zeros_like(q, memory_format=torch.contiguous_format)
        return y, q.new_full((heads, tokens), -math.inf, dtype=torch.float32)
    used = stops[-1]
    y, largest, total = torch.ops.npu.npu_fusion_attention(
        *(t[:used].contiguous() for t in (q, k, v)),
        heads,
        "TND",
        scale=true_scale(q, scale),
        actual_seq_qlen=stops,
        actual_seq_kvlen=stops,
        **masking(q.device, causal),
    )[:3]
    # Of shape (tokens, heads, 8); in memory the heads come first, as the page of CANN has it.
    lse = lse_of(*(t.view(heads, used, STATISTICS) for t in (largest, total)))
    return _padded(y, tokens), pad(lse, (0, tokens - used), value=-math.inf)


@declared.backward(
    "attention_varlen",
    calls={"npu::npu_fusion_attention_grad": "aclnnFlashAttentionUnpaddingScoreGrad"},
    limits=_LIMITS,
    accepts=lambda grad, q, k, v, y, lse, cu_seqlens, **_: _is_supported(q, k, v, cu_seqlens),
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
) -> tuple[Tensor, ...]:
    """By the deterministic kernel: sums over queries and heads are atomic otherwise.

    https://gitcode.com/Ascend/op-plugin/blob/master/docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md
    """
    stops, (tokens, heads, _dim) = ends(cu_seqlens), q.shape
    if not stops:
        return tuple(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    used = stops[-1]
    own = [t[:used].contiguous() for t in (q, k, v, grad)]
    shape = (used, heads, STATISTICS)
    largest, total = (t.view(shape) for t in statistics_of(lse[:, :used]))
    with SameBits():
        found = torch.ops.npu.npu_fusion_attention_grad(
            *own,
            heads,
            "TND",
            softmax_max=largest,
            softmax_sum=total,
            attention_in=y[:used].contiguous(),
            scale_value=true_scale(q, scale),
            actual_seq_qlen=stops,
            actual_seq_kvlen=stops,
            **masking(q.device, causal),
        )
    return tuple(_padded(t, tokens) for t in found[:3])
