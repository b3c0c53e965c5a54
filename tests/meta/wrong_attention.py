"""Wrong backends whose attention the operators and gradients chapters have to find."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.meta.honest import Row
from tests.meta.wrong import Wrong, wrong_row

wrong = partial(wrong_row, chapter="operators")
wrong_backward = partial(wrong_row, chapter="gradients", direction="backward")
Attr = Any


@wrong("causal-from-the-first-key", "mask aligned at the wrong end", operator="attention")
def first_aligned(
    row: Row, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
) -> Any:
    extra = k.shape[1] - q.shape[1]
    if not causal or extra <= 0:
        return row(q, k, v, causal=causal, scale=scale)
    return row(q, k[:, :-extra], v[:, :-extra], causal=True, scale=scale)


@wrong("blind-query-is-a-mean", "a case of its own forgotten", operator="attention")
def uniform_blind(
    row: Row, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
) -> Any:
    y, lse = row(q, k, v, causal=causal, scale=scale)
    blind = max(q.shape[1] - k.shape[1], 0) if causal and k.shape[1] else 0
    y[:, :blind] = v.mean(1, keepdim=True).repeat_interleave(q.shape[2] // k.shape[2], 2)
    return y, lse


@wrong("rope-rest-dropped", "dropped tail", operator="rope")
def rest_dropped(row: Row, q: Tensor, k: Tensor, cos: Tensor, *given: Tensor, **attrs: Attr) -> Any:
    turned = row(q, k, cos, *given, **attrs)
    for y in turned:
        y[..., 2 * cos.shape[1] :] = 0.0
    return turned


@wrong("weights-not-scaled", "missing factor", operator="attention_dropout")
def unscaled(row: Row, *args: Tensor, p: float, **attrs: Attr) -> Any:
    y, lse = row(*args, p=p, **attrs)
    return y * (1.0 - p), lse


@wrong("one-mask-for-all-heads", "physical for logical index", operator="attention_dropout")
def shared_mask(row: Row, q: Tensor, k: Tensor, v: Tensor, rng: Tensor, **attrs: Attr) -> Any:
    groups = q.shape[2] // k.shape[2]
    found = [
        row(q[:, :, h : h + 1], k[:, :, (g := h // groups) : g + 1], v[:, :, g : g + 1], rng,
            **attrs)
        for h in range(q.shape[2])
    ]  # fmt: skip
    return torch.cat([y for y, _ in found], 2), torch.cat([lse for _, lse in found], 1)


@wrong("dropout-before-softmax", "an argument at the wrong place", operator="attention_dropout")
def renormalised(row: Row, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **attrs: Attr) -> Any:
    # The weights that are left are normalised again: those of all values 1 add up to 1.
    y, lse = row(q, k, v, *rest, **attrs)
    total, _ = row(q, k, torch.ones_like(v), *rest, **attrs)
    return torch.where(total > 0.0, y / total, y), lse


@wrong_backward("mask-of-another-call", "mask reused wrongly", operator="attention_dropout")
def other_mask(row: Row, *args: Tensor, **attrs: Attr) -> Any:
    *given, rng = args
    return row(*given, rng + torch.tensor([0, 1]), **attrs)


@wrong_backward("value-gradient-undropped", "mask forgotten", operator="attention_dropout")
def undropped_values(row: Row, *args: Tensor, p: float, **attrs: Attr) -> Any:
    dq, dk, _ = row(*args, p=p, **attrs)
    return dq, dk, row(*args, p=0.0, **attrs)[2]


@wrong_backward("blind-query-has-gradient", "NaN of nothing over nothing", operator="attention")
def blind_nan(row: Row, grad: Tensor, q: Tensor, k: Tensor, *rest: Tensor, **attrs: Attr) -> Any:
    dq, dk, dv = row(grad, q, k, *rest, **attrs)
    blind = max(q.shape[1] - k.shape[1], 0) if attrs["causal"] else 0
    dq[:, :blind] = torch.nan
    return dq, dk, dv


def _joined(cu_seqlens: Tensor) -> Tensor:
    """The same rows as one sequence."""
    return cu_seqlens[[0, -1]]


@wrong(
    "sequences-see-each-other", "boundary of sequences not looked at", operator="attention_varlen"
)
def joined(row: Row, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **attrs: Attr) -> Any:
    return row(q, k, v, _joined(cu_seqlens), **attrs)


@wrong("boundary-off-by-one", "off by one", operator="attention_varlen")
def late_boundary(
    row: Row, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **attrs: Attr
) -> Any:
    moved = cu_seqlens.clone()
    moved[1:-1] = (moved[1:-1] + 1).clamp(max=int(cu_seqlens[-1]))
    return row(q, k, v, moved, **attrs)


@wrong("padding-is-a-sequence", "padding computed", operator="attention_varlen")
def sees_padding(
    row: Row, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **attrs: Attr
) -> Any:
    return row(q, k, v, torch.cat((cu_seqlens, torch.tensor([q.shape[0]]))), **attrs)


@wrong_backward("last-sequence-has-no-gradient", "dropped tail", operator="attention_varlen")
def last_forgotten(row: Row, *args: Tensor, **attrs: Attr) -> Any:
    *given, cu_seqlens = args
    return row(*given, cu_seqlens[: max(len(cu_seqlens) - 1, 1)], **attrs)


CATALOGUE: tuple[Wrong, ...] = tuple(
    entry for entry in globals().values() if isinstance(entry, Wrong)
)
