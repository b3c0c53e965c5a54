"""Oracles of rms_norm, layer_norm, group_norm, and of norms after the sum with a residual.

rms_norm: Zhang and Sennrich 2019, equation 4. layer_norm: Ba, Kiros and Hinton 2016, equation 4,
with the variance as the mean of squared differences: the textbook form E[x^2] - E[x]^2 loses all
digits for inputs far from 0 and is outside the bound. The gradients by the chain rule, with
a = grad * weight and c = x - mean:

    rms_norm:   dx = rstd (a - x rstd^2 mean(a x))
    layer_norm: dx = rstd (a - mean(a) - c rstd^2 mean(a c))

The mean and rstd of a row are errors that the whole row shares. rstd stays outside of every sum;
the mean's error m enters mean(a c) as -m mean(a), which is added as such.

group_norm: Wu and He 2018: the layer norm of each group of channels, whose numbers are a row. A
weight's gradient sums over numbers of one row, so that errors of mean and rstd stay outside there
too.

add_rms_norm, add_layer_norm: the sum is rounded to the residual's type, and then an exact input of
the norm: every chip has the same one. In a 16-bit type it is computed here bit for bit; in float32
its one rounding is part of the bound.
"""

import math
from collections.abc import Callable

import numpy as np

from anychip.conformance.arithmetic import Rounded, rsqrt
from anychip.conformance.formats import FP32, ulp
from anychip.conformance.oracles.oracle import Answer, Gradients, differentiable

Rows = tuple[int, ...]
Norm = Callable[..., Answer]


def rms(x: Rounded, weight: Rounded, *, eps: float) -> Answer:
    rstd = rsqrt((x * x).mean(-1, keepdims=True) + eps)

    def backward(grad: Rounded) -> Gradients:
        scaled = grad * weight
        projection = rstd * rstd * (scaled * x).mean(-1, keepdims=True)
        return rstd * (scaled - x * projection), _over_rows(grad * (x * rstd))

    return (x * rstd * weight, rstd[..., 0]), backward


def _layer_parts(x: Rounded, eps: float) -> tuple[Rounded, Rounded, Rounded]:
    mean = x.mean(-1, keepdims=True)
    centred = x - mean
    return mean, centred, rsqrt((centred * centred).mean(-1, keepdims=True) + eps)


def layer(x: Rounded, weight: Rounded, bias: Rounded | None, *, eps: float) -> Answer:
    mean, centred, rstd = parts = _layer_parts(x, eps)
    y = centred * rstd * weight

    def backward(grad: Rounded) -> Gradients:
        dbias = None if bias is None else _over_rows(grad)
        dx = _layer_gradient(grad * weight, x, parts)
        return dx, _over_rows(grad * (centred * rstd)), dbias

    return (y if bias is None else y + bias, mean[..., 0], rstd[..., 0]), backward


def _layer_gradient(
    scaled: Rounded, x: Rounded, parts: tuple[Rounded, Rounded, Rounded]
) -> Rounded:
    """Of rows x, from the gradient times the weight."""
    mean, centred, rstd = parts
    average = scaled.mean(-1, keepdims=True)
    own = x - mean.value  # each term's own rounding; the error of the mean follows
    shared = _error(mean) * average.value
    inner = (scaled * own).mean(-1, keepdims=True) + shared
    return rstd * (scaled - average - centred * (rstd * rstd * inner))


def _error(number: Rounded) -> Rounded:
    """Of a number, without its value."""
    return Rounded(np.zeros(number.shape), number.worst, lambda: number.spread)


def _grouped(x: Rounded, num_groups: int) -> Rounded:
    size = math.prod(x.shape[1:]) // num_groups
    return x.reshape(x.shape[0], num_groups, size)


def _by_channel(x: Rounded, values: Rounded) -> Rounded:
    return values.reshape(-1, *[1] * (len(x.shape) - 2))


def _group(
    x: Rounded, weight: Rounded, bias: Rounded | None, *, num_groups: int, eps: float
) -> Answer:
    rows = _grouped(x, num_groups)
    mean, centred, rstd = parts = _layer_parts(rows, eps)
    y = (centred * rstd).reshape(*x.shape) * _by_channel(x, weight)

    def backward(grad: Rounded) -> Gradients:
        dx = _layer_gradient(_grouped(grad * _by_channel(x, weight), num_groups), rows, parts)
        # (N, groups, channels of a group, numbers of a channel)
        shape = (x.shape[0], num_groups, x.shape[1] // num_groups, math.prod(x.shape[2:]))
        apart = grad.reshape(*shape)
        own = ((rows - mean.value) * rstd.value).reshape(*shape)
        summed = (apart * own).sum(-1)
        size = np.nan_to_num(rstd.value)  # a group without numbers has no error
        errors = _error(rstd) * np.nan_to_num(summed.value / size)
        errors = errors - _error(mean) * (size * apart.sum(-1).value)
        dweight = (summed + errors).sum(0).reshape(x.shape[1])
        dbias = None if bias is None else apart.sum((0, 3)).reshape(x.shape[1])
        return dx.reshape(*x.shape), dweight, dbias

    y = y if bias is None else y + _by_channel(x, bias)
    return (y, mean[..., 0], rstd[..., 0]), backward


def _over_rows(values: Rounded) -> Rounded:
    """Sum over all dims but the last: a weight serves every row."""
    return values.sum(tuple(range(len(values.shape) - 1)))


def _stored_sum(x: Rounded, residual: Rounded) -> Rounded:
    """x + residual in float32, rounded to nearest, ties to even, in the residual's type."""
    if residual.format == FP32:
        return x + residual
    wide = (x.value.astype(np.float32) + residual.value.astype(np.float32)).astype(np.float64)
    step = ulp(np.where(np.isfinite(wide), wide, 0.0), residual.format)
    return Rounded.exact(np.rint(wide / step) * step, residual.format)


def of_sum(norm: Norm, total: Rounded, *weights: Rounded | None, eps: float) -> Answer:
    """Of the norm of a sum, which is an output too; its gradient is that of both of its terms."""
    (y, *kept), of_norm = norm(total, *weights, eps=eps)

    def backward(grad: Rounded, dtotal: Rounded) -> Gradients:
        dnorm, *rest = of_norm(grad)
        assert dnorm is not None
        both = dtotal + dnorm
        return both, both, *rest

    return (y, total, *kept), backward


def _after_sum(norm: Norm) -> Norm:
    """Of the norm of a residual's sum."""
    return lambda x, residual, *weights, eps: of_sum(
        norm, _stored_sum(x, residual), *weights, eps=eps
    )


RMS_NORM = differentiable(rms)
LAYER_NORM = differentiable(layer)
GROUP_NORM = differentiable(_group)
ADD_RMS_NORM = differentiable(_after_sum(rms))
ADD_LAYER_NORM = differentiable(_after_sum(layer))
