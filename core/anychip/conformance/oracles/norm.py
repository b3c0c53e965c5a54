"""Oracles of rms_norm and layer_norm.

rms_norm: Zhang and Sennrich 2019, equation 4. layer_norm: Ba, Kiros and Hinton 2016, equation 4,
with the variance as the mean of squared differences: the textbook form E[x^2] - E[x]^2 loses all
digits for inputs far from 0 and is outside the bound. The gradients by the chain rule, with
a = grad * weight and c = x - mean:

    rms_norm:   dx = rstd (a - x rstd^2 mean(a x))
    layer_norm: dx = rstd (a - mean(a) - c rstd^2 mean(a c))

The mean and rstd of a row are errors that the whole row shares. rstd stays outside of every sum;
the mean's error m enters mean(a c) as -m mean(a), which is added as such.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from anychip.conformance.arithmetic import Rounded, rsqrt
from anychip.conformance.calls import LAYOUTS, Arguments, Call, Draw, shape_label
from anychip.conformance.oracles.oracle import Oracle

Rows = tuple[int, ...]


def _rms_rstd(x: Rounded, eps: float) -> Rounded:
    return rsqrt((x * x).mean(-1, keepdims=True) + eps)


def _rms_forward(x: Rounded, weight: Rounded, *, eps: float) -> tuple[Rounded, ...]:
    rstd = _rms_rstd(x, eps)
    return x * rstd * weight, rstd[..., 0]


def _rms_backward(
    grads: tuple[Rounded], x: Rounded, weight: Rounded, *, eps: float
) -> tuple[Rounded, ...]:
    (grad,) = grads
    rstd = _rms_rstd(x, eps)
    scaled = grad * weight
    projection = rstd * rstd * (scaled * x).mean(-1, keepdims=True)
    dx = rstd * (scaled - x * projection)
    return dx, _over_rows(grad * (x * rstd))


def _layer_parts(x: Rounded, eps: float) -> tuple[Rounded, Rounded, Rounded]:
    mean = x.mean(-1, keepdims=True)
    centred = x - mean
    return mean, centred, rsqrt((centred * centred).mean(-1, keepdims=True) + eps)


def _layer_forward(
    x: Rounded, weight: Rounded, bias: Rounded | None, *, eps: float
) -> tuple[Rounded, ...]:
    mean, centred, rstd = _layer_parts(x, eps)
    y = centred * rstd * weight
    return (y if bias is None else y + bias), mean[..., 0], rstd[..., 0]


def _layer_backward(
    grads: tuple[Rounded], x: Rounded, weight: Rounded, bias: Rounded | None, *, eps: float
) -> tuple[Rounded | None, ...]:
    (grad,) = grads
    mean, centred, rstd = _layer_parts(x, eps)
    scaled = grad * weight
    average = scaled.mean(-1, keepdims=True)
    own = x - mean.value  # each term's own rounding; the error of the mean follows
    shared = Rounded(0.0 * mean.value, mean.worst, mean.spread) * average.value
    inner = (scaled * own).mean(-1, keepdims=True) + shared
    dx = rstd * (scaled - average - centred * (rstd * rstd * inner))
    dbias = None if bias is None else _over_rows(grad)
    return dx, _over_rows(grad * (centred * rstd)), dbias


def _over_rows(values: Rounded) -> Rounded:
    """Sum over all dims but the last: a weight serves every row."""
    return values.reshape(-1, values.shape[-1]).sum(0)


# Shapes: empty; one element; round and beside powers of two and vector widths (4, 8, 16, 64); more
# rows than a block has threads; a hidden size of real models.
_SHAPES: tuple[Rows, ...] = (
    (0, 8), (1, 1), (1,), (2, 3), (4, 8), (3, 17), (2, 3, 33), (5, 64), (3, 127), (3, 257),
    (130, 48), (4, 1000), (3, 4096),
)  # fmt: skip
_HIDDEN = sorted(
    {*range(1, 129), *(2**k + d for k in range(8, 13) for d in (-1, 0, 1)), 1536, 3000}
)


def _normal(draw: Draw, shape: Rows, *, bias: bool, eps: float = 1e-5) -> Arguments:
    return _with_weight(draw, draw.normal(*shape), bias=bias, eps=eps)


def _with_weight(
    draw: Draw, x: torch.Tensor, *, bias: bool, eps: float = 1e-5, dtype: torch.dtype | None = None
) -> Arguments:
    args = (x, draw.normal(x.shape[-1], dtype=dtype))
    rest = (draw.normal(x.shape[-1], dtype=dtype),) if bias else ()
    return (*args, *rest), {"eps": eps}


def _scaled(draw: Draw, name: str, *, bias: bool) -> Arguments:
    scale = float(getattr(draw, name))
    return _with_weight(draw, draw.normal(6, 96, scale=scale), bias=bias)


def _shifted(draw: Draw, *, bias: bool) -> Arguments:
    # A mean of 100 standard deviations: what E[x^2] - E[x]^2 does not survive.
    return _with_weight(draw, (draw.normal(6, 96).float() + 100.0).to(draw.dtype), bias=bias)


def _zeros(draw: Draw, *, bias: bool) -> Arguments:
    x = draw.normal(4, 40)
    x[1] = 0.0
    x[2] = 3.0
    return _with_weight(draw, x, bias=bias)


def _spotlight(draw: Draw, *, bias: bool) -> Arguments:
    # One element per row carries everything, each at another place: nobody may drop its own.
    return _with_weight(draw, torch.eye(67, dtype=draw.dtype) * 2.5, bias=bias)


def _special(draw: Draw, value: float, *, bias: bool) -> Arguments:
    x = draw.normal(5, 24)
    x[2, 7] = value
    return _with_weight(draw, x, bias=bias)


def _calls(*, bias: bool) -> Iterator[Call]:
    for shape in _SHAPES:
        yield Call(label=shape_label(shape), make=partial(_normal, shape=shape, bias=bias))
    for layout in LAYOUTS:
        make = partial(_normal, shape=(5, 6, 50), bias=bias)
        yield Call(label=f"5x6x50.{layout}", make=make, layout=layout)
    for eps in (1e-12, 0.5):
        make = partial(_normal, shape=(4, 40), bias=bias, eps=eps)
        yield Call(label=f"4x40.eps:{eps:g}", make=make)
    yield Call(label="4x40.zeros", make=partial(_zeros, bias=bias), statistical=False)
    yield Call(label="67x67.spotlight", make=partial(_spotlight, bias=bias), statistical=False)
    for name in ("huge", "tiny", "subnormal"):
        make = partial(_scaled, name=name, bias=bias)
        yield Call(label=f"6x96.{name}", make=make, gradient=name != "subnormal")
    yield Call(label="6x96.shifted", make=partial(_shifted, bias=bias), statistical=False)
    yield Call(
        label="6x96.weight:fp32",
        make=lambda draw: _with_weight(draw, draw.normal(6, 96), bias=bias, dtype=torch.float32),
    )
    for value in ("nan", "inf"):
        make = partial(_special, value=float(value), bias=bias)
        yield Call(label=f"5x24.{value}", make=make, statistical=False, gradient=False)
    if bias:
        yield Call(
            label="4x40.bias:none",
            make=lambda draw: ((draw.normal(4, 40), draw.normal(40), None), {"eps": 1e-5}),
        )
    for hidden in _HIDDEN:
        make = partial(_normal, shape=(3, hidden), bias=bias)
        yield Call(label=f"3x{hidden}.sweep", make=make, full=True)


_LOWER = ("4x8", "3x17", "5x64", "4x1000", "3x4096")

RMS_NORM = Oracle(
    forward=_rms_forward,
    backward=_rms_backward,
    calls=partial(_calls, bias=False),
    lower_precision=_LOWER,
)
LAYER_NORM = Oracle(
    forward=_layer_forward,
    backward=_layer_backward,
    calls=partial(_calls, bias=True),
    lower_precision=_LOWER,
)
