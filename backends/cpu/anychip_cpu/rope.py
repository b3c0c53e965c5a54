"""Rotary position embedding on the host: the native kernel, which turns whole heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import Needs, declared, have_one_dtype

_kernels: Any = native.kernels


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    rotary_dim = 2 * cos.shape[1]
    if rotary_dim < q.shape[3]:
        # The kernel turns whole heads.
        parts = (q[..., :rotary_dim], k[..., :rotary_dim])
        turned = _rotated(*parts, cos, sin, interleaved, inverse)
        rests = (q[..., rotary_dim:], k[..., rotary_dim:])
        q_whole, k_whole = (torch.cat(p, -1) for p in zip(turned, rests, strict=True))
        return q_whole, k_whole
    q, k, cos, sin = (t.contiguous() for t in (q, k, cos, sin))
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    batch, seq, heads, head_dim = q.shape
    tensors = (q, k, cos, sin, q_out, k_out)
    _kernels.rope(
        *(t.data_ptr() for t in tensors),
        batch,
        seq,
        heads,
        k.shape[2],
        head_dim,
        interleaved,
        inverse,
        CODES[q.dtype],
    )
    return q_out, k_out


@declared.forward("rope", accepts=have_one_dtype)
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    return _rotated(q, k, cos, sin, interleaved, False)


@declared.backward("rope", accepts=have_one_dtype)
def rope_backward(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, needs: Needs
) -> tuple[Tensor, Tensor]:
    return _rotated(dq, dk, cos, sin, interleaved, True)
