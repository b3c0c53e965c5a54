"""Rows for attention with dropout: torch's products, block by block, and our kernel for the mask.

The kernels that torch brings have a dropout of their own, whose mask no other chip has. Here the
scores of some heads are there at a time, and the mask is that of the operator: word i of the stream
for element i of (batch, head, query, key).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anychip.operators.attention import attend, attend_backward, hidden_keys, weight_rows
from anychip_cuda.dropout import dropout
from anychip_cuda.native import Kernels
from anychip_cuda.numerics import exact_products
from anychip_cuda.table import Needs, declared

BLOCK = 1 << 27
"""Scores at a time: half a gibibyte in float32, of which a call holds about four."""


class _Part(NamedTuple):
    """Whole batches, or some key heads of one batch, with their query heads."""

    batches: slice
    key_heads: slice
    heads: slice


def _parts(q: Tensor, k: Tensor) -> Iterator[_Part]:
    batches, queries, heads, _dim = q.shape
    keys, kv_heads = k.shape[1:3]
    groups = heads // kv_heads
    fitting = max(1, BLOCK // max(groups * queries * keys, 1))  # key heads
    if fitting >= kv_heads:
        step = fitting // kv_heads
        for start in range(0, batches, step):
            yield _Part(slice(start, start + step), slice(0, kv_heads), slice(0, heads))
        return
    for batch in range(batches):
        for start in range(0, kv_heads, fitting):
            end = min(start + fitting, kv_heads)
            own = slice(start * groups, end * groups)
            yield _Part(slice(batch, batch + 1), slice(start, end), own)


def _factor(
    kernels: Kernels, k: Tensor, rng: Tensor, rows: Tensor, key_index: Tensor | None, **attrs: Any
) -> Tensor:
    """What the weights of these rows are multiplied by: (batches, heads, Sq, Sk) float32."""
    keys, width = k.shape[1], attrs.pop("keys") or k.shape[1]
    if key_index is not None:
        # These need not follow each other: each is a row of one column.
        each = rows.unsqueeze(-1) * width + key_index
        ones = torch.ones(*each.shape, 1, device=k.device)
        return dropout(kernels, ones, rng, each, width=1, **attrs).squeeze(-1)
    ones = torch.ones(*rows.shape, keys, device=k.device)
    return dropout(kernels, ones, rng, rows, width=width, **attrs)


@declared.forward("attention_dropout", kind="mapped")
def attention_dropout(
    kernels: Kernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rng: Tensor,
    *index: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
    keys: int = 0,
    **sizes: int,
) -> tuple[Tensor, Tensor]:
    y, hidden = q.new_empty(q.shape), hidden_keys(q, k, causal)
    rows = weight_rows(q, index[:3], **sizes)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    with exact_products:
        for part in _parts(q, k):
            own_k, own_v = (t[part.batches, :, part.key_heads] for t in (k, v))
            own_rows = rows[part.batches, part.heads]
            factor = _factor(kernels, k, rng, own_rows, index[3], p=p, keys=keys)
            found = attend(q[part.batches, :, part.heads], own_k, own_v, hidden, scale, factor)
            y[part.batches, :, part.heads], lse[part.batches, part.heads] = found
    return y, lse


@declared.backward("attention_dropout", kind="mapped")
def attention_dropout_backward(
    kernels: Kernels,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    rng: Tensor,
    *index: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
    needs: Needs,
    keys: int = 0,
    **sizes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    hidden, rows = hidden_keys(q, k, causal), weight_rows(q, index[:3], **sizes)
    with exact_products:
        for part in _parts(q, k):
            own_grad, own_q, own_y = (t[part.batches, :, part.heads] for t in (grad, q, y))
            own_k, own_v = (t[part.batches, :, part.key_heads] for t in (k, v))
            own_rows, own_lse = (t[part.batches, part.heads] for t in (rows, lse))
            factor = _factor(kernels, k, rng, own_rows, index[3], p=p, keys=keys)
            found = attend_backward(
                own_grad, own_q, own_k, own_v, own_y, own_lse, hidden, scale, factor
            )
            dq[part.batches, :, part.heads] = found[0]
            dk[part.batches, :, part.key_heads] = found[1]
            dv[part.batches, :, part.key_heads] = found[2]
    return dq, dk, dv
