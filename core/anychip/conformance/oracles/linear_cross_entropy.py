"""Oracle of linear_cross_entropy: cross_entropy of x w^T + b; dx = dl w, dw = dl^T x, db = sum dl.

The logits l are float32 numbers, whatever the tensors' type. Their gradient dl may be rounded to
the tensors' type before the second products, as matrix units need it.

linear_cross_entropy_partials: lse of the logits, the target's, their sum; dl = dlse exp(l - lse)
+ dpicked at the target + dtotal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from anychip.conformance.arithmetic import Rounded, exp, log, where
from anychip.conformance.calls import Arguments, Call, Draw, special
from anychip.conformance.labels import Labels
from anychip.conformance.oracles import linear, loss
from anychip.conformance.oracles.linear import _rows
from anychip.conformance.oracles.loss import Targets
from anychip.conformance.oracles.oracle import Answer, Gradients, differentiable


def _answer(
    x: Rounded, weight: Rounded, target: Targets, bias: Rounded | None, **options: Any
) -> Answer:
    (logits,), of_linear = linear.answer(x, weight, bias)
    results, of_loss = loss.answer(logits, target, **options)

    def backward(grad: Rounded) -> Gradients:
        (dlogits,) = of_loss(grad)
        assert dlogits is not None
        return of_linear(dlogits.stored(x.format))

    return results, backward


# rows, K, V: empty; one of everything; odd ones; many rows, wide inputs, many classes.
_SIZES = "0.4-5 1.1-1 scalar.8-11 6.8-11 3.33-17 2x3.17-130 90.12-33 65.257-33 3.16-1023"
_LABELS = Labels({"bias": {"bias": True}, **loss.OPTIONS}, {r"(\d+)-(\d+)": ("inputs", "classes")})


def _arguments(
    draw: Draw,
    shape: tuple[int, ...],
    inputs: int,
    classes: int,
    bias: bool = False,
    **changes: object,
) -> Arguments:
    x, weight = draw.normal(*shape, inputs), draw.normal(classes, inputs, scale=inputs**-0.5)
    target = draw.integers(classes, *shape)
    if changes.get("ignore_index") == 3:
        target.reshape(-1)[::3] = 3
    args = (x, weight, target, draw.normal(classes) if bias else None)
    return args, {**loss.DEFAULTS, **changes}


def _ignored(draw: Draw, which: str, reduction: str = "mean") -> Arguments:
    (x, weight, target, bias), attrs = _arguments(draw, (8,), 12, 20, reduction=reduction)
    rows: dict[str, Any] = {"all": slice(None), "last": slice(-1, None)}
    target[rows[which]] = -100
    if which != "all":
        x[rows[which]] *= 8.0  # what is not to be counted is loud
    return (x, weight, target, bias), attrs


def _masked(draw: Draw) -> Arguments:
    # A vocabulary that is padded, with a bias that rules the padding out.
    (x, weight, _, bias), attrs = _arguments(draw, (6,), 12, 40, bias=True, reduction="none")
    bias[25:] = -math.inf
    return (x, weight, draw.integers(20, 6), bias), attrs


def _calls() -> Iterator[Call]:
    with_bias = partial(_arguments, bias=True)
    yield from _LABELS(_arguments, _SIZES, ends=(".bias", ""))
    ends = [f".{name}" for name in loss.OPTIONS if name != "smooth:1"]
    yield from _LABELS(with_bias, "5x13.24-130", ends=ends)
    yield from _LABELS(partial(with_bias, reduction="none"), "64.256-128.none")
    for which in ("all", "last"):
        yield Call(f"ignored:{which}", partial(_ignored, which=which))
    yield Call("ignored:last.none", partial(_ignored, which="last", reduction="none"))
    yield Call("masked", _masked, statistical=False)
    make = partial(_arguments, shape=(5,), inputs=12, classes=20, reduction="none")
    yield special("nan", make, (0, (2, 4), math.nan))
    # More than one chunk of rows, whatever their size.
    yield from _LABELS(with_bias, "50.32-32000", full=True)


LINEAR_CROSS_ENTROPY = differentiable(
    _answer, _calls, "5x13.24-130.none", "90.12-33", "65.257-33", "64.256-128.none"
)


def _partials(
    x: Rounded, weight: Rounded, target: Targets, bias: Rounded | None, *, first: int
) -> Answer:
    (whole,), of_linear = linear.answer(x, weight, bias)
    logits = _rows(whole)
    # Any number near the maximum will do; it cancels and has no error.
    top = Rounded.exact(logits.value.max(-1, keepdims=True))
    lse = log(exp(logits - top).sum(-1, keepdims=True)) + top
    here = target.reshape(-1, 1) == first + np.arange(weight.shape[0])
    picked = Rounded(*(np.where(here, a, 0.0).sum(-1) for a in _arrays(logits)))

    def backward(*grads: Rounded) -> Gradients:
        dlse, dpicked, dtotal = (g.reshape(-1, 1) for g in grads)
        slope = dlse * exp(logits - lse) + dtotal
        return of_linear(where(here, slope + dpicked, slope).stored(x.format))

    results = (lse[:, 0], picked, logits.sum(-1))
    return tuple(y.reshape(*target.shape) for y in results), backward


def _arrays(x: Rounded) -> tuple[Any, ...]:
    return x.value, np.broadcast_to(x.worst, x.shape), np.broadcast_to(x.spread, x.shape)


def _part(draw: Draw, *, first: int = 0, **options: Any) -> Arguments:
    (x, weight, target, given), _ = _arguments(draw, **options)
    # A third each of this part, of those before and of those after it; and one of none.
    target += first
    target.reshape(-1)[1::3] -= weight.shape[0]
    target.reshape(-1)[2::3] += weight.shape[0]
    target.reshape(-1)[:1] = -100 if target.numel() > 1 else first
    return (x, weight, target, given), {"first": first}


def _partials_calls() -> Iterator[Call]:
    labels = Labels({"bias": {"bias": True, "first": 7}}, _LABELS.forms)
    yield from labels(_part, _SIZES, ends=(".bias", ""))
    # Classes whose numbers need more than 32 bits.
    far = partial(_part, shape=(6,), inputs=5, classes=11, first=2**32)
    yield Call("classes-from-2p32", far)
    yield from labels(partial(_part, first=32_000, bias=True), "50.32-32000", full=True)


LINEAR_CROSS_ENTROPY_PARTIALS = differentiable(_partials, _partials_calls, "90.12-33", "65.257-33")
