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

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded, exp, log, matmul, where
from anychip.conformance.calls import Arguments, Call, Draw, changed, special
from anychip.conformance.formats import FORMATS, Format
from anychip.conformance.labels import Forms, Labels
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
    q: Rounded,
    k: Rounded,
    v: Rounded,
    hidden: Mask,
    scale: float | None,
    factor: Rounded | None = None,
    out_dtype: torch.dtype | None = None,
) -> Answer:
    """y and lse. hidden: (Sq, Sk), which keys a query does not see; factor: of the weights.

    The gradients' function takes ``whole``, y and lse of all keys, where these are a block of them.
    """
    groups, scale = (
        q.shape[2] // k.shape[2],
        1.0 / math.sqrt(q.shape[3]) if scale is None else scale,
    )
    own_q, own_k, own_v = q.transpose(*_HEADS_FIRST), _repeated(k, groups), _repeated(v, groups)
    scores = matmul(own_q, own_k.transpose(*_KEYS_LAST)) * scale
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
        ds = (p * (dp - delta) * scale).stored(q.format)
        dk = matmul(ds.transpose(*_KEYS_LAST), own_q)
        dv = matmul(kept.stored(q.format).transpose(*_KEYS_LAST), dy)
        dq = matmul(ds, own_k).transpose(*_HEADS_FIRST)
        return dq, _grouped(dk, groups, k.format), _grouped(dv, groups, v.format)

    return (y.transpose(*_HEADS_FIRST), lse[..., 0]), backward


def _grouped(x: Rounded, groups: int, format: Format) -> Rounded:
    """(B, H, S, D) to (B, S, Hk, D): the heads of a group share a key head, gradients add up.

    Each head's may be stored in the tensors' type before, as FlashAttention does it.
    """
    if groups == 1:
        return x.transpose(*_HEADS_FIRST)
    batch, heads, length, dim = x.shape
    apart = x.stored(format).reshape(batch, heads // groups, groups, length, dim)
    return apart.sum(2).transpose(*_HEADS_FIRST)


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
    q: Rounded,
    k: Rounded,
    *drop: Any,
    causal: bool,
    scale: float | None,
    p: float = 0,
    **sizes: int,
) -> tuple[Mask, float | None, Rounded | None]:
    """Which keys are hidden, the scale, and with dropout the weights' factor."""
    factor = _factor(q, k, drop[0], drop[1:], p, sizes) if drop else None
    return hidden_keys(q, k, causal), scale, factor


def _answer(
    q: Rounded, k: Rounded, v: Rounded, *drop: Any, out_dtype: Any = None, **attrs: Any
) -> Answer:
    return attend(q, k, v, *_given(q, k, *drop, **attrs), out_dtype)


Sizes = tuple[int, int, int, int, int]
# batch, seq, heads, key heads, head_dim: one of everything; beside tiles of 16, 64 and 128; grouped
# and single key heads; head sizes that are no power of two.
SIZES = """1x1x1+1x2 0x4x2+2x8 2x5x4+4x8 1x17x4+2x16 2x9x6+2x12 1x63x2+2x64 1x65x3+3x40 1x130x2+1x32
    1x257x1+1x128 2x64x4+2x64"""
_FULL_SIZES = "1x512x2+1x64 2x128x8+2x80 1x1000x1+1x64"
# Queries and keys: one query (the last position), a few new ones, beside tiles; queries that see no
# key; no key at all; no query.
_LENGTHS = "1of9 3of20 16of33 65of130 20of3 9of1 4of0 0of4"
FORMS: Forms = {
    r"(\d+)x(\d+)x(\d+)[+](\d+)x(\d+)": lambda *sizes: {"sizes": tuple(map(int, sizes))},
    r"(\d+)of(\d+)": ("queries", "keys"),
}
_BOTH = (".causal", ".full")
_LABELS = Labels(
    {
        "causal": {"causal": True}, "full": {"causal": False}, "to-float32": {},
        "sharp": {"sharp": 4.0}, "flat": {"scale": 1e-3},
        # The counter's low word overflows within the mask.
        "far": {"offset": 2**32 - 20},
    },
    FORMS,
)  # fmt: skip


