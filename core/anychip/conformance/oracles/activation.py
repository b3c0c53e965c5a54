"""Oracles of activations: of one tensor, of a sum with a bias, and gated; element by element.

gelu: Hendrycks and Gimpel 2016; its gradient is grad * (cdf(x) + x pdf(x)), for the tanh form the
product rule. swiglu, geglu: Shazeer 2020, equation 6.
bias_gelu: the sum is a float32 number; the bias's gradient sums over all rows, the only reduction.
The normal distribution's cdf is (1 + erf z) / 2 or erfc(-z) / 2, z = x / sqrt 2, whichever a device
has. Near 0 the first has the smaller error, far to the left the second; the bound is the larger
one. The derivatives of sigmoid and tanh are s (1 - s) and 1 - t^2, silu' = s + silu (1 - s), that
of softplus is sigmoid(beta x); relu and its square only select and multiply.
"""

import math
from collections.abc import Callable

import numpy as np

from anychip.conformance.arithmetic import ULP, Rounded, erf, exp, log1p, sigmoid, tanh, where
from anychip.conformance.oracles.oracle import Answer, Gradients, Oracle, differentiable

_ROOT = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


def _gelu_inner(x: Rounded) -> Rounded:
    return _ROOT * (x + _CUBIC * (x * x * x))


def _cdf(x: Rounded) -> Rounded:
    by_erf = 0.5 * (1.0 + erf(x * math.sqrt(0.5)))
    by_erfc = np.abs(by_erf.value) * 2 * ULP["erfc"]
    return Rounded(
        by_erf.value,
        np.maximum(by_erf.worst, by_erfc),
        lambda: np.maximum(by_erf.spread, by_erfc),
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


def _unary(value: Callable[..., Rounded], gradient: Callable[..., Rounded]) -> Oracle:
    """Of ``y = value(x)`` and ``dx = gradient(grad, x)``."""
    return Oracle(
        forward=lambda x, **attrs: (value(x, **attrs),),
        backward=lambda grads, x, **attrs: (gradient(grads[0], x, **attrs),),
    )


GELU = _unary(_gelu, lambda grad, x, approximate: grad * _gelu_slope(x, approximate))
SILU = _unary(lambda x: x * sigmoid(x), lambda grad, x: grad * _silu_slope(x))
RELU = _unary(lambda x: _positive(x, x), lambda grad, x: _positive(x, grad))
RELU2 = _unary(lambda x: _positive(x, x * x), lambda grad, x: _positive(x, 2.0 * x * grad))
SIGMOID = _unary(sigmoid, lambda grad, x: grad * _sigmoid_slope(x))
TANH = _unary(tanh, lambda grad, x: grad * _tanh_slope(x))
SOFTPLUS = _unary(_softplus, _softplus_gradient)
SWIGLU = differentiable(_swiglu)
BIAS_GELU = differentiable(_bias_gelu)
GEGLU = differentiable(_geglu)
