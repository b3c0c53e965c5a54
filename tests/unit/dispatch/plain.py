"""Every differentiable operator in plain torch, written from its definition; takes float64 too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anychip import ops


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: Any) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, 2) for t in (k, v))
    mask = torch.full((q.shape[1], q.shape[1]), -torch.inf).triu(1) if causal else 0.0
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale + mask
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def _plain_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Tensor, ...]:
    turn = torch.complex(cos, sin)[:, None]

    def rotated(x: Tensor) -> Tensor:
        if interleaved:
            z = torch.complex(x[..., 0::2], x[..., 1::2]) * turn
            return torch.stack([z.real, z.imag], -1).flatten(-2)
        z = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([z.real, z.imag], -1)

    return rotated(q), rotated(k)


def _plain_dropout(x: Tensor, rng: Tensor, *, p: float) -> Tensor:
    """The mask is tested elsewhere; here it is a constant."""
    mask = ops.dropout(torch.ones(x.shape), rng, p=p) != 0
    return torch.where(mask, x / (1 - p) if p < 1 else 0 * x, 0.0)


def _plain_cross_entropy(
    logits: Tensor, target: Tensor, *, z_loss: float, reduction: str, **attrs: Any
) -> Tensor:
    flat, labels = logits.flatten(0, -2), target.flatten()
    rows = F.cross_entropy(flat, labels, reduction="none", **attrs)
    kept = labels != attrs["ignore_index"]
    rows = rows + torch.where(kept, z_loss * torch.logsumexp(flat, -1) ** 2, 0.0)
    if reduction == "none":
        return rows.view(target.shape)
    return rows.sum() / (kept.sum() if reduction == "mean" else 1)


PLAIN: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, w, *, eps: F.rms_norm(x, w.shape, w, eps),
    "layer_norm": lambda x, w, b, *, eps: F.layer_norm(x, w.shape, w, b, eps),
    "dropout": _plain_dropout,
    "gelu": F.gelu,
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "rope": _plain_rope,
    "attention": _plain_attention,
    "linear": F.linear,
    "embedding": F.embedding,
    "cross_entropy": _plain_cross_entropy,
}
