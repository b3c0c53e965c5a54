"""Oracles of attention and attention_dropout. Layout (batch, seq, heads, head_dim).

attention: Vaswani et al. 2017, equation 1, causal and grouped: query head h reads key head
h // (H / Hk). Gradients as in Dao et al. 2022, appendix B.2, with P = softmax, D = sum y dy:

    dS = P (dP - D) scale,  dP = dy v^T;  dq = dS k,  dk = dS^T q,  dv = P^T dy

With dropout M P takes the place of P in y and dv, and M dP that of dP; D is sum y dy all the same.
Causal: query i of Sq sees keys up to i + Sk - Sq of Sk. A query that sees none has the output and
gradient 0, exactly, and the lse -inf.

For 16-bit tensors P and dS may be rounded to the tensors' type before the second product, as matrix
units need it (Dao 2023, section 3.3), the weights in lse may be as exact as P is, and D is taken
from the stored y, which is of the tensors' type or of out_dtype. Sums are float32 throughout.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded, exp, log, matmul, where
from anychip.conformance.formats import FORMATS, Format
from anychip.conformance.oracles import philox
from anychip.conformance.oracles.oracle import Answer, Gradients, differentiable

Mask = NDArray[np.bool_]
_HEADS_FIRST = (0, 2, 1, 3)
_KEYS_LAST = (0, 1, 3, 2)


def _repeated(x: Rounded, groups: int) -> Rounded:
    """(B, S, Hk, D) to (B, H, S, D)."""
    return x.transpose(*_HEADS_FIRST).shaped(lambda array: np.repeat(array, groups, axis=1))


def _top(scores: Rounded, hidden: Mask, blind: Mask) -> Rounded:
    """Any number near the maximum will do; it cancels and has no error."""
    largest = np.where(hidden, -np.inf, scores.value).max(-1, keepdims=True, initial=-np.inf)
    return Rounded.exact(np.where(blind, 0.0, largest))


def attend(
    q: Rounded, k: Rounded, v: Rounded, hidden: Mask, scale: float | None,
    factor: Rounded | None = None, out_dtype: torch.dtype | None = None,
) -> Answer:  # fmt: skip
    """y and lse. hidden: (Sq, Sk), which keys a query does not see; factor: of the weights.

    The gradients' function takes ``whole``, y and lse of all keys, where these are a block of them.
    """
    groups = q.shape[2] // k.shape[2]
    times = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    below, above = (times, 1.0) if abs(times) < 1.0 else (1.0, times)
    own_q, own_k, own_v = q.transpose(*_HEADS_FIRST), _repeated(k, groups), _repeated(v, groups)
    scores = matmul(own_q, own_k.transpose(*_KEYS_LAST)) * times
    hidden = np.broadcast_to(hidden, scores.shape)
    blind = np.all(hidden, axis=-1, keepdims=True)
    top = _top(scores, hidden, blind)

    def weights_by(number: Rounded) -> Rounded:
        """exp(score - number)"""
        return where(hidden, 0.0, exp(where(hidden, number, scores) - number))

    weights = weights_by(top)
    lse = log(weights.stored(q.format).sum(-1, keepdims=True)) + top
    dropped = weights if factor is None else weights * factor
    total = weights.sum(-1, keepdims=True)
    y = where(blind, 0.0, matmul(dropped.stored(q.format), own_v) / total)

    def backward(grad: Rounded, whole: tuple[Rounded, Rounded] | None = None) -> Gradients:
        known, of_all = y.stored(format_of(q, out_dtype)), lse
        if whole is not None:
            known, of_all = whole[0].transpose(*_HEADS_FIRST), whole[1][..., None]
        dy, p = grad.transpose(*_HEADS_FIRST), weights_by(of_all)
        dp, kept = matmul(dy, own_v.transpose(*_KEYS_LAST)), p
        if factor is not None:
            dp, kept = dp * factor, p * factor
        delta = (dy * known).sum(-1, keepdims=True)
        # Stored before the scale or after it: where the type's numbers end, that is no matter of u.
        ds = (p * (dp - delta) * below).stored(q.format) * above
        dk = _of_keys(ds, own_q, groups, k.format)
        dv = _of_keys(kept.stored(q.format), dy, groups, v.format)
        return matmul(ds, own_k).transpose(*_HEADS_FIRST), dk, dv

    return (y.transpose(*_HEADS_FIRST), lse[..., 0]), backward


def _of_keys(weights: Rounded, rows: Rounded, groups: int, format: Format) -> Rounded:
    """(B, H, Sq, Sk) and (B, H, Sq, D) to (B, S, Hk, D): gradients of what heads of a group share.

    Each head's may be stored in the tensors' type before they add up, as FlashAttention does it; or
    all queries of all heads make one sum.
    """
    apart = matmul(weights.transpose(*_KEYS_LAST), rows)
    if groups == 1:
        return apart.transpose(*_HEADS_FIRST)
    batch, heads, length, dim = apart.shape
    per_head = apart.stored(format).reshape(batch, heads // groups, groups, length, dim).sum(2)
    together = (batch, heads // groups, groups * rows.shape[2])
    folded = weights.reshape(*together, length).transpose(*_KEYS_LAST)
    at_once = matmul(folded, rows.reshape(*together, dim))
    either = Rounded(
        per_head.value, np.maximum(per_head.worst, at_once.worst),
        lambda: np.maximum(per_head.spread, at_once.spread),
    )  # fmt: skip
    return either.transpose(*_HEADS_FIRST)


def format_of(q: Rounded, out_dtype: torch.dtype | None) -> Format:
    """Of y."""
    return q.format if out_dtype is None else FORMATS[out_dtype]


def hidden_keys(q: Rounded, k: Rounded, causal: bool) -> Mask:
    """(Sq, Sk): which keys a query does not see."""
    queries, keys = q.shape[1], k.shape[1]
    number = np.arange(queries)[:, None] + keys - queries
    return causal & (number < np.arange(keys)[None, :])


Numbers = NDArray[np.int64]


def _factor(
    q: Rounded, k: Rounded, rng: Numbers, index: Sequence[Numbers | None], p: float, sizes: Any
) -> Rounded:
    """(B, H, Sq, Sk): the mask of dropout over the weights of the whole, where these lie in it."""
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    heads, queries, keys = (
        sizes.get(name) or own
        for name, own in zip(("heads", "queries", "keys"), shape[1:], strict=True)
    )
    filled = (np.arange(n) if i is None else i for i, n in zip(index, shape, strict=True))
    b, h, i, j = np.ix_(*filled)
    with np.errstate(over="ignore"):
        which = b * (heads * queries * keys) + h * (queries * keys) + i * keys + j
    seed, offset = (int(n) for n in rng)
    keep = philox.kept(seed, offset, which, p)
    return where(keep, 0.0 if p == 1.0 else 1.0 / (1.0 - p), 0.0)


def _given(
    q: Rounded, k: Rounded, *drop: Any, causal: bool, scale: float | None, p: float = 0,
    **sizes: int,
) -> tuple[Mask, float | None, Rounded | None]:  # fmt: skip
    """Which keys are hidden, the scale, and with dropout the weights' factor."""
    factor = _factor(q, k, drop[0], drop[1:], p, sizes) if drop else None
    return hidden_keys(q, k, causal), scale, factor


def _answer(
    q: Rounded, k: Rounded, v: Rounded, *drop: Any, out_dtype: Any = None, **attrs: Any
) -> Answer:
    return attend(q, k, v, *_given(q, k, *drop, **attrs), out_dtype)


ATTENTION = differentiable(_answer)
ATTENTION_DROPOUT = differentiable(_answer)
