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

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from anychip.conformance.arithmetic import Rounded, rsqrt
from anychip.conformance.calls import Arguments, Call, Draw, changed, special
from anychip.conformance.formats import FP32, ulp
from anychip.conformance.labels import Labels
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
    return Rounded(np.zeros(number.shape), number.worst, number.spread)


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


# Shapes: empty; one element; round and beside powers of two and vector widths (4, 8, 16, 64); more
# rows than a block has threads; a hidden size of real models.
_SHAPES = """0x8 1x1 1 2x3 4x8 3x17 2x3x33 5x64 3x127 3x257 130x48 4x1000 3x4096 3x0
    4x40.eps:0 4x40.eps:1e-12 4x40.eps:0.5"""
LABELS = Labels({
    "weight:fp32": {"dtype": torch.float32}, "residual:fp32": {"residual": torch.float32},
    "bias:none": {"bias": None},
})  # fmt: skip


def _normal(draw: Draw, shape: Rows, *, scale: float | str = 1.0, **options: Any) -> Arguments:
    return _with_weight(draw, draw.normal(*shape, scale=scale), **options)


def _with_weight(
    draw: Draw,
    x: torch.Tensor,
    *,
    bias: bool | None,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> Arguments:
    """bias: False: the norm has none; None: it is left out."""
    weight = draw.normal(x.shape[-1], dtype=dtype)
    rest = () if bias is False else (draw.normal(x.shape[-1], dtype=dtype) if bias else None,)
    return (x, weight, *rest), {"eps": eps}


def _shifted(draw: Draw, *, bias: bool) -> Arguments:
    # A mean of 100 standard deviations: what E[x^2] - E[x]^2 does not survive.
    return _with_weight(draw, (draw.normal(6, 96).float() + 100.0).to(draw.dtype), bias=bias)


def _spotlight(draw: Draw, *, bias: bool) -> Arguments:
    # One element per row carries everything, each at another place: nobody may drop its own.
    return _with_weight(draw, torch.eye(67, dtype=draw.dtype) * 2.5, bias=bias)


def _two_dtypes(draw: Draw, wide: str, *, residual: bool = False) -> Arguments:
    # Weight and bias in two dtypes: read as if of one, the wider one loses its digits.
    dtypes = (torch.float32, torch.bfloat16)
    weight, bias = dtypes if wide == "weight" else reversed(dtypes)
    x, *weights = draw.normal(6, 96), draw.normal(96, dtype=weight), draw.normal(96, dtype=bias)
    return (x, *([draw.normal(6, 96)] if residual else []), *weights), {"eps": 1e-5}


def _of_two_dtypes(*, residual: bool) -> Iterator[Call]:
    for wide in ("weight", "bias"):
        # backward is told the weight's dtype, not the bias's: its gradient has those digits.
        make = partial(_two_dtypes, wide=wide, residual=residual)
        yield Call(f"6x96.{wide}-wider", make, gradient=wide == "weight")


def _calls(*, bias: bool) -> Iterator[Call]:
    make = partial(_normal, bias=bias)
    yield from LABELS(make, _SHAPES)
    zeros = changed(partial(make, shape=(4, 40)), (0, 1, 0.0), (0, 2, 3.0))
    yield Call("4x40.zeros", zeros, statistical=False)
    yield Call("67x67.spotlight", partial(_spotlight, bias=bias), statistical=False)
    yield from LABELS(make, "6x96.huge 6x96.tiny")
    yield from LABELS(make, "6x96.subnormal", gradient=False)
    yield Call("6x96.shifted", partial(_shifted, bias=bias), statistical=False)
    yield from LABELS(make, "6x96.weight:fp32")
    for value in ("nan", "inf"):
        yield special(f"5x24.{value}", partial(make, shape=(5, 24)), (0, (2, 7), float(value)))
    if bias:
        yield from LABELS(make, "4x40.bias:none")
        yield from _of_two_dtypes(residual=False)


# Groups of one channel and of all, channels of one number; one group's numbers as in _SHAPES.
_GROUPS = """0x4x3.2 1x1.1 2x3.3 3x6.2 2x4x17.4 2x6x5x7.3 1x8x33.1 5x4x2x3x4.2 2x64x9x8.8 1x3x4096.3
    70x4x12.2 2x4x0.2 3x6x40.2.eps:0.5 3x6x40.2.bias:none 3x6x40.2.weight:fp32
    3x6x32.2.huge 3x6x32.2.tiny"""


def _in_groups(
    draw: Draw, shape: Rows, num_groups: int, *, scale: float | str = 1.0, **options: Any
) -> Arguments:
    return _with_channels(draw, draw.normal(*shape, scale=scale), num_groups, **options)


def _with_channels(
    draw: Draw,
    x: torch.Tensor,
    num_groups: int,
    *,
    bias: bool | None = True,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> Arguments:
    weight = draw.normal(x.shape[1], dtype=dtype)
    last = draw.normal(x.shape[1], dtype=dtype) if bias else None
    return (x, weight, last), {"num_groups": num_groups, "eps": eps}


def _group_shifted(draw: Draw) -> Arguments:
    return _with_channels(draw, (draw.normal(3, 6, 32).float() + 100.0).to(draw.dtype), 2)


def _group_calls() -> Iterator[Call]:
    yield from Labels(LABELS.words, {r"(\d+)": ("num_groups",)})(_in_groups, _GROUPS)
    yield Call("3x6x32.2.shifted", _group_shifted, statistical=False)
    for value in ("nan", "inf"):
        make = partial(_in_groups, shape=(3, 6, 5), num_groups=3)
        yield special(f"3x6x5.3.{value}", make, (0, (1, 2, 3), float(value)))


# One shape less of each kind: the norm itself is what the calls above are for.
ADD_SHAPES = "0x8 1x1 1 4x8 3x17 2x3x33 5x64 70x48 4x1000 3x0"


def _with_residual(
    draw: Draw, x: torch.Tensor, residual: torch.Tensor, **options: Any
) -> Arguments:
    (_, *weights), attrs = _with_weight(draw, x, **options)
    return (x, residual, *weights), attrs


def _add_normal(
    draw: Draw,
    shape: Rows,
    *,
    residual: torch.dtype | None = None,
    scale: float | str = 1.0,
    **options: Any,
) -> Arguments:
    x, stream = draw.normal(*shape, scale=scale), draw.normal(*shape, scale=scale, dtype=residual)
    return _with_residual(draw, x, stream, **options)


def _add_large(draw: Draw, *, bias: bool) -> Arguments:
    # The stream is 50 times what is added: in 16 bits the rounding of the sum shows in y.
    return _with_residual(draw, draw.normal(6, 96), draw.normal(6, 96, scale=50.0), bias=bias)


def _add_cancelling(draw: Draw, *, bias: bool) -> Arguments:
    # Sums of 0 but for a few: eps decides, and a sum that is not rounded the same way is far off.
    x = draw.normal(5, 40)
    stream = -x
    stream[:, ::7] += 0.25
    stream[2] = -x[2]
    return _with_residual(draw, x, stream, bias=bias)


def _add_calls(*, bias: bool) -> Iterator[Call]:
    make = partial(_add_normal, bias=bias)
    yield from LABELS(make, f"{ADD_SHAPES} 4x40.eps:0.5 6x96.residual:fp32")
    yield from LABELS(make, "6x96.huge 6x96.tiny")
    yield Call("6x96.large", partial(_add_large, bias=bias))
    yield Call("5x40.cancel", partial(_add_cancelling, bias=bias), statistical=False)
    for value in ("nan", "inf"):
        both = ((0, (2, 7), float(value)), (1, (4, 0), float(value)))
        yield special(f"5x24.{value}", partial(make, shape=(5, 24)), *both)
    if bias:
        yield from LABELS(make, "4x40.bias:none")
        yield from _of_two_dtypes(residual=True)


_LOWER = ("4x8", "3x17", "5x64", "4x1000")

RMS_NORM = differentiable(rms, partial(_calls, bias=False), *_LOWER, "3x4096")
LAYER_NORM = differentiable(layer, partial(_calls, bias=True), *_LOWER, "3x4096")
GROUP_NORM = differentiable(
    _group, _group_calls, "2x4x17.4", "2x6x5x7.3", "2x64x9x8.8", "1x3x4096.3"
)
ADD_RMS_NORM = differentiable(_after_sum(rms), partial(_add_calls, bias=False), *_LOWER)
ADD_LAYER_NORM = differentiable(_after_sum(layer), partial(_add_calls, bias=True), *_LOWER)
