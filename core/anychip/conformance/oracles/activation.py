"""Oracles of gelu, bias_gelu, swiglu and geglu: element by element.

gelu: Hendrycks and Gimpel 2016; its gradient is grad * (cdf(x) + x pdf(x)), for the tanh form the
product rule. swiglu, geglu: Shazeer 2020, equation 6; silu' = s + silu (1 - s), s = sigmoid(gate).
bias_gelu: the sum is a float32 number; the bias's gradient sums over all rows, the only reduction.
The normal distribution's cdf is (1 + erf z) / 2 or erfc(-z) / 2, z = x / sqrt 2, whichever a device
has. Near 0 the first has the smaller error, far to the left the second; the bound is the larger
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from anychip.conformance.arithmetic import ULP, Rounded, erf, exp, sigmoid, tanh
from anychip.conformance.calls import LAYOUTS, Arguments, Call, Draw, Layout, shape_label
from anychip.conformance.oracles.oracle import Oracle

_ROOT = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


def _gelu_inner(x: Rounded) -> Rounded:
    return _ROOT * (x + _CUBIC * (x * x * x))


def _cdf(x: Rounded) -> Rounded:
    by_erf = 0.5 * (1.0 + erf(x * math.sqrt(0.5)))
    by_erfc = np.abs(by_erf.value) * 2 * ULP["erfc"]
    return Rounded(
        by_erf.value, np.maximum(by_erf.worst, by_erfc), np.maximum(by_erf.spread, by_erfc)
    )


def _gelu(x: Rounded, approximate: str) -> Rounded:
    if approximate == "tanh":
        return x * 0.5 * (1.0 + tanh(_gelu_inner(x)))
    return x * _cdf(x)


def _gelu_slope(x: Rounded, approximate: str) -> Rounded:
    if approximate == "tanh":
        t = tanh(_gelu_inner(x))
        inner_slope = _ROOT * (1.0 + 3 * _CUBIC * (x * x))
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner_slope
    density = exp(-0.5 * (x * x)) * (1.0 / math.sqrt(2.0 * math.pi))
    return _cdf(x) + x * density


def _gelu_forward(x: Rounded, *, approximate: str) -> tuple[Rounded]:
    return (_gelu(x, approximate),)


def _gelu_backward(grads: tuple[Rounded], x: Rounded, *, approximate: str) -> tuple[Rounded]:
    return (grads[0] * _gelu_slope(x, approximate),)


def _bias_gelu_forward(x: Rounded, bias: Rounded, *, approximate: str) -> tuple[Rounded]:
    return (_gelu(x + bias, approximate),)


def _bias_gelu_backward(
    grads: tuple[Rounded], x: Rounded, bias: Rounded, *, approximate: str
) -> tuple[Rounded, Rounded]:
    dx = grads[0] * _gelu_slope(x + bias, approximate)
    return dx, dx.sum(tuple(range(len(dx.shape) - 1)))


def _swiglu_forward(gate: Rounded, up: Rounded) -> tuple[Rounded]:
    return (gate * sigmoid(gate) * up,)


def _swiglu_backward(grads: tuple[Rounded], gate: Rounded, up: Rounded) -> tuple[Rounded, Rounded]:
    (grad,) = grads
    s = sigmoid(gate)
    silu = gate * s
    return grad * up * (s + silu * (1.0 - s)), grad * silu


def _geglu_forward(gate: Rounded, up: Rounded, *, approximate: str) -> tuple[Rounded]:
    return (_gelu(gate, approximate) * up,)


def _geglu_backward(
    grads: tuple[Rounded], gate: Rounded, up: Rounded, *, approximate: str
) -> tuple[Rounded, Rounded]:
    (grad,) = grads
    return grad * up * _gelu_slope(gate, approximate), grad * _gelu(gate, approximate)


# Round and beside vector widths and a block of threads; then every binade that matters, and the
# range in which the functions bend.
_SHAPES: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (), (7,), (8,), (3, 5), (17,), (2, 3, 16), (255,), (1025,), (64, 130),
)  # fmt: skip


def _bend(draw: Draw) -> torch.Tensor:
    return torch.linspace(-12.0, 12.0, 4801).to(draw.dtype)


def _signed_zeros(draw: Draw) -> torch.Tensor:
    return torch.tensor([0.0, -0.0] * 9).to(draw.dtype)


def _special(draw: Draw) -> torch.Tensor:
    # Inf is not asked for: torch's own gelu(inf) is NaN on some hosts.
    x = draw.normal(40)
    x[3], x[20] = math.nan, -math.nan
    return x


def _random(draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
    return draw.normal(*shape, scale=2.0)


Make = Callable[[Draw], torch.Tensor]


def _inputs() -> Iterator[tuple[str, Make, Layout, bool, bool]]:
    """(label, x, layout, random, gradient)."""
    for shape in _SHAPES:
        yield shape_label(shape), partial(_random, shape=shape), "contiguous", True, True
    for layout in LAYOUTS:
        yield f"9x31.{layout}", partial(_random, shape=(9, 31)), layout, True, True
    yield "bend", _bend, "contiguous", True, True
    yield "wide", lambda draw: draw.wide(3000), "contiguous", True, True
    yield "subnormal", lambda d: d.normal(500, scale=d.subnormal), "contiguous", True, False
    yield "zeros", _signed_zeros, "contiguous", False, True
    yield "special", _special, "contiguous", False, False


def _each(make: Callable[..., Arguments], **attrs: str) -> Iterator[Call]:
    """A call of an operator for each of the inputs."""
    suffix = "".join(f".{form}" for form in attrs.values())
    for label, x, layout, is_random, gradient in _inputs():
        yield Call(
            f"{label}{suffix}",
            partial(make, x=x, **attrs),
            layout=layout,
            statistical=is_random,
            gradient=gradient,
        )


def _by_form(make: Callable[..., Arguments]) -> Iterator[Call]:
    for approximate in ("none", "tanh"):
        yield from _each(make, approximate=approximate)


def _gelu_arguments(draw: Draw, x: Make, approximate: str) -> Arguments:
    return (x(draw),), {"approximate": approximate}


def _swiglu_arguments(draw: Draw, x: Make) -> Arguments:
    gate = x(draw)
    return (gate, draw.normal(*gate.shape)), {}


def _geglu_arguments(draw: Draw, x: Make, approximate: str) -> Arguments:
    return _swiglu_arguments(draw, x)[0], {"approximate": approximate}


def _bias_gelu_arguments(draw: Draw, x: Make, approximate: str) -> Arguments:
    made = x(draw)
    return (made, draw.normal(made.shape[-1])), {"approximate": approximate}


def _cancelling(draw: Draw, approximate: str) -> Arguments:
    # Sums near 0 of numbers near 8: a sum that is rounded to 16 bits first has no digit left.
    bias = draw.normal(96, scale=8.0)
    return ((-bias).expand(5, 96) + draw.normal(5, 96, scale=0.05), bias), {
        "approximate": approximate
    }


def _wide_bias(draw: Draw, approximate: str) -> Arguments:
    args = (draw.normal(6, 40), draw.normal(40, dtype=torch.float32))
    return args, {"approximate": approximate}


def _bias_gelu_calls() -> Iterator[Call]:
    for approximate in ("none", "tanh"):
        for call in _each(_bias_gelu_arguments, approximate=approximate):
            if not call.label.startswith("scalar"):
                yield call
        make = partial(_cancelling, approximate=approximate)
        yield Call(f"5x96.cancel.{approximate}", make, statistical=False)
        yield Call(f"6x40.bias:fp32.{approximate}", partial(_wide_bias, approximate=approximate))


_LOWER = ("17.none", "1025.none", "17.tanh", "1025.tanh")

GELU = Oracle(
    forward=_gelu_forward,
    backward=_gelu_backward,
    calls=partial(_by_form, _gelu_arguments),
    lower_precision=_LOWER,
)
SWIGLU = Oracle(
    forward=_swiglu_forward,
    backward=_swiglu_backward,
    calls=partial(_each, _swiglu_arguments),
    lower_precision=("17", "1025"),
)
BIAS_GELU = Oracle(
    forward=_bias_gelu_forward,
    backward=_bias_gelu_backward,
    calls=_bias_gelu_calls,
    lower_precision=_LOWER,
)
GEGLU = Oracle(
    forward=_geglu_forward,
    backward=_geglu_backward,
    calls=partial(_by_form, _geglu_arguments),
    lower_precision=_LOWER,
)
