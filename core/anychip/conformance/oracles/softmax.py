"""Oracle of softmax: exp(s) over the sum of exp(s) of the keys that are visible.

s = x scale + bias in float32. Any number near the maximum may be taken off first; it cancels. The
gradient with respect to s is ds = y (dy - sum y dy) (Milakov and Gimelshein 2018 for the forward,
the quotient rule for this), from y as it is stored; that of x is ds scale, that of the bias the sum
of ds over the dims along which the bias is broadcast. A row without a visible key is 0.

The sum of a row is an error that the whole row shares: within sum y dy it is added as such. The
terms of a row share the error of sum y dy: where they are added up, for a bias that is one for all
keys, their errors are too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded, exp, where
from anychip.conformance.calls import Arguments, Call, Draw, special
from anychip.conformance.labels import Labels
from anychip.conformance.oracles.oracle import Answer, Gradients, differentiable

Mask = NDArray[np.bool_]
Shape = tuple[int, ...]


def _answer(
    x: Rounded, mask: Mask | None, bias: Rounded | None, *, scale: float, causal: bool
) -> Answer:
    scores = x if scale == 1.0 else x * scale
    scores = scores if bias is None else scores + bias
    visible = ~np.isneginf(scores.value)
    if mask is not None:
        visible &= mask
    if causal:
        queries, keys = x.shape[-2:]
        visible &= np.tri(queries, keys, keys - queries, dtype=np.bool_)
    largest = np.where(visible, scores.value, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    hidden = np.isneginf(largest)
    top = Rounded.exact(np.where(hidden, 0.0, largest))
    weights = where(visible, exp(where(visible, scores, top) - top), 0.0)
    total = where(hidden, 1.0, weights.sum(-1, keepdims=True))
    y = weights / total

    def backward(grad: Rounded) -> Gradients:
        own = (weights / total.value).stored(x.format)
        inner = (grad * own).sum(-1, keepdims=True)
        relative = (total.worst / total.value, total.spread / total.value)
        shared = Rounded(0.0 * inner.value, *relative) * inner.value
        dscores = y.stored(x.format) * (grad - (inner + shared))
        return dscores * scale, None if bias is None else _summed_to(dscores, bias.shape)

    return (y,), backward


def _summed_to(dscores: Rounded, shape: Shape) -> Rounded:
    """Summed over the dims along which a tensor of this shape is broadcast."""
    full = (1,) * (len(dscores.shape) - len(shape)) + shape
    if full[-1] < dscores.shape[-1]:
        shared = np.broadcast_to(dscores.spread, dscores.shape).sum(-1, keepdims=True)
        total = dscores.sum(-1, keepdims=True)
        dscores = Rounded(total.value, total.worst, np.hypot(total.spread, shared))
    sizes = zip(full, dscores.shape, strict=True)
    axes = tuple(axis for axis, (own, size) in enumerate(sizes) if own != size)
    return (dscores.sum(axes, keepdims=True) if axes else dscores).reshape(*shape)


# keys beside vector widths, a warp and a block; one key; rows in one, three and no dims before.
_SHAPES = "0x5 3x0 1 4x8 3x17 2x3x33 5x64 7x257 2x2x3x31 3x1000 1x4097"
# queries and keys: square; more keys, as while a text is written; more queries, of which the first
# ones see nothing; one of each.
_CAUSAL = "2x9x9.causal 3x1x17.causal 2x4x33.causal 2x7x3.causal 1x65x65.causal 1x1.causal"
_LABELS = Labels({
    "causal": {"scale": 0.35, "causal": True}, "sharp": {"scale": 4.0, "spread": 3.0},
    "flat": {"scale": 1e-3, "spread": 1.0}, "negative": {"scale": -0.5},
    "mask:full": {"mask": (2, 3, 4, 23)}, "mask:keys": {"mask": (2, 1, 1, 23)},
    "mask:queries": {"mask": (4, 1)}, "bias": {"bias": (3, 1, 23)}, "bias:keys": {"bias": (23,)},
    "bias:queries": {"bias": (4, 1)}, "bias:full": {"bias": (2, 3, 4, 23)},
})  # fmt: skip


def _plain(draw: Draw, shape: Shape, *, spread: float = 2.0, **attrs: Any) -> Arguments:
    return (draw.normal(*shape, scale=spread),), {"scale": 1.0, "causal": False, **attrs}


def _masked(draw: Draw, shape: Shape, mask: Shape, **attrs: Any) -> Arguments:
    drawn = draw.uniform(*mask) < 0.6
    (x,), attrs = _plain(draw, shape, **attrs)
    return (x, drawn, None), attrs


def _biased(draw: Draw, shape: Shape, bias: Shape, **attrs: Any) -> Arguments:
    (x,), attrs = _plain(draw, shape, **attrs)
    return (x, None, draw.normal(*bias)), attrs


def _everything(draw: Draw, shape: Shape = (2, 3, 5, 18)) -> Arguments:
    batch, _, _, keys = shape
    (x, mask, _), attrs = _masked(draw, shape, (batch, 1, 1, keys), scale=0.4, causal=True)
    return (x, mask, draw.normal(*shape[1:], dtype=torch.float32)), attrs


def _hidden_rows(draw: Draw) -> Arguments:
    x, mask = draw.normal(4, 20), torch.ones(4, 20, dtype=torch.bool)
    # The first key is hidden from all rows: whoever looks for NaN there alone finds none.
    mask[:, 0], mask[1], mask[2, :-1] = False, False, False
    x[3] = -math.inf
    return (x, mask, None), {"scale": 1.0, "causal": False}


def _additive(draw: Draw) -> Arguments:
    # An additive mask: -inf hides, one row as a whole; the type's most negative number as well.
    bias = torch.zeros(5, 12, dtype=draw.dtype)
    bias[0, 3:] = -math.inf
    bias[1] = -math.inf
    bias[2, ::2] = torch.finfo(draw.dtype).min
    return (draw.normal(2, 5, 12), None, bias), {"scale": 0.5, "causal": False}


def _far(draw: Draw) -> Arguments:
    # Beyond exp's range on both sides; equal numbers; one that outweighs the rest.
    x = draw.normal(6, 24)
    x[0] += 200.0
    x[1] -= 200.0
    x[2] = 7.5
    x[3, 11] = 300.0
    return (x,), {"scale": 1.0, "causal": False}


def _dirty(draw: Draw) -> Arguments:
    # What is hidden is not looked at: NaN and Inf there change nothing; a visible NaN its row.
    x, mask = draw.normal(5, 16), draw.uniform(5, 16) < 0.7
    mask[:, 4], mask[:, 5], mask[2] = False, False, True
    x[1, 4], x[3, 5], x[2, 6] = math.nan, math.inf, math.nan
    return (x, mask, None), {"scale": 0.5, "causal": False}


def _calls() -> Iterator[Call]:
    yield from _LABELS(_plain, f"{_SHAPES} {_CAUSAL}")
    masked, biased = partial(_masked, scale=0.25), partial(_biased, scale=0.25)
    yield from _LABELS(masked, "2x3x4x23", ends=(".mask:full", ".mask:keys", ".mask:queries"))
    ends = (".bias", ".bias:keys", ".bias:queries", ".bias:full")
    yield from _LABELS(biased, "2x3x4x23", ends=ends)
    # Sums of many rows and of many keys, and enough sums to see how errors are distributed.
    yield Call("500x96.bias", partial(_biased, shape=(500, 96), bias=(96,), scale=0.5))
    yield Call("3x90x65.bias", partial(_biased, shape=(3, 90, 65), bias=(90, 1), scale=0.5))
    yield Call("2x3x5x18.everything", _everything)
    yield from _LABELS(_plain, "6x40.sharp 6x40.flat 6x40.negative")
    yield Call("4x20.hidden", _hidden_rows, statistical=False)
    yield Call("2x5x12.additive", _additive, statistical=False)
    yield Call("6x24.far", _far, statistical=False)
    # Alone: no other row sends the call another way.
    make = partial(_plain, shape=(4, 16), spread=1.0, scale=0.5)
    yield special("4x16.nan", make, (0, (2, 6), math.nan))
    yield Call("5x16.dirty", _dirty, statistical=False, gradient=False)
    yield from _LABELS(_plain, "2x8192", full=True)


SOFTMAX = differentiable(
    _answer, _calls, "7x257", "3x1000", "1x65x65.causal", "2x3x4x23.bias", "500x96.bias"
)
