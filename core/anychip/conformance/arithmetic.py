"""How far off may a float32 computation be? Numbers that carry the answer along.

A :class:`Rounded` is a float64 array with two error bounds of the float32 computation that the
operator's specification describes. An oracle writes the equation once; the bounds follow from it.

Note: The error model
    Every operation in float32 returns ``v (1 + d)`` with ``|d| <= c u``, ``u = 2^-24``: c is 1 for
    ``+ - *``, and the ULP of the OpenCL table (below) times 2 for a function, since an ULP is at
    most ``2 u |v|``. A device may flush a result below 2^-126 to zero. Errors of the arguments pass
    on by the derivative (running error analysis: Wilkinson 1963; Higham, Accuracy and Stability,
    2nd ed., section 3.3). Both bounds are in units of u and leave out terms of order u^2, for which
    the limits have room; but of a square, which may be of 0 and an error.

    ``worst`` adds the sizes up: no order of the operations and no data can exceed it. A sum of n
    terms t has at most n roundings of at most sum |t| each, in any order (Higham, section 4.2).

    ``spread`` is the root of the sum of squares of the same sizes: each rounding as an independent
    error of mean 0 (Higham and Mary 2019, SIAM J. Sci. Comput. 41:A2815). For a sum in an order
    that does not depend on the data the mean square of the partial sums is below S^2 + sum t^2,
    where S is the result: n roundings give ``sqrt(n (S^2 + sum t^2))``. This is the bound that
    tells a product of 10-bit factors from one of 24 bits at every length; ``n sum |t|`` does so at
    short ones only. It presumes random inputs, and that no error is shared by many terms of a sum:
    oracles keep factors that a whole row shares outside of sums.

    u belongs to the accumulator, float32, whatever the type of the tensors is. The rounding of a
    result to its own type is not in here: :mod:`.bounds` adds it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anychip.conformance.formats import FP32, Array, Format

UNIT = FP32.unit
"""u: unit roundoff of float32, in which operators accumulate."""
SMALLEST_NORMAL = 2.0**-126
FLUSH = SMALLEST_NORMAL / UNIT
"""What flushing one float32 result to zero costs, in units of u."""

# Worst errors in ULP, single precision: OpenCL C specification 3.0, "Relative error as ULPs".
ULP = {
    "divide": 2.5,
    "exp": 3.0,
    "log": 3.0,
    "log1p": 2.0,
    "sqrt": 3.0,
    "rsqrt": 2.0,
    "tanh": 5.0,
    "erf": 16.0,
    "erfc": 16.0,
    "pow": 16.0,
}


Later = Array | Callable[[], Array]
"""An array, or what makes it when it is asked for."""


class Rounded:
    """A float64 array, and how far a float32 computation of it may be off.

    Attributes:
        value: what the equation gives.
        worst: no error is larger, in units of u.
        format: for an argument, its own type.
    """

    __slots__ = ("_spread", "format", "value", "worst")

    def __init__(self, value: Array, worst: Array, spread: Later, format: Format = FP32) -> None:
        self.value, self.worst, self._spread, self.format = value, worst, spread, format

    @property
    def spread(self) -> Array:
        """Errors are of this size or smaller in the mean square (times 1/3), in units of u.

        Computed when it is asked for: most calls' inputs are not random, and it costs most.
        """
        if callable(self._spread):
            self._spread = self._spread()
        return self._spread

    # numpy must leave `array + rounded` to us.
    __array_ufunc__ = None

    @classmethod
    def exact(cls, value: Any, format: Format = FP32) -> Rounded:
        """A number that the computation is given; only a flushed subnormal one has an error."""
        array = np.asarray(value, dtype=np.float64)
        size = np.abs(array)
        small, flushed = size < SMALLEST_NORMAL, np.zeros(())
        if small.any() and size[small].any():
            flushed = np.where(small, size / UNIT, 0.0)
        return cls(array, flushed, flushed, format)

    @classmethod
    def constant(cls, value: float) -> Rounded:
        """A number that has to be rounded to float32 before it is used."""
        if not math.isfinite(value) or float(np.float32(value)) == value:
            return cls.exact(value)
        return _rounded(np.float64(value), np.float64(0.0), lambda: np.float64(0.0))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def __add__(self, other: Rounded | Array | float) -> Rounded:
        b = as_rounded(other)
        return _rounded(
            self.value + b.value, self.worst + b.worst, lambda: root(self.spread, b.spread)
        )

    def __neg__(self) -> Rounded:
        return Rounded(-self.value, self.worst, lambda: self.spread, self.format)

    def __sub__(self, other: Rounded | Array | float) -> Rounded:
        return self + -as_rounded(other)

    def __rsub__(self, other: Array | float) -> Rounded:
        return as_rounded(other) - self

    def __mul__(self, other: Rounded | Array | float) -> Rounded:
        b = as_rounded(other)
        x, y = np.abs(self.value), np.abs(b.value)
        return _rounded(
            self.value * b.value,
            x * b.worst + (y + UNIT * b.worst) * self.worst,
            lambda: root(x * b.spread, y * self.spread),
        )

    def __truediv__(self, other: Rounded | Array | float) -> Rounded:
        b = as_rounded(other)
        value = self.value / b.value
        x, y = np.abs(value), np.abs(b.value)
        return _rounded(
            value,
            (self.worst + x * b.worst) / y,
            lambda: root(self.spread, x * b.spread) / y,
            2 * ULP["divide"],
        )

    __radd__ = __add__
    __rmul__ = __mul__

    def __rtruediv__(self, other: Array | float) -> Rounded:
        return as_rounded(other) / self

    def __getitem__(self, index: Any) -> Rounded:
        return self.shaped(lambda array: array[index])

    def shaped(self, change: Callable[[Array], Array]) -> Rounded:
        """A change of shape, order or selection, which has no rounding, of all three arrays."""

        def changed(name: str) -> Array:
            return change(_whole(self, name))

        return Rounded(change(self.value), changed("worst"), lambda: changed("spread"), self.format)

    def reshape(self, *shape: int) -> Rounded:
        return self.shaped(lambda array: array.reshape(shape))

    def transpose(self, *axes: int) -> Rounded:
        return self.shaped(lambda array: array.transpose(axes))

    def sum(self, axis: int | tuple[int, ...], *, keepdims: bool = False) -> Rounded:
        """Sum in any order; in an order that does not depend on the data for ``spread``."""
        axes = (axis,) if isinstance(axis, int) else axis
        count = math.prod(self.value.shape[a] for a in axes)

        def total(array: Array) -> Array:
            return np.asarray(np.sum(array, axis=axes, keepdims=keepdims))

        value = total(self.value)
        worst = total(_whole(self, "worst")) + count * (total(np.abs(self.value)) + FLUSH)

        def spread() -> Array:
            own = count * (value**2 + total(self.value**2) + FLUSH**2)
            return np.asarray(np.sqrt(total(_whole(self, "spread") ** 2) + own))

        return Rounded(value, worst, spread)

    def mean(self, axis: int, *, keepdims: bool = False) -> Rounded:
        """Sum over the number of terms."""
        return self.sum(axis, keepdims=keepdims) / float(self.value.shape[axis])

    def stored(self, format: Format) -> Rounded:
        """Rounded once to ``format``, in which a computation may keep it for a while."""
        if format.digits >= FP32.digits:
            return self
        size = (np.abs(self.value) * format.unit + format.smallest / 2) / UNIT
        return Rounded(self.value, self.worst + size, lambda: root(self.spread, size))


def _rounded(value: Any, worst: Any, spread: Callable[[], Any], c: float = 1.0) -> Rounded:
    """A result with one more rounding of c u."""
    size = (np.abs(value) if c == 1.0 else c * np.abs(value)) + FLUSH
    # An infinite result is not rounded: exp(-inf), a masked score, is exactly 0.
    infinite = np.isinf(value)
    if infinite.any():
        size = np.where(infinite, 0.0, size)
    return Rounded(value, worst + size, lambda: root(spread(), size))


def as_rounded(number: Rounded | Array | float) -> Rounded:
    """The number itself, an array as it is given, a constant rounded to float32."""
    if isinstance(number, Rounded):
        return number
    return Rounded.exact(number) if isinstance(number, np.ndarray) else Rounded.constant(number)


def where(condition: NDArray[np.bool_], a: Rounded | float, b: Rounded | float) -> Rounded:
    """Selection, without a rounding."""
    a, b = as_rounded(a), as_rounded(b)
    return Rounded(
        np.where(condition, a.value, b.value),
        np.where(condition, a.worst, b.worst),
        lambda: np.where(condition, a.spread, b.spread),
    )


def concatenate(parts: Sequence[Rounded], axis: int) -> Rounded:
    """Parts joined along an axis, without a rounding."""

    def of(name: str) -> Array:
        return np.concatenate([_whole(part, name) for part in parts], axis)

    return Rounded(of("value"), of("worst"), lambda: of("spread"))


def joined(tensors: Sequence[Rounded]) -> Rounded:
    """The elements of all tensors, flat."""
    return concatenate([t.reshape(-1) for t in tensors], 0)


def parts(whole: Rounded, like: Sequence[Rounded]) -> list[Rounded]:
    """Of what :func:`joined` made, the tensors."""
    ends = itertools.pairwise([0, *itertools.accumulate(t.value.size for t in like)])
    return [
        whole.shaped(lambda array, a=a, b=b, t=t: array[a:b].reshape(t.shape))  # type: ignore[misc]
        for (a, b), t in zip(ends, like, strict=True)
    ]


def matmul(a: Rounded, b: Rounded) -> Rounded:
    """``a @ b``: per entry a sum of n products, each rounded, in any order."""
    count = a.value.shape[-1]
    value = a.value @ b.value
    x, y = np.abs(a.value), np.abs(b.value)
    worst = (count + 1) * (x @ y) + count * FLUSH
    if b.worst.any():  # numbers that are given have no error to pass on
        worst += x @ _whole(b, "worst")
    if a.worst.any():
        worst += _whole(a, "worst") @ y

    def spread() -> Array:
        x2, y2 = x**2, y**2
        squares = x2 @ y2
        variance: Array = squares + count * (value**2 + squares + FLUSH**2)
        if b.worst.any():
            variance += x2 @ _whole(b, "spread") ** 2
        if a.worst.any():
            variance += _whole(a, "spread") ** 2 @ y2
        return np.sqrt(variance)

    return Rounded(value, worst, spread)


def root(a: Array, b: Array) -> Array:
    """The root of the sum of squares, by hypot only where a square overflows: it takes much longer.

    A square that underflows is far below FLUSH, which every result's bound has besides.
    """
    found: Array = np.sqrt(a * a + b * b)
    return found if np.isfinite(found).all() else np.hypot(a, b)


def broadcast(array: Array, shape: tuple[int, ...]) -> Array:
    """numpy's, which takes longer than most of what the suite computes, where it is needed."""
    return array if array.shape == shape else np.broadcast_to(array, shape)