def _qkv(draw: Draw, sizes: Sizes, *, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    batch, length, heads, kv_heads, dim = sizes
    q = draw.normal(batch, length, heads, dim, scale=scale)
    k = draw.normal(batch, length, kv_heads, dim, scale=scale)
    return q, k, draw.normal(batch, length, kv_heads, dim)


def _attend(
    draw: Draw, sizes: Sizes, causal: bool, scale: float | None = None, sharp: float = 1.0
) -> Arguments:
    return _qkv(draw, sizes, scale=sharp), {"causal": causal, "scale": scale}


def _heads_apart(draw: Draw) -> Arguments:
    # Key head g holds the number g + 1 and nothing else: a wrong head is a wrong integer.
    q, k, v = _qkv(draw, (1, 6, 6, 3, 8))
    v[:] = torch.arange(1, 4, dtype=v.dtype)[:, None]
    return (q, k, v), {"causal": True, "scale": None}


def to_float32(draw: Draw, make: Callable[..., Arguments], **options: Any) -> Arguments:
    """The call with a result of float32. Of values of one sign: y's rounding shows."""
    (q, k, v, *rest), attrs = make(draw, **options)
    return (q, k, v + 4.0, *rest), {**attrs, "out_dtype": torch.float32}


_NAN = changed(
    lambda draw: _attend(draw, (2, 6, 2, 2, 8), causal=True), (0, (1, 3, 0, 0), math.nan)
)


def _cross(draw: Draw, queries: int, keys: int, causal: bool) -> Arguments:
    k, v = draw.normal(2, keys, 2, 12), draw.normal(2, keys, 2, 12)
    return (draw.normal(2, queries, 4, 12), k, v), {"causal": causal, "scale": None}


def _attention_calls() -> Iterator[Call]:
    causal = partial(_attend, causal=True)
    yield from _LABELS(_attend, SIZES, ends=_BOTH)
    yield from _LABELS(_attend, _FULL_SIZES, ends=_BOTH, full=True)
    # Times a scale below 0, the -inf that hides a key is the opposite.
    scales = (".scale:0.05", ".sharp", ".flat", ".scale:-0.3")
    yield from _LABELS(causal, "1x33x2+2x16", ends=scales)
    yield from _LABELS(_cross, _LENGTHS, ends=_BOTH)
    wide = partial(to_float32, make=partial(_attend, causal=False))
    yield from _LABELS(wide, "1x65x3+3x40.to-float32 2x9x6+2x12.to-float32")
    yield Call("heads", _heads_apart, statistical=False)
    yield special("nan", _NAN)


def _dropped(
    draw: Draw, make: Callable[..., Arguments], p: float = 0.3, offset: int = 5, **options: Any
) -> Arguments:
    args, attrs = make(draw, **options)
    return (*args, draw.rng(1234, offset)), {"p": p, **attrs}


INDEX = {"batch": 0, "head": 2, "query": 1, "key": 1}
"""What attention_dropout has an index of, and the dim of q, or of k, that it is for."""
_SQUARE = partial(_attend, sizes=(2, 7, 4, 2, 8), causal=False)


def _in_whole(draw: Draw, which: Sequence[str] = tuple(INDEX), far: bool = False) -> Arguments:
    """A part of a whole, in dims of it anywhere; far: partly outside of it."""
    (*args, rng), attrs = _dropped(draw, _SQUARE, 0.4)
    extents = {name: args[name == "key"].shape[dim] for name, dim in INDEX.items()}
    index = [draw.integers(30, n) if name in which else None for name, n in extents.items()]
    if far:
        index = [None if i is None else i * 2**40 - 2**43 for i in index]
    named = {"head": "heads", "query": "queries", "key": "keys"}
    sizes = {named[name]: 31 for name in which if name in named}
    return (*args, rng, *index), {**attrs, **sizes}


def _dropout_calls() -> Iterator[Call]:
    causal = partial(_dropped, make=partial(_attend, causal=True))
    square = partial(_dropped, make=partial(_attend, causal=False))
    yield from _LABELS(causal, SIZES, ends=(".p:0.1",))
    # Large scores: what rounds them is seen through the rounding of weights that 16 bits may have.
    yield from _LABELS(causal, "1x33x2+2x16.sharp")
    yield from _LABELS(square, "2x7x4+2x8", ends=(".p:0", ".p:0.5", ".p:0.9", ".p:1", ".far"))
    yield from _LABELS(
        partial(_dropped, make=partial(_cross, causal=True)), "3of20.p:0.3 20of3.p:0.3"
    )
    for which in (*((name,) for name in INDEX), tuple(INDEX)):
        yield Call(f"index:{'+'.join(which)}", partial(_in_whole, which=which))
    yield Call("index:far", partial(_in_whole, far=True))
    yield special("nan", partial(_dropped, make=_NAN))


ATTENTION = differentiable(
    _answer,
    _attention_calls,
    "1x17x4+2x16.causal",
    "1x65x3+3x40.full",
    "1x130x2+1x32.causal",
    "2x64x4+2x64.causal",
    "1x65x3+3x40.to-float32",
    "1x33x2+2x16.sharp",
)
ATTENTION_DROPOUT = differentiable(
    _answer, _dropout_calls, "1x17x4+2x16.p:0.1", "1x65x3+3x40.p:0.1", "1x33x2+2x16.sharp"
)
