"""Oracles of attention and rope. Layout (batch, seq, heads, head_dim).

attention: Vaswani et al. 2017, equation 1, causal and grouped: query head h reads key head
h // (H / Hk). Gradients as in Dao et al. 2022, appendix B.2, with P = softmax, D = sum y dy:

    dS = P (dP - D) scale,  dP = dy v^T;  dq = dS k,  dk = dS^T q,  dv = P^T dy

For 16-bit tensors P and dS may be rounded to the tensors' type before the second product, as matrix
units need it (Dao 2023, section 3.3), the weights in lse may be as exact as P is, and D is taken
from the stored y. Sums are float32 throughout.

rope: Su et al. 2021, equation 34; the gradient is the rotation by the negative angle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from anychip.conformance.arithmetic import Rounded, concatenate, exp, log, matmul, where
from anychip.conformance.calls import LAYOUTS, Arguments, Call, Draw
from anychip.conformance.formats import Format
from anychip.conformance.oracles.oracle import Oracle

_HEADS_FIRST = (0, 2, 1, 3)
_KEYS_LAST = (0, 1, 3, 2)


def _repeated(x: Rounded, groups: int) -> Rounded:
    """(B, S, Hk, D) to (B, H, S, D)."""
    return x.transpose(*_HEADS_FIRST).shaped(lambda array: np.repeat(array, groups, axis=1))


class _Softmax:
    """The part that both directions need: unnormalised weights, their sum, lse."""

    def __init__(self, q: Rounded, k: Rounded, causal: bool, scale: float | None) -> None:
        length, dim = q.shape[1], q.shape[3]
        self.scale = 1.0 / math.sqrt(dim) if scale is None else scale
        self.q = q.transpose(*_HEADS_FIRST)
        self.k = _repeated(k, q.shape[2] // k.shape[2])
        self.scores = matmul(self.q, self.k.transpose(*_KEYS_LAST)) * self.scale
        position = np.arange(length)
        self.hidden = np.broadcast_to(
            causal & (position[:, None] < position[None, :]), self.scores.shape
        )
        seen = np.where(self.hidden, -np.inf, self.scores.value)
        # Any number near the maximum will do; it cancels and has no error.
        self.top = Rounded.exact(seen.max(-1, keepdims=True, initial=-np.inf))
        self.weights = self._visible(exp(where(self.hidden, self.top, self.scores) - self.top))
        self.total = self.weights.sum(-1, keepdims=True)
        self.lse = log(self.weights.stored(q.format).sum(-1, keepdims=True)) + self.top

    def _visible(self, weights: Rounded) -> Rounded:
        return where(self.hidden, 0.0, weights)

    def probabilities(self) -> Rounded:
        """exp(score - lse), as the gradient recomputes it."""
        return self._visible(exp(where(self.hidden, self.lse, self.scores) - self.lse))


def _attention_forward(
    q: Rounded, k: Rounded, v: Rounded, *, causal: bool, scale: float | None
) -> tuple[Rounded, Rounded]:
    softmax = _Softmax(q, k, causal, scale)
    wide_v = _repeated(v, q.shape[2] // v.shape[2])
    y = matmul(softmax.weights.stored(q.format), wide_v) / softmax.total
    return y.transpose(*_HEADS_FIRST), softmax.lse[..., 0]


def _attention_backward(
    grads: tuple[Rounded],
    q: Rounded,
    k: Rounded,
    v: Rounded,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[Rounded, Rounded, Rounded]:
    groups = q.shape[2] // k.shape[2]
    softmax = _Softmax(q, k, causal, scale)
    wide_v = _repeated(v, groups)
    y = (matmul(softmax.weights.stored(q.format), wide_v) / softmax.total).stored(q.format)
    dy = grads[0].transpose(*_HEADS_FIRST)
    p = softmax.probabilities()
    dp = matmul(dy, wide_v.transpose(*_KEYS_LAST))
    delta = (dy * y).sum(-1, keepdims=True)
    ds = (p * (dp - delta) * softmax.scale).stored(q.format)
    dq = matmul(ds, softmax.k)
    dk = matmul(ds.transpose(*_KEYS_LAST), softmax.q)
    dv = matmul(p.stored(q.format).transpose(*_KEYS_LAST), dy)
    return (
        dq.transpose(*_HEADS_FIRST),
        _grouped(dk, groups, k.format),
        _grouped(dv, groups, v.format),
    )


def _grouped(x: Rounded, groups: int, format: Format) -> Rounded:
    """(B, H, S, D) to (B, S, Hk, D): the heads of a group share a key head, gradients add up.

    Each head's may be stored in the tensors' type before, as FlashAttention does it.
    """
    if groups == 1:
        return x.transpose(*_HEADS_FIRST)
    batch, heads, length, dim = x.shape
    apart = x.stored(format).reshape(batch, heads // groups, groups, length, dim)
    return apart.sum(2).transpose(*_HEADS_FIRST)


def _rotate(x: Rounded, cos: Rounded, sin: Rounded, interleaved: bool) -> Rounded:
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :], sin[:, None, :]
    first = x[..., 0::2] if interleaved else x[..., :half]
    second = x[..., 1::2] if interleaved else x[..., half:]
    parts = (first * cos - second * sin, second * cos + first * sin)
    if not interleaved:
        return concatenate(parts, -1)
    stacked = concatenate([part[..., None] for part in parts], -1)
    return stacked.reshape(*x.shape)


def _rope_forward(
    q: Rounded, k: Rounded, cos: Rounded, sin: Rounded, *, interleaved: bool
) -> tuple[Rounded, Rounded]:
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rope_backward(
    grads: tuple[Rounded, Rounded],
    q: Rounded,
    k: Rounded,
    cos: Rounded,
    sin: Rounded,
    *,
    interleaved: bool,
) -> tuple[Rounded, Rounded]:
    dq, dk = grads
    return _rotate(dq, cos, -sin, interleaved), _rotate(dk, cos, -sin, interleaved)


Sizes = tuple[int, int, int, int, int]
# batch, seq, heads, key heads, head_dim: one of everything; beside tiles of 16, 64 and 128; grouped
# and single key heads; head sizes that are no power of two.
_SIZES: tuple[Sizes, ...] = (
    (1, 1, 1, 1, 2), (0, 4, 2, 2, 8), (2, 5, 4, 4, 8), (1, 17, 4, 2, 16), (2, 9, 6, 1, 12),
    (1, 63, 2, 2, 64), (1, 65, 3, 3, 40), (1, 130, 2, 1, 32), (1, 257, 1, 1, 128),
)  # fmt: skip
_FULL_SIZES: tuple[Sizes, ...] = ((1, 512, 2, 1, 64), (2, 128, 8, 2, 80), (1, 1000, 1, 1, 64))


def _qkv(draw: Draw, sizes: Sizes, *, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    batch, length, heads, kv_heads, dim = sizes
    q, k = (
        draw.normal(batch, length, heads, dim, scale=scale),
        draw.normal(batch, length, kv_heads, dim, scale=scale),
    )
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


def _attention_nan(draw: Draw) -> Arguments:
    q, k, v = _qkv(draw, (2, 6, 2, 2, 8))
    q[1, 3, 0, 0] = math.nan
    return (q, k, v), {"causal": True, "scale": None}


def _sizes_label(sizes: Sizes) -> str:
    batch, length, heads, kv_heads, dim = sizes
    return f"{batch}x{length}x{heads}+{kv_heads}x{dim}"


def _attention_calls() -> Iterator[Call]:
    for sizes in (*_SIZES, *_FULL_SIZES):
        for causal in (True, False):
            yield Call(
                label=f"{_sizes_label(sizes)}.{'causal' if causal else 'full'}",
                make=partial(_attend, sizes=sizes, causal=causal),
                full=sizes in _FULL_SIZES,
            )
    for layout in LAYOUTS:
        make = partial(_attend, sizes=(2, 11, 4, 2, 16), causal=True)
        yield Call(label=f"2x11x4+2x16.{layout}", make=make, layout=layout)
    options = {"scale:0.05": (0.05, 1.0), "sharp": (None, 4.0), "flat": (1e-3, 1.0)}
    for name, (scale, sharp) in options.items():
        make = partial(_attend, sizes=(1, 33, 2, 2, 16), causal=True, scale=scale, sharp=sharp)
        yield Call(label=f"1x33x2+2x16.{name}", make=make)
    yield Call(label="heads", make=_heads_apart, statistical=False)
    yield Call(label="nan", make=_attention_nan, statistical=False, gradient=False)


def _rope_arguments(draw: Draw, sizes: Sizes, interleaved: bool, scale: float = 1.0) -> Arguments:
    q, k, _ = _qkv(draw, sizes, scale=scale)
    length, half = sizes[1], sizes[4] // 2
    rate = 10000.0 ** (-torch.arange(half) / max(half, 1))
    angle = torch.arange(length)[:, None] * rate
    return (q, k, angle.cos(), angle.sin()), {"interleaved": interleaved}


def _huge_rope(draw: Draw, interleaved: bool) -> Arguments:
    return _rope_arguments(draw, (2, 9, 2, 2, 8), interleaved, scale=draw.huge)


def _rope_calls() -> Iterator[Call]:
    sizes_list: tuple[Sizes, ...] = (*_SIZES, (2, 31, 3, 1, 6), (1, 300, 2, 2, 64))
    for interleaved in (False, True):
        name = "interleaved" if interleaved else "half"
        make = partial(_rope_arguments, interleaved=interleaved)
        for sizes in sizes_list:
            yield Call(label=f"{_sizes_label(sizes)}.{name}", make=partial(make, sizes=sizes))
        for layout in LAYOUTS:
            placed = partial(make, sizes=(2, 7, 3, 1, 10))
            yield Call(label=f"2x7x3+1x10.{name}.{layout}", make=placed, layout=layout)
        huge = partial(_huge_rope, interleaved=interleaved)
        yield Call(label=f"2x9x2+2x8.{name}.huge", make=huge)


ATTENTION = Oracle(
    forward=_attention_forward,
    backward=_attention_backward,
    calls=_attention_calls,
    lower_precision=("1x17x4+2x16.causal", "1x65x3+3x40.full", "1x130x2+1x32.causal"),
)
ROPE = Oracle(
    forward=_rope_forward,
    backward=_rope_backward,
    calls=_rope_calls,
    lower_precision=("1x17x4+2x16.half", "1x257x1+1x128.interleaved"),
)