def _whole(number: Rounded, name: str) -> Array:
    return broadcast(getattr(number, name), number.value.shape)


def _function(x: Rounded, name: str, value: Array, slope: Array) -> Rounded:
    """f(x), given its derivative: the argument's error passes on, and f adds its own."""
    slope = np.abs(slope)
    return _rounded(value, slope * x.worst, lambda: slope * x.spread, 2 * ULP[name])


def exp(x: Rounded) -> Rounded:
    """With expm1 of the argument's error, as huge scores are off by 1 and more; at most e^80."""
    value = np.exp(x.value)

    def off(e: Array) -> Any:
        return value * np.where(np.isfinite(e), np.expm1(np.minimum(e * UNIT, 80.0)) / UNIT, e)

    return _rounded(value, off(x.worst), lambda: off(x.spread), 2 * ULP["exp"])


def log(x: Rounded) -> Rounded:
    return _function(x, "log", np.log(x.value), 1.0 / x.value)


def log1p(x: Rounded) -> Rounded:
    return _function(x, "log1p", np.log1p(x.value), 1.0 / (1.0 + x.value))


def tanh(x: Rounded) -> Rounded:
    value = np.tanh(x.value)
    return _function(x, "tanh", value, 1.0 - value**2)


def erf(x: Rounded) -> Rounded:
    value = np.asarray(np.frompyfunc(math.erf, 1, 1)(x.value), dtype=np.float64)
    return _function(x, "erf", value, 2.0 / math.sqrt(math.pi) * np.exp(-(x.value**2)))


