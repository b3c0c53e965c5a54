"""Rows for attention with dropout: torch's products, block by block, and our kernel for the mask.

The kernels that torch brings have a dropout of their own, whose mask no other chip has. Here the
scores of some heads are there at a time, and the mask is that of the operator: word i of the stream
for element i of (batch, head, query, key). A part of a whole, which has indices, is not theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from anychip.operators.attention import attend, attend_backward, hidden_keys
from anychip_cuda.native import Kernels
from anychip_cuda.numerics import ExactProducts
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


def _factor(kernels: Kernels, q: Tensor, k: Tensor, rng: Tensor, p: float, part: _Part) -> Tensor:
    """What the weights of a part are multiplied by: (batches, heads, Sq, Sk) float32."""
    some = q[part.batches, :, part.heads]
    shape = (some.shape[0], some.shape[2], q.shape[1], k.shape[1])
    before = part.batches.start * q.shape[2] + part.heads.start
    first = before * q.shape[1] * k.shape[1]
    # A block has four words: the mask may begin within one.
    skipped = first % 4
    whole = torch.ones(math.prod(shape) + skipped, device=q.device)
    own = torch.stack((rng[0], rng[1] + first // 4))
    kernels.native.dropout(
        whole.data_ptr(),
        own.data_ptr(),
        whole.data_ptr(),
        whole.numel(),
        p,
        kernels.codes[torch.float32],
        *kernels.place(q),
    )
    return whole[skipped:].view(shape)


@declared.forward(
    "attention_dropout",
    kind="mapped",
    accepts=lambda *args, **_: all(index is None for index in args[4:]),
)
def attention_dropout(
    kernels: Kernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rng: Tensor,
    *index: None,
    p: float,
    causal: bool,
    scale: float | None,
    **_: int,
) -> tuple[Tensor, Tensor]:
    y, hidden = q.new_empty(q.shape), hidden_keys(q, k, causal)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    with ExactProducts():
        for part in _parts(q, k):
            own_k, own_v = (t[part.batches, :, part.key_heads] for t in (k, v))
            factor = _factor(kernels, q, k, rng, p, part)
            found = attend(q[part.batches, :, part.heads], own_k, own_v, hidden, scale, factor)
            y[part.batches, :, part.heads], lse[part.batches, part.heads] = found
    return y, lse


@declared.backward(
    "attention_dropout",
    kind="mapped",
    accepts=lambda *args, **_: all(index is None for index in args[7:]),
)
def attention_dropout_backward(
    kernels: Kernels,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    rng: Tensor,
    *index: None,
    p: float,
    causal: bool,
    scale: float | None,
    needs: Needs,
    **_: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    hidden = hidden_keys(q, k, causal)
    with ExactProducts():
        for part in _parts(q, k):
            own_grad, own_q, own_y = (t[part.batches, :, part.heads] for t in (grad, q, y))
            own_k, own_v = (t[part.batches, :, part.key_heads] for t in (k, v))
            factor, own_lse = _factor(kernels, q, k, rng, p, part), lse[part.batches, part.heads]
            found = attend_backward(
                own_grad, own_q, own_k, own_v, own_y, own_lse, hidden, scale, factor
            )
            dq[part.batches, :, part.heads] = found[0]
            dk[part.batches, :, part.key_heads] = found[1]
            dv[part.batches, :, part.key_heads] = found[2]
    return dq, dk, dv
