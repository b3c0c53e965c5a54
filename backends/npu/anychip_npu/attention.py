"""Rows for attention, mapped to npu_fusion_attention: no score is kept.

The kernel keeps the largest score and the sum of each query, eight times each; both together are
the lse, and the lse stands for both on the way back. Causal is sparse_mode 3, aligned to the last
key as here; its mask is one triangle of 2,048 by 2,048 for all lengths. Queries that see no key do
not get there.

Source: Dao 2023, arXiv:2307.08691; the limits are those of
https://gitcode.com/Ascend/op-plugin/blob/master/docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from anychip.contract.settings import SameBits
from anychip.operators.attention import widened
from anychip_npu.soc import is_a2_or_a3
from anychip_npu.table import Needs, declared, left_to_reference

PAGE = (
    "https://gitcode.com/Ascend/op-plugin/blob/master/docs/zh/custom_APIs/torch_npu/"
    "torch_npu-npu_fusion_attention.md"
)
CALLS = {"npu::npu_fusion_attention": "aclnnFlashAttentionScore"}
GRAD_CALLS = {"npu::npu_fusion_attention_grad": "aclnnFlashAttentionScoreGrad"}
HEAD_DIMS = range(1, 769)
HEADS = range(1, 257)
_LENGTHS = range(1, 1_000_001)
LIMITS = {"head_dim": HEAD_DIMS, "heads": HEADS, "seq": _LENGTHS, "keys": _LENGTHS}
_MOST_BATCHES = 2_000_000
_CAUSAL_TO_LAST = 3
_TRIANGLE = 2048
STATISTICS = 8
"""Copies of each of the two numbers of a query: its last dim, as the page of CANN has it."""

_triangles: dict[torch.device, Tensor] = {}


def triangle(device: torch.device) -> Tensor:
    """(2048, 2048) bool: True where a key is hidden. Made once per device, 4 MiB."""
    if device not in _triangles:
        ones = torch.ones(_TRIANGLE, _TRIANGLE, dtype=torch.bool, device=device)
        _triangles[device] = torch.triu(ones, diagonal=1)
    return _triangles[device]


def masking(device: torch.device, causal: bool) -> dict[str, Any]:
    """The arguments that say which keys are hidden."""
    if not causal:
        return {}
    return {"atten_mask": triangle(device), "sparse_mode": _CAUSAL_TO_LAST}


def true_scale(q: Tensor, scale: float | None) -> float:
    """What the scores are multiplied by."""
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes these tensors at all: the training chips of the page."""
    return q.dtype == k.dtype == v.dtype and k.numel() > 0 and is_a2_or_a3(q)


def _is_supported(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> bool:
    return takes(q, k, v) and 0 < q.shape[0] <= _MOST_BATCHES


def _blind(q: Tensor, k: Tensor, causal: bool) -> int:
    """How many queries, the first ones, see no key."""
    return max(q.shape[1] - k.shape[1], 0) if causal else 0


def lse_of(largest: Tensor, total: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials, from the kernel's two numbers of each query."""
    return largest[..., 0] + total[..., 0].log()


def statistics_of(lse: Tensor) -> tuple[Tensor, Tensor]:
    """The two numbers that give the weights exp(score - lse): the lse for the largest, 1 the sum.

    So a backward takes the lse of all keys for those of one block.
    """
    largest = lse.unsqueeze(-1).expand(*lse.shape, STATISTICS).contiguous()
    return largest, torch.ones_like(largest)


@declared.forward(
    "attention",
    calls=CALLS,
    limits=LIMITS,
    accepts=_is_supported,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Of layout BSND, with fewer key heads than query heads as it is. A mask hides where True.
    A result of float32 is that of operands in float32.

    Limits of lengths, heads, head_dim and series:
    https://gitcode.com/Ascend/op-plugin/blob/master/docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md
    """
    q, k, v = widened(q, out_dtype, q, k, v)
    blind = _blind(q, k, causal)
    found = torch.ops.npu.npu_fusion_attention(
        q[:, blind:].contiguous(),
        k.contiguous(),
        v.contiguous(),
        q.shape[2],
        "BSND",
        scale=true_scale(q, scale),
        **masking(q.device, causal),
    )
    y, lse = found[0], lse_of(found[1], found[2])
    if not blind:
        return y, lse
    return pad(y, (0, 0, 0, 0, blind, 0)), pad(lse, (blind, 0), value=-math.inf)


@declared.backward(
    "attention",
    calls=GRAD_CALLS,
    limits=LIMITS,
    accepts=lambda grad, q, k, v, y, lse, **attrs: _is_supported(q, k, v),
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
    """By the deterministic kernel: sums over queries and heads are atomic otherwise.

    https://gitcode.com/Ascend/op-plugin/blob/master/docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md
    """
    dtype = q.dtype
    grad, q, k, v, y = widened(q, out_dtype, grad, q, k, v, y)
    blind = _blind(q, k, causal)
    own_grad, own_q, own_y = (t[:, blind:].contiguous() for t in (grad, q, y))
    largest, total = statistics_of(lse[..., blind:])
    with SameBits():
        dq, dk, dv, _pse, _sink = torch.ops.npu.npu_fusion_attention_grad(
            own_q,
            k.contiguous(),
            v.contiguous(),
            own_grad,
            q.shape[2],
            "BSND",
            softmax_max=largest,
            softmax_sum=total,
            attention_in=own_y,
            scale_value=true_scale(q, scale),
            **masking(q.device, causal),
        )
    dq = pad(dq, (0, 0, 0, 0, blind, 0)) if blind else dq
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


left_to_reference(
    "attention_dropout",
    reason=(
        "npu_fusion_attention draws from a random stream of its own; a mask of ours would have to "
        "be made by its own generator, as the page says"
    ),
    page=PAGE,
)