def sqrt(x: Rounded) -> Rounded:
    """Near 0 the derivative says nothing; there |sqrt(x + e) - sqrt(x)| <= sqrt |e|."""
    value = np.sqrt(x.value)
    safe = np.where(value > 0.0, value, np.inf)
    worst = np.minimum(x.worst / (2 * safe), np.sqrt(x.worst / UNIT))
    worst = np.where(value > 0.0, worst, np.sqrt(x.worst / UNIT))

    def spread() -> Array:
        return np.where(value > 0.0, np.minimum(x.spread / (2 * safe), worst), worst)

    return _rounded(value, worst, spread, 2 * ULP["sqrt"])


def rsqrt(x: Rounded) -> Rounded:
    value = 1.0 / np.sqrt(x.value)
    return _function(x, "rsqrt", value, 0.5 * value / x.value)


def power(base: Rounded, exponent: Rounded) -> Rounded:
    """base ** exponent for an exact exponent of at least 1; base in [0, inf)."""
    slope = exponent.value * base.value ** (exponent.value - 1.0)
    return _function(base, "pow", base.value**exponent.value, slope)


def sigmoid(x: Rounded) -> Rounded:
    """1 / (1 + exp(-x)); written out so that exp cannot overflow in float64."""
    e = np.exp(-np.abs(x.value))
    value = np.where(x.value >= 0.0, 1.0 / (1.0 + e), e / (1.0 + e))
    slope = value * (1.0 - value)
    # exp's error passes through 1 / (1 + e) with the factor 1 - value; then an addition, a
    # division.
    own = 2 * ULP["exp"] * (1.0 - value) + 1.0 + 2 * ULP["divide"]
    size = own * value + FLUSH
    return Rounded(value, slope * x.worst + size, lambda: root(slope * x.spread, size))
