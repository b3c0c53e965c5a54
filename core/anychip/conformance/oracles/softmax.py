"""Oracle of softmax: exp(s) over the sum of exp(s) of the keys that are visible.

s = x scale + bias in float32. Any number near the maximum may be taken off first; it cancels. The
gradient with respect to s is ds = y (dy - sum y dy) (Milakov and Gimelshein 2018 for the forward,
the quotient rule for this), from y as it is stored; that of x is ds scale, that of the bias the sum
of ds over the dims along which the bias is broadcast. A row without a visible key is 0.

The sum of a row is an error that the whole row shares: within sum y dy it is added as such. The
terms of a row share the error of sum y dy: where they are added up, for a bias that is one for all
keys, their errors are too.
"""

import numpy as np
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded, broadcast, exp, root, where
from anychip.conformance.formats import Array
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
        off = total.worst / total.value, lambda: total.spread / total.value
        shared = Rounded(0.0 * inner.value, *off) * inner.value
        dscores = y.stored(x.format) * (grad - (inner + shared))
        return dscores * scale, None if bias is None else _summed_to(dscores, bias.shape)

    return (y,), backward


def _summed_to(dscores: Rounded, shape: Shape) -> Rounded:
    """Summed over the dims along which a tensor of this shape is broadcast."""
    full = (1,) * (len(dscores.shape) - len(shape)) + shape
    if full[-1] < dscores.shape[-1]:
        rows, total = dscores, dscores.sum(-1, keepdims=True)

        def spread() -> Array:
            shared = broadcast(rows.spread, rows.shape).sum(-1, keepdims=True)
            return root(total.spread, shared)

        dscores = Rounded(total.value, total.worst, spread)
    sizes = zip(full, dscores.shape, strict=True)
    axes = tuple(axis for axis, (own, size) in enumerate(sizes) if own != size)
    return (dscores.sum(axes, keepdims=True) if axes else dscores).reshape(*shape)


SOFTMAX = differentiable(_answer)
