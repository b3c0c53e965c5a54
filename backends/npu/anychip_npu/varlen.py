"""Rows for attention over packed sequences, mapped to npu_fusion_attention in layout TND.

The kernel takes the ends of the sequences from the host. They are read once per ``cu_seqlens``, not
once per layer; while a graph is recorded the reference serves. Empty sequences are left out, and
so are rows of no sequence: the kernel sees neither.

Source: packing: Dao 2023, arXiv:2307.08691; the limits are those of
https://gitcode.com/Ascend/op-plugin/blob/master/docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from anychip.contract import Pair
from anychip.contract.determinism import SameBits
from anychip.operators.ragged import ReadOnce
from anychip_npu.attention import HEAD_DIMS, HEADS, STATISTICS, masking, takes, true_scale
from anychip_npu.soc import is_recording
from anychip_npu.table import Needs, mapped_row

_MOST_TOKENS = 1_000_000
_MOST_SEQUENCES = 1024


@ReadOnce
def ends(cu_seqlens: Tensor) -> list[int]:
    """Where each sequence that has rows ends. The host waits for the device."""
    return [end for start, end in itertools.pairwise(cu_seqlens.tolist()) if start < end]


def _is_supported(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **_: Any) -> bool:
    return takes(q, k, v) and q.shape[0] <= _MOST_TOKENS and not is_recording(q)


def _fake_statistics(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], q.shape[1], STATISTICS)
    return q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)


def _padded(x: Tensor, tokens: int) -> Tensor:
    """With rows of zeros up to ``tokens``."""
    missing = tokens - x.shape[0]
    return pad(x, (0, 0, 0, 0, 0, missing)) if missing else x.contiguous()


def _varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    cu_seqlens: Tensor,
    largest: Tensor,
    total: Tensor,
    *,
    causal: bool,
    scale: float | None,
    needs: Needs,
) -> tuple[Tensor, ...]:
    """By the deterministic kernel: sums over queries and heads are atomic otherwise."""
    stops = ends(cu_seqlens)
    if not stops:
        return tuple(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    used, tokens = stops[-1], q.shape[0]
    own = [t[:used].contiguous() for t in (q, k, v, grad)]
    with SameBits():
        found = torch.ops.npu.npu_fusion_attention_grad(
            *own,
            q.shape[1],
            "TND",
            softmax_max=largest[:used].contiguous(),
            softmax_sum=total[:used].contiguous(),
            attention_in=y[:used].contiguous(),
            scale_value=true_scale(q, scale),
            actual_seq_qlen=stops,
            actual_seq_kvlen=stops,
            **masking(q.device, causal),
        )
    return tuple(_padded(t, tokens) for t in found[:3])


@mapped_row(
    "attention_varlen",
    "forward",
    calls={
        "npu::npu_fusion_attention": "aclnnFlashAttentionVarLenScore",
        "npu::npu_fusion_attention_grad": "aclnnFlashAttentionUnpaddingScoreGrad",
    },
    limits={
        "head_dim": HEAD_DIMS,
        "heads": HEADS,
        "tokens": range(1, _MOST_TOKENS + 1),
        "sequences": range(_MOST_SEQUENCES + 1),
    },
    supports=_is_supported,
    paired=Pair(backward=_varlen_backward, num_residuals=2, fake_residuals=_fake_statistics),
)
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Limits of tokens, sequences, heads, head_dim and series:
    https://gitcode.com/Ascend/op-plugin/blob/master/docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md
    """
    stops = ends(cu_seqlens)
    if not stops:
        y = torch.zeros_like(q, memory_format=torch.contiguous_format)
        shape = (q.shape[0], q.shape[1], STATISTICS)
        unused = q.new_zeros(shape, dtype=torch.float32)
        return y, unused, unused.clone()
    used, tokens = stops[-1], q.shape[0]
    found = torch.ops.npu.npu_fusion_attention(
        *(t[:used].contiguous() for t in (q, k, v)),
        q.shape[1],
        "TND",
        scale=true_scale(q, scale),
        actual_seq_qlen=stops,
        actual_seq_kvlen=stops,
        **masking(q.device, causal),
    )
    y, largest, total = (_padded(t, tokens) for t in found[:3])
    return y, largest, total
