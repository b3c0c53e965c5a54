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
from anychip.conformance.calls import Arguments, Call, Draw, in_layouts, shape_label, special
from anychip.conformance.oracles.oracle import Oracle

Mask = NDArray[np.bool_]
Shape = tuple[int, ...]


class _Row:
    """What both directions need: weights exp(s - top), zero where hidden, and their sum."""

    def __init__(
        self, x: Rounded, mask: Mask | None, bias: Rounded | None, scale: float, causal: bool
    ) -> None:
        scores = x if scale == 1.0 else x * scale
        scores = scores if bias is None else scores + bias
        visible = ~np.isneginf(scores.value)
        if mask is not None:
            visible &= mask
        if causal:
            queries, keys = x.shape[-2:]
            visible &= np.tri(queries, keys, keys - queries, dtype=np.bool_)
        top = np.where(visible, scores.value, -np.inf).max(-1, keepdims=True, initial=-np.inf)
        hidden = np.isneginf(top)
        self.top = Rounded.exact(np.where(hidden, 0.0, top))
        self.weights = where(visible, exp(where(visible, scores, self.top) - self.top), 0.0)
        self.total = where(hidden, 1.0, self.weights.sum(-1, keepdims=True))
        self.y = self.weights / self.total


def _forward(
    x: Rounded, mask: Mask | None, bias: Rounded | None, *, scale: float, causal: bool
) -> tuple[Rounded]:
    return (_Row(x, mask, bias, scale, causal).y,)


def _backward(
    grads: tuple[Rounded],
    x: Rounded,
    mask: Mask | None,
    bias: Rounded | None,
    *,
    scale: float,
    causal: bool,
) -> tuple[Rounded, Rounded | None]:
    (grad,) = grads
    row = _Row(x, mask, bias, scale, causal)
    own = (row.weights / row.total.value).stored(x.format)
    inner = (grad * own).sum(-1, keepdims=True)
    relative = (row.total.worst / row.total.value, row.total.spread / row.total.value)
    shared = Rounded(0.0 * inner.value, *relative) * inner.value
    dscores = row.y.stored(x.format) * (grad - (inner + shared))
    return dscores * scale, None if bias is None else _summed_to(dscores, bias.shape)


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
_SHAPES: tuple[Shape, ...] = (
    (0, 5), (3, 0), (1,), (4, 8), (3, 17), (2, 3, 33), (5, 64), (7, 257), (2, 2, 3, 31),
    (3, 1000), (1, 4097),
)  # fmt: skip
# queries and keys: square; more keys, as while a text is written; more queries, of which the first
# ones see nothing; one of each.
_CAUSAL: tuple[Shape, ...] = ((2, 9, 9), (3, 1, 17), (2, 4, 33), (2, 7, 3), (1, 65, 65), (1, 1))


def _plain(draw: Draw, shape: Shape, *, spread: float = 2.0, **attrs: Any) -> Arguments:
    return (draw.normal(*shape, scale=spread),), {"scale": 1.0, "causal": False, **attrs}


def _masked(
    draw: Draw, shape: Shape, mask_shape: Shape, *, share: float = 0.6, **attrs: Any
) -> Arguments:
    mask = draw.uniform(*mask_shape) < share
    (x,), attrs = _plain(draw, shape, **attrs)
    return (x, mask, None), attrs


def _biased(draw: Draw, shape: Shape, bias_shape: Shape, **attrs: Any) -> Arguments:
    (x,), attrs = _plain(draw, shape, **attrs)
    return (x, None, draw.normal(*bias_shape)), attrs


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
    for shape in _SHAPES:
        yield Call(shape_label(shape), partial(_plain, shape=shape))
    for shape in _CAUSAL:
        make = partial(_plain, shape=shape, scale=0.35, causal=True)
        yield Call(f"{shape_label(shape)}.causal", make)
    yield from in_layouts(
        "4x6x22", partial(_biased, shape=(4, 6, 22), bias_shape=(6, 22), scale=0.5, causal=True)
    )
    masks: dict[str, Shape] = {"full": (2, 3, 4, 21), "keys": (2, 1, 1, 21), "queries": (4, 1)}
    for name, mask in masks.items():
        make = partial(_masked, shape=(2, 3, 4, 21), mask_shape=mask, scale=0.25)
        yield Call(f"2x3x4x21.mask:{name}", make)
    make = partial(_biased, shape=(2, 3, 4, 21), bias_shape=(3, 1, 21), scale=0.25)
    yield Call("2x3x4x21.bias", make)
    biases: dict[str, Shape] = {"keys": (21,), "queries": (4, 1), "full": (2, 3, 4, 21)}
    for name, bias in biases.items():
        make = partial(_biased, shape=(2, 3, 4, 21), bias_shape=bias, scale=0.25)
        yield Call(f"2x3x4x21.bias:{name}", make)
    # Sums of many rows and of many keys, and enough sums to see how errors are distributed.
    yield Call("500x96.bias", partial(_biased, shape=(500, 96), bias_shape=(96,), scale=0.5))
    yield Call("3x90x65.bias", partial(_biased, shape=(3, 90, 65), bias_shape=(90, 1), scale=0.5))
    yield Call("2x3x5x18.everything", _everything)
    for name, scale, spread in (("sharp", 4.0, 3.0), ("flat", 1e-3, 1.0), ("negative", -0.5, 2.0)):
        yield Call(f"6x40.{name}", partial(_plain, shape=(6, 40), scale=scale, spread=spread))
    yield Call("4x20.hidden", _hidden_rows, statistical=False)
    yield Call("2x5x12.additive", _additive, statistical=False)
    yield Call("6x24.far", _far, statistical=False)
    # Alone: no other row sends the call another way.
    make = partial(_plain, shape=(4, 16), spread=1.0, scale=0.5)
    yield special("4x16.nan", make, (0, (2, 6), math.nan))
    yield Call("5x16.dirty", _dirty, statistical=False, gradient=False)
    yield Call("2x8192", partial(_plain, shape=(2, 8192)), full=True)


SOFTMAX = Oracle(
    forward=_forward,
    backward=_backward,
    calls=_calls,
    lower_precision=("7x257", "3x1000", "1x65x65.causal", "2x3x4x21.bias"),
)
