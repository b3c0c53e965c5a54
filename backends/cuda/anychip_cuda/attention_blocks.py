"""Attention by torch's products, with the scores of some heads there at a time.

The kernels that torch brings for float32 multiply parts of 11 bits, three products for one, which
leaves 2^-20 of a score, and have no factor for weights (attention_dropout.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from anychip.operators.attention import attend, attend_backward, hidden_keys
from anychip_cuda.numerics import exact_products

BLOCK = 1 << 27
"""Scores at a time: half a gibibyte in float32, of which a call holds about four."""


class Part(NamedTuple):
    """Whole batches, or some key heads of one batch, with their query heads."""

    batches: slice
    key_heads: slice
    heads: slice


Factor = Callable[[Part], Tensor | None]
"""What the weights of a part are multiplied by: (batches, heads, Sq, Sk) float32; None: 1."""


def _parts(q: Tensor, k: Tensor) -> Iterator[Part]:
    batches, queries, heads, _dim = q.shape
    keys, kv_heads = k.shape[1:3]
    groups = heads // kv_heads
    fitting = max(1, BLOCK // max(groups * queries * keys, 1))  # key heads
    if fitting >= kv_heads:
        step = fitting // kv_heads
        for start in range(0, batches, step):
            yield Part(slice(start, start + step), slice(0, kv_heads), slice(0, heads))
        return
    for batch in range(batches):
        for start in range(0, kv_heads, fitting):
            end = min(start + fitting, kv_heads)
            own = slice(start * groups, end * groups)
            yield Part(slice(batch, batch + 1), slice(start, end), own)


def attend_by_blocks(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, factor: Factor
) -> tuple[Tensor, Tensor]:
    """y, in q's dtype, and lse (B, H, Sq) float32."""
    y, hidden = q.new_empty(q.shape), hidden_keys(q, k, causal)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    with exact_products:
        for part in _parts(q, k):
            own_k, own_v = (t[part.batches, :, part.key_heads] for t in (k, v))
            own_q = q[part.batches, :, part.heads]
            found = attend(own_q, own_k, own_v, hidden, scale, factor(part))
            y[part.batches, :, part.heads], lse[part.batches, part.heads] = found
    return y, lse


def attend_backward_by_blocks(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    factor: Factor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in their dtypes."""
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    hidden = hidden_keys(q, k, causal)
    with exact_products:
        for part in _parts(q, k):
            own_grad, own_q, own_y = (t[part.batches, :, part.heads] for t in (grad, q, y))
            own_k, own_v = (t[part.batches, :, part.key_heads] for t in (k, v))
            own_lse = lse[part.batches, part.heads]
            found = attend_backward(
                own_grad, own_q, own_k, own_v, own_y, own_lse, hidden, scale, factor(part)
            )
            dq[part.batches, :, part.heads] = found[0]
            dk[part.batches, :, part.key_heads] = found[1]
            dv[part.batches, :, part.key_heads] = found[2]
    return dq, dk, dv
