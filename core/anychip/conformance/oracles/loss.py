"""Oracle of cross_entropy: label smoothing (Szegedy et al. 2016), z-loss (Chowdhery et al. 2022).

    lse = log sum exp(x);  row = (1 - s) (lse - x[t]) + s (lse - mean(x)) + z lse^2
    d row / dx = p (1 + 2 z lse) - s / V - (1 - s) [j = t],  p = exp(x - lse)

A row whose target is ignore_index is exactly 0, and so is its gradient; the mean is over the
others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded, exp, log, where
from anychip.conformance.calls import Arguments, Call, Draw, special
from anychip.conformance.labels import Labels
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
    logits: Rounded,
    target: Targets,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> Answer:
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


DEFAULTS: dict[str, Any] = {
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "reduction": "mean",
}
# Beside vector widths; a vocabulary that is odd; one row, many rows; empty.
_SHAPES = "0x5 1x1 11 6x11 3x17 2x3x130 5x64 90x33 4x1023 3x4099"
OPTIONS: dict[str, dict[str, Any]] = {
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smooth:0.1": {"label_smoothing": 0.1},
    "smooth:1": {"label_smoothing": 1.0, "reduction": "none"},
    "z:0.01": {"z_loss": 0.01},
    "all": {"label_smoothing": 0.2, "z_loss": 0.001, "reduction": "none", "ignore_index": 3},
    "all-mean": {"label_smoothing": 0.2, "z_loss": 0.001, "ignore_index": 3},
}


def _arguments(
    draw: Draw, shape: tuple[int, ...], scale: float = 2.0, **changes: object
) -> Arguments:
    logits = draw.normal(*shape, scale=scale)
    target = draw.integers(shape[-1], *shape[:-1])
    if changes.get("ignore_index") == 3:
        target.reshape(-1)[::3] = 3
    return (logits, target), {**DEFAULTS, **changes}


def _edges(draw: Draw) -> Arguments:
    # First and last class, and a class on both sides of every vector width.
    target = torch.tensor([0, 66, 7, 8, 15, 16, 31, 32, 63, 64])
    return (draw.normal(10, 67), target), {**DEFAULTS, "reduction": "none"}


def _ignored(draw: Draw, which: str, reduction: str = "mean") -> Arguments:
    logits, target = draw.normal(8, 20), draw.integers(20, 8)
    rows: dict[str, Any] = {
        "all": slice(None), "all-but-last": slice(0, -1), "last": slice(-1, None)
    }  # fmt: skip
    target[rows[which]] = -100
    if which != "all":
        logits[rows[which]] *= 8.0  # what is not to be counted is loud
    return (logits, target), {**DEFAULTS, "reduction": reduction}


def _spread(draw: Draw) -> Arguments:
    # exp(200) overflows float32: without subtracting the maximum there is nothing left.
    logits = draw.normal(6, 40, scale=60.0)
    logits[0] += 150.0
    return (logits, draw.integers(40, 6)), {**DEFAULTS, "reduction": "none"}


def _masked(draw: Draw) -> Arguments:
    logits, target = draw.normal(6, 40), draw.integers(20, 6)
    logits[:, 25:] = -math.inf
    return (logits, target), {**DEFAULTS, "reduction": "none"}


def _calls() -> Iterator[Call]:
    labels = Labels(OPTIONS)
    yield from labels(_arguments, _SHAPES)
    for name in OPTIONS:
        yield from labels(_arguments, f"6x11.{name} 5x13x130.{name}")
    # The sum over the whole vocabulary counts in smoothing alone.
    yield from labels(_arguments, "3x32000.all-mean")
    yield Call("edges", _edges)
    for which in ("all", "all-but-last", "last"):
        yield Call(f"ignored:{which}", partial(_ignored, which=which))
    yield Call("ignored:last.none", partial(_ignored, which="last", reduction="none"))
    yield Call("spread", _spread, statistical=False)
    yield Call("masked", _masked, statistical=False)
    make = partial(_arguments, shape=(5, 20), scale=1.0, reduction="none")
    yield special("nan", make, (0, (2, 4), math.nan))
    yield from labels(_arguments, "5x32000 5x152064", full=True)


CROSS_ENTROPY = differentiable(answer, _calls, "6x11.none", "5x13x130.none", "90x33")
