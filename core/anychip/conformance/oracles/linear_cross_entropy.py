"""Oracle of linear_cross_entropy: cross_entropy of x w^T + b; dx = dl w, dw = dl^T x, db = sum dl.

The logits l are float32 numbers, whatever the tensors' type. Their gradient dl may be rounded to
the tensors' type before the second products, as matrix units need it.

linear_cross_entropy_partials: lse of the logits, the target's, their sum; dl = dlse exp(l - lse)
+ dpicked at the target + dtotal.
"""

from typing import Any

import numpy as np

from anychip.conformance.arithmetic import Rounded, exp, log, root, where
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


LINEAR_CROSS_ENTROPY = differentiable(_answer)


def _partials(
    x: Rounded, weight: Rounded, target: Targets, bias: Rounded | None, *, first: int
) -> Answer:
    (whole,), of_linear = linear.answer(x, weight, bias)
    logits = _rows(whole)
    # Any number near the maximum will do; it cancels and has no error.
    top = Rounded.exact(logits.value.max(-1, keepdims=True))
    lse = log(exp(logits - top).sum(-1, keepdims=True)) + top
    here = target.reshape(-1, 1) == first + np.arange(weight.shape[0])
    picked = logits.shaped(lambda array: np.asarray(np.where(here, array, 0.0).sum(-1)))

    def backward(*grads: Rounded) -> Gradients:
        dlse, dpicked, dtotal = (g.reshape(-1, 1) for g in grads)
        slope = dlse * exp(logits - lse) + dtotal
        dx, *others = of_linear(where(here, slope + dpicked, slope).stored(x.format))
        assert dx is not None
        # Of many classes all but one have nearly the same slope, dtotal. Which of them are rounded
        # down says their probability, and so their weight: errors of one sign stay together.
        each = dtotal.stored(x.format).spread
        alike = (each * np.abs(weight.value).sum(0)).reshape(x.shape)
        return Rounded(dx.value, dx.worst, lambda: root(dx.spread, alike)), *others

    results = (lse[:, 0], picked, logits.sum(-1))
    return tuple(y.reshape(*target.shape) for y in results), backward


LINEAR_CROSS_ENTROPY_PARTIALS = differentiable(_partials)
