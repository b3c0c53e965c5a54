"""Oracle of cross_entropy: label smoothing (Szegedy et al. 2016), z-loss (Chowdhery et al. 2022).

    lse = log sum exp(x);  row = (1 - s) (lse - x[t]) + s (lse - mean(x)) + z lse^2
    d row / dx = p (1 + 2 z lse) - s / V - (1 - s) [j = t],  p = exp(x - lse)

A row whose target is ignore_index is exactly 0, and so is its gradient; the mean is over the
others.
"""

import numpy as np
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded, exp, log, where
from anychip.conformance.oracles.oracle import Answer, Gradients, differentiable

Targets = NDArray[np.int64]


def _lse(logits: Rounded) -> Rounded:
    """(..., 1). The maximum is subtracted first: any number near it will do, and it cancels."""
    with np.errstate(invalid="ignore"):
        top = Rounded.exact(logits.value.max(-1, keepdims=True, initial=-np.inf))
    return log(exp(logits - top).sum(-1, keepdims=True)) + top


def _taken(target: Targets, valid: NDArray[np.bool_], count: int) -> NDArray[np.float64]:
    """1 at every row's target, 0 elsewhere."""
    chosen = np.where(valid, target, 0)[..., None] == np.arange(count)
    ones: NDArray[np.float64] = chosen.astype(np.float64)
    return ones


def answer(
    logits: Rounded, target: Targets, *, ignore_index: int, label_smoothing: float, z_loss: float,
    reduction: str,
) -> Answer:  # fmt: skip
    """The loss and every row's lse, for logits that may have errors of their own."""
    valid, count = target != ignore_index, logits.shape[-1]
    each_lse = _lse(logits)
    lse = each_lse[..., 0]
    index = np.where(valid, target, 0)[..., None]
    picked = logits.shaped(lambda array: np.take_along_axis(array, index, -1)[..., 0])
    row = lse - picked
    if label_smoothing:
        row = (1.0 - label_smoothing) * row + label_smoothing * (lse - logits.mean(-1))
    if z_loss:
        row = row + z_loss * (lse * lse)
    loss = row = where(valid, row, 0.0)
    if reduction != "none":
        loss = row.reshape(-1).sum(0)
    if reduction == "mean":
        loss = loss / Rounded.exact(valid.sum())

    def backward(grad: Rounded) -> Gradients:
        slope = exp(logits - each_lse)
        if z_loss:
            slope = slope * (1.0 + 2.0 * z_loss * each_lse)
        if label_smoothing:
            slope = slope - label_smoothing / count
        slope = slope - _taken(target, valid, count) * Rounded.constant(1.0 - label_smoothing)
        weight = grad / Rounded.exact(valid.sum()) if reduction == "mean" else grad
        weight = weight.shaped(lambda array: np.broadcast_to(array, target.shape)[..., None])
        return (where(valid[..., None], slope * weight, 0.0),)

    return (loss, lse), backward


CROSS_ENTROPY = differentiable(answer)
