"""Oracles of activations: of one tensor, of a sum with a bias, and gated; element by element.

gelu: Hendrycks and Gimpel 2016; its gradient is grad * (cdf(x) + x pdf(x)), for the tanh form the
product rule. swiglu, geglu: Shazeer 2020, equation 6.
bias_gelu: the sum is a float32 number; the bias's gradient sums over all rows, the only reduction.
The normal distribution's cdf is (1 + erf z) / 2 or erfc(-z) / 2, z = x / sqrt 2, whichever a device
has. Near 0 the first has the smaller error, far to the left the second; the bound is the larger
one. The derivatives of sigmoid and tanh are s (1 - s) and 1 - t^2, silu' = s + silu (1 - s), that
of softplus is sigmoid(beta x); relu and its square only select and multiply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from anychip.conformance.arithmetic import ULP, Rounded, erf, exp, log1p, sigmoid, tanh, where
from anychip.conformance.calls import Arguments, Call, Draw, shape_label
from anychip.conformance.oracles.oracle import Answer, Gradients, Oracle, differentiable

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


def _silu_slope(x: Rounded) -> Rounded:
    s = sigmoid(x)
    return s + x * s * (1.0 - s)


def _positive(x: Rounded, number: Rounded) -> Rounded:
    """The number, where x is not above 0 exactly 0; of NaN it stays NaN."""
    return where(x.value <= 0.0, 0.0, number)


def _sigmoid_slope(x: Rounded) -> Rounded:
    s = sigmoid(x)
    return s * (1.0 - s)


def _tanh_slope(x: Rounded) -> Rounded:
    t = tanh(x)
    return 1.0 - t * t


def _softplus(x: Rounded, beta: float, threshold: float) -> Rounded:
    is_linear = (x * beta).value > threshold
    return where(is_linear, x, log1p(exp(where(is_linear, 0.0, x * beta))) / beta)


def _softplus_gradient(grad: Rounded, x: Rounded, beta: float, threshold: float) -> Rounded:
    scaled = x * beta
    return where(scaled.value > threshold, grad, grad * sigmoid(scaled))


def _bias_gelu(x: Rounded, bias: Rounded, *, approximate: str) -> Answer:
    def backward(grad: Rounded) -> Gradients:
        dx = grad * _gelu_slope(x + bias, approximate)
        return dx, dx.sum(tuple(range(len(dx.shape) - 1)))

    return (_gelu(x + bias, approximate),), backward


def _swiglu(gate: Rounded, up: Rounded) -> Answer:
    def backward(grad: Rounded) -> Gradients:
        return grad * up * _silu_slope(gate), grad * (gate * sigmoid(gate))

    return (gate * sigmoid(gate) * up,), backward


def _geglu(gate: Rounded, up: Rounded, *, approximate: str) -> Answer:
    def backward(grad: Rounded) -> Gradients:
        return grad * up * _gelu_slope(gate, approximate), grad * _gelu(gate, approximate)

    return (_gelu(gate, approximate) * up,), backward


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


def _inputs() -> Iterator[tuple[str, Make, bool, bool]]:
    """(label, x, random, gradient)."""
    for shape in _SHAPES:
        yield shape_label(shape), partial(_random, shape=shape), True, True
    yield "bend", _bend, True, True
    yield "wide", lambda draw: draw.wide(3000), True, True
    yield "subnormal", lambda d: d.normal(500, scale="subnormal"), True, False
    yield "zeros", _signed_zeros, False, True
    yield "special", _special, False, False


GELU_FORMS: Mapping[str, Mapping[str, Any]] = {
    form: {"approximate": form} for form in ("none", "tanh")
}
# A product with a power of two is exact, and so is the comparison. Beyond 20 the two branches
# differ by less than a rounding.
SOFTPLUS_FORMS: Mapping[str, Mapping[str, Any]] = {
    "beta:1": {"beta": 1.0, "threshold": 20.0},
    "beta:2.threshold:1": {"beta": 2.0, "threshold": 1.0},
    "beta:0.3": {"beta": 0.3, "threshold": 20.0},
    "threshold:200": {"beta": 16.0, "threshold": 200.0},
}


def _each(make: Callable[..., Arguments], suffix: str = "", **attrs: Any) -> Iterator[Call]:
    """A call of an operator for each of the inputs."""
    for label, x, is_random, gradient in _inputs():
        yield Call(
            f"{label}{suffix}",
            partial(make, x=x, **attrs),
            statistical=is_random,
            gradient=gradient,
        )


def _by_form(make: Callable[..., Arguments]) -> Iterator[Call]:
    for label, attrs in GELU_FORMS.items():
        yield from _each(make, f".{label}", **attrs)


def _one_argument(draw: Draw, x: Make, **attrs: Any) -> Arguments:
    return (x(draw),), attrs


def _infinite(draw: Draw) -> torch.Tensor:
    return torch.tensor([math.inf, 1.5, -math.inf, -2.0, 0.0, math.nan] * 3).to(draw.dtype)


def _limit(**attrs: Any) -> Call:
    """Of functions whose limits every formula gives."""
    make = partial(_one_argument, x=_infinite, **attrs)
    return Call("infinite", make, statistical=False, gradient=False)


def _limited_calls() -> Iterator[Call]:
    yield from _each(_one_argument)
    yield _limit()


def _softplus_calls() -> Iterator[Call]:
    for form, attrs in SOFTPLUS_FORMS.items():
        for call in _each(_one_argument, f".{form}", **attrs):
            # Of all numbers next to 0 it is log(2) / beta: one rounding, many times.
            is_sample = call.statistical and not call.label.startswith("subnormal")
            if form == "beta:1" or call.label.startswith(("17.", "bend", "wide")):
                yield replace(call, statistical=is_sample)
    yield _limit(**SOFTPLUS_FORMS["beta:1"])


def _gated(draw: Draw, x: Make, **attrs: Any) -> Arguments:
    gate = x(draw)
    return (gate, draw.normal(*gate.shape)), attrs


def _bias_gelu_arguments(draw: Draw, x: Make, **attrs: Any) -> Arguments:
    made = x(draw)
    return (made, draw.normal(made.shape[-1])), attrs


def _cancelling(draw: Draw, **attrs: Any) -> Arguments:
    # Sums near 0 of numbers near 8: a sum that is rounded to 16 bits first has no digit left.
    bias = draw.normal(96, scale=8.0)
    return ((-bias).expand(5, 96) + draw.normal(5, 96, scale=0.05), bias), attrs


def _wide_bias(draw: Draw, **attrs: Any) -> Arguments:
    return (draw.normal(6, 40), draw.normal(40, dtype=torch.float32)), attrs


def _bias_gelu_calls() -> Iterator[Call]:
    for approximate in ("none", "tanh"):
        for call in _each(_bias_gelu_arguments, f".{approximate}", approximate=approximate):
            if not call.label.startswith("scalar"):
                yield call
        make = partial(_cancelling, approximate=approximate)
        yield Call(f"5x96.cancel.{approximate}", make, statistical=False)
        yield Call(f"6x40.bias:fp32.{approximate}", partial(_wide_bias, approximate=approximate))


def _unary(
    value: Callable[..., Rounded],
    gradient: Callable[..., Rounded],
    calls: Callable[[], Iterator[Call]],
    *lower: str,
) -> Oracle:
    """Of ``y = value(x)`` and ``dx = gradient(grad, x)``."""
    return Oracle(
        forward=lambda x, **attrs: (value(x, **attrs),),
        backward=lambda grads, x, **attrs: (gradient(grads[0], x, **attrs),),
        calls=calls,
        lower_precision=lower,
    )


_LOWER, _BY_FORM = ("17", "1025"), ("17.none", "1025.none", "17.tanh", "1025.tanh")
GELU = _unary(
    _gelu,
    lambda grad, x, approximate: grad * _gelu_slope(x, approximate),
    partial(_by_form, _one_argument),
    *_BY_FORM,
)
SILU = _unary(
    lambda x: x * sigmoid(x),
    lambda grad, x: grad * _silu_slope(x),
    partial(_each, _one_argument),
    *_LOWER,
)
RELU = _unary(
    lambda x: _positive(x, x), lambda grad, x: _positive(x, grad), _limited_calls, *_LOWER
)
RELU2 = _unary(
    lambda x: _positive(x, x * x),
    lambda grad, x: _positive(x, 2.0 * x * grad),
    _limited_calls,
    *_LOWER,
)
SIGMOID = _unary(sigmoid, lambda grad, x: grad * _sigmoid_slope(x), _limited_calls, *_LOWER)
TANH = _unary(tanh, lambda grad, x: grad * _tanh_slope(x), _limited_calls, *_LOWER)
SOFTPLUS = _unary(_softplus, _softplus_gradient, _softplus_calls, "17.beta:1", "1025.beta:1")
SWIGLU = differentiable(_swiglu, partial(_each, _gated), *_LOWER)
BIAS_GELU = differentiable(_bias_gelu, _bias_gelu_calls, *_BY_FORM)
GEGLU = differentiable(_geglu, partial(_by_form, _gated), *_BY_FORM)
