"""Rows for attention over packed sequences: flash attention, or one call per sequence in float32.

Flash attention's grid is made for the longest sequence, a number that the host needs and the device
has. It is read once per ``cu_seqlens``, not once per layer; while a graph is recorded, where
nothing can be read and the numbers may change from replay to replay, the number of tokens stands
for it.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from anychip.contract.settings import SameBits
from anychip.operators.ragged import ReadOnce
from anychip_cuda.attention import (
    HALVES,
    HEAD_DIMS,
    attention_backward_by_efficient,
    attention_by_efficient,
    filled,
    flash_goes_back,
    no_rng,
    takes,
    true_scale,
)
from anychip_cuda.products import capability
from anychip_cuda.table import Needs, declared

_aten = torch.ops.aten


def _recording(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def longest(cu_seqlens: Tensor, tokens: int) -> int:
    """Rows of the longest sequence, or a number that is not below it; at least 1, for the grid.

    Args:
        cu_seqlens: (sequences + 1,), at least one sequence.
        tokens: rows in all.
    """
    if _recording(cu_seqlens):
        return tokens
    return _longest(cu_seqlens)


@ReadOnce
def _longest(cu_seqlens: Tensor) -> int:
    return max(int(torch.diff(cu_seqlens).max()), 1)


def _takes_flash(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **attrs: Any) -> bool:
    return takes(q, k, v, **attrs) and capability(q) >= (8, 0)


def _padding(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(T,) bool: the rows of no sequence, of which the kernels write nothing."""
    return torch.arange(x.shape[0], device=x.device) >= cu_seqlens[-1]


@declared.forward(
    "attention_varlen",
    kind="mapped",
    dtypes=HALVES,
    limits={"head_dim": HEAD_DIMS},
    accepts=_takes_flash,
)
def attention_varlen_by_flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    if cu_seqlens.shape[0] < 2:
        lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32)
        return torch.zeros_like(q, memory_format=torch.contiguous_format), lse
    length, ends = longest(cu_seqlens, q.shape[0]), cu_seqlens.to(torch.int32).contiguous()
    found = _aten._flash_attention_forward(
        filled(q),
        filled(k),
        filled(v),
        ends,
        ends,
        length,
        length,
        0.0,
        causal,
        False,
        scale=true_scale(q, scale),
    )
    padding = _padding(q, cu_seqlens)
    y = found[0][..., : q.shape[-1]].masked_fill(padding[:, None, None], 0.0)
    return y.contiguous(), found[1].masked_fill(padding, -math.inf)


def _goes_back_by_flash(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    ends: Tensor,
    **attrs: Any,
) -> bool:
    return q.dtype in HALVES and _takes_flash(q, k, v, ends, **attrs) and flash_goes_back(q)


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
    cu_seqlens: Tensor,
    *,
    causal: bool,
    scale: float | None,
    needs: Needs,
) -> tuple[Tensor, ...]:
    if cu_seqlens.shape[0] < 2:
        return tuple(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    length, ends = longest(cu_seqlens, q.shape[0]), cu_seqlens.to(torch.int32).contiguous()
    with SameBits():
        found = _aten._flash_attention_backward(
            *(filled(t) for t in (grad, q, k, v, y)),
            lse.contiguous(),
            ends,
            ends,
            length,
            length,
            0.0,
            causal,
            *no_rng(q.device),
            scale=true_scale(q, scale),
        )
    padding = _padding(q, cu_seqlens)[:, None, None]
    return tuple(t[..., : q.shape[-1]].masked_fill(padding, 0.0).contiguous() for t in found)


# float32: one call per sequence


def _takes_each(q: Tensor, k: Tensor, v: Tensor, **attrs: Any) -> bool:
    return takes(q, k, v, **attrs) and capability(q) >= (8, 0) and not _recording(q)


def _sequences(cu_seqlens: Tensor) -> list[slice]:
    """The rows of every sequence that has some. The host waits for the device."""
    return [slice(a, b) for a, b in itertools.pairwise(cu_seqlens.tolist()) if a < b]


@declared.forward(
    "attention_varlen",
    kind="mapped",
    dtypes={torch.float32},
    accepts=lambda q, k, v, cu_seqlens, **attrs: _takes_each(q, k, v, **attrs),
)
def attention_varlen_by_sequence(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    y = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf)
    for rows in _sequences(cu_seqlens):
        own = (t[None, rows] for t in (q, k, v))
        found = attention_by_efficient(*own, causal=causal, scale=scale)
        y[rows], lse[:, rows] = found[0][0], found[1][0]
    return y, lse


@declared.backward(
    "attention_varlen",
    kind="mapped",
    dtypes={torch.float32},
    accepts=lambda grad, q, k, v, y, lse, cu_seqlens, **attrs: _takes_each(q, k, v, **attrs),
)
def attention_varlen_backward_by_sequence(
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
    wholes = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    for rows in _sequences(cu_seqlens):
        own_grad, own_q, own_k, own_v, own_y = (t[None, rows] for t in (grad, q, k, v, y))
        parts = attention_backward_by_efficient(
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
        for whole, part in zip(wholes, parts, strict=True):
            whole[rows] = part[0]
    return tuple(wholes)
