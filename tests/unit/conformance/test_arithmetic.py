"""Do the bounds of the error model hold for float32 as it is, and are they not far off?"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies
from numpy.typing import NDArray

from anychip.conformance import arithmetic
from anychip.conformance.arithmetic import UNIT, Rounded, matmul, where
from anychip.conformance.formats import FORMATS, Format

F32 = NDArray[np.float32]
RNG = np.random.default_rng(2024)


def wide(count: int = 4000) -> F32:
    """Both signs, magnitudes over twenty binades."""
    exponent = RNG.uniform(-10, 10, count)
    return (RNG.choice([-1.0, 1.0], count) * 2.0**exponent).astype(np.float32)


def error_in_units(got: NDArray[np.float32], want: Rounded) -> NDArray[np.float64]:
    return np.abs(got.astype(np.float64) - want.value) / (UNIT * want.worst)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, lambda x, y: x / y,
        lambda x, y: (x + y) * (x - y), lambda x, y: x * x * x + y * y, lambda x, y: 1.0 - x * y,
        lambda x, y: (x * y + x) / (y * y + 1.0),
    ],
    ids=["add", "subtract", "multiply", "divide", "squares", "cubes", "cancel", "chain"],
)  # fmt: skip
def test_elementary_operations_in_float32_stay_within_worst(function: Callable[..., Any]) -> None:
    x, y = wide(), wide()
    want = function(Rounded.exact(x), Rounded.exact(y))
    errors = error_in_units(function(x, y), want)
    assert errors.max() <= 1.0
    # Not idle: a tenth of a unit is reached by some element.
    assert errors.max() > 0.1


def test_square_of_what_is_nothing_but_rounding_stays_within_worst() -> None:
    """The variance of equal numbers is 0, and in float32 that of a mean which is a little off."""
    equal = np.repeat(wide()[:, None], 10, axis=1)
    x = Rounded.exact(equal)
    centred = x - x.mean(-1, keepdims=True)
    total = np.zeros(len(equal), np.float32)
    for column in equal.T:
        total += column
    errors = error_in_units((equal.T - total / np.float32(10)).T ** 2, centred * centred)
    assert 1e-3 < errors.max() <= 1.0


@pytest.mark.parametrize(("name", "function", "domain"), [
    ("exp", np.exp, (-40.0, 40.0)), ("log", np.log, (1e-30, 1e30)),
    ("sqrt", np.sqrt, (1e-30, 1e30)), ("tanh", np.tanh, (-9.0, 9.0)),
    ("rsqrt", lambda x: 1 / np.sqrt(x), (1e-30, 1e30)),
    ("sigmoid", lambda x: 1 / (1 + np.exp(-x)), (-40.0, 40.0)),
])  # fmt: skip
def test_functions_of_a_rounded_argument_stay_within_worst(
    name: str, function: Callable[[F32], F32], domain: tuple[float, float]
) -> None:
    x = RNG.uniform(*domain, 4000).astype(np.float32)
    y = RNG.uniform(0.5, 2.0, 4000).astype(np.float32)
    want = getattr(arithmetic, name)(Rounded.exact(x) * Rounded.exact(y))
    assert error_in_units(function(x * y), want).max() <= 1.0


@pytest.mark.parametrize("count", [1, 2, 3, 64, 1000, 20_000])
@pytest.mark.parametrize("order", ["given", "sorted", "alternating"])
def test_sum_in_any_order_stays_within_worst(count: int, order: str) -> None:
    terms = RNG.standard_normal((20, count)).astype(np.float32) + np.float32(0.25)
    if order == "sorted":
        terms = np.sort(terms, axis=1)
    if order == "alternating":  # large partial sums first, which then cancel
        terms = np.sort(terms, axis=1)[:, ::-1]
    recursive = np.add.accumulate(terms, axis=1, dtype=np.float32)[:, -1]
    assert error_in_units(recursive, Rounded.exact(terms).sum(1)).max() <= 1.0


@pytest.mark.parametrize("count", [64, 1000, 20_000])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_recursive_sum_of_random_terms_has_rms_below_spread(count: int, mean: float) -> None:
    terms = (RNG.standard_normal((200, count)) + mean).astype(np.float32)
    want = Rounded.exact(terms).sum(1)
    recursive = np.add.accumulate(terms, axis=1, dtype=np.float32)[:, -1]
    ratio = (recursive.astype(np.float64) - want.value) / (UNIT * want.spread)
    rms = float(np.sqrt(np.mean(ratio**2)))
    assert rms <= 1 / math.sqrt(3)
    assert rms > 0.05  # a bound that is too wide tells nothing


@pytest.mark.parametrize("rounded", [(), (0,), (1,), (0, 1)], ids=str)
def test_product_of_matrices_has_the_bound_of_its_sums(rounded: tuple[int, ...]) -> None:
    given = [Rounded.exact(RNG.standard_normal(shape)) for shape in ((7, 33), (33, 5))]
    a, b = (each * each * 0.1 if at in rounded else each for at, each in enumerate(given))
    product = matmul(a, b)
    total = (a[:, :, None] * b[None]).sum(1)
    np.testing.assert_allclose(product.value, total.value, rtol=1e-12)
    np.testing.assert_allclose(product.worst, total.worst, rtol=1e-6)
    np.testing.assert_allclose(product.spread, total.spread, rtol=1e-6)


def test_root_of_squares_that_overflow_is_a_number() -> None:
    with np.errstate(over="ignore"):  # as the suite computes
        found = arithmetic.root(np.array([3e200, 3.0]), np.array([4e200, 4.0]))
    np.testing.assert_allclose(found, [5e200, 5.0])


@given(strategies.floats(min_value=2.0**-100, max_value=2.0**100))
def test_constant_that_float32_lacks_carries_one_rounding(value: float) -> None:
    number = Rounded.constant(value)
    actual = abs(float(np.float32(value)) - value) / UNIT
    assert actual <= number.worst
    assert (float(np.float32(value)) == value) == (float(number.worst) == 0.0)


def test_square_root_near_zero_allows_what_the_argument_allows() -> None:
    flushed = Rounded(np.array([0.0, 2.0**-130]), np.array([2.0**-102] * 2), np.zeros(2))
    worst = arithmetic.sqrt(flushed).worst * UNIT
    # sqrt of anything up to the flushed size may come out.
    assert (worst >= math.sqrt(2.0**-126) * (1 - 2.0**-20)).all()
    assert (worst <= math.sqrt(2.0**-126) * 1.01).all()


def test_subnormal_number_may_be_taken_as_zero() -> None:
    x = Rounded.exact([2.0**-130, 2.0**-126, 0.0])
    np.testing.assert_array_equal(x.worst * UNIT, [2.0**-130, 0.0, 0.0])


def test_infinite_score_leaves_an_exact_zero() -> None:
    with np.errstate(all="ignore"):
        weight = arithmetic.exp(Rounded.exact([-np.inf, 0.0]) - 3.0)
    assert weight.value[0] == 0.0
    assert float(weight.worst[0]) * UNIT <= 2.0**-126


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda f: f.name)
def test_storing_in_a_narrow_type_adds_half_its_ulp(format: Format) -> None:
    x = Rounded.exact([1.0, 3.0, format.smallest])
    added = (x.stored(format).worst - x.worst) * UNIT
    if format.name == "fp32":
        np.testing.assert_array_equal(added, 0.0)
    else:
        np.testing.assert_allclose(added[:2], [format.unit, 3 * format.unit], rtol=1e-3)
        assert added[2] >= format.smallest / 2


def test_selection_adds_no_rounding() -> None:
    x = Rounded.exact([1.0, 2.0]) * 3.3
    chosen = where(np.array([True, False]), x, 0.0)
    np.testing.assert_array_equal(chosen.worst, [x.worst[0], 0.0])


@pytest.mark.parametrize("off", [1e-6, 0.5, 5.0, -5.0, 60.0])
def test_exp_of_a_number_that_is_far_off_is_within_its_bound(off: float) -> None:
    for value in (-3.0, 0.0, 2.5):
        found = arithmetic.exp(Rounded(*np.array([[value], [abs(off) / UNIT], [abs(off) / UNIT]])))
        assert np.abs(np.exp(value + off) - found.value) <= found.worst * UNIT
        assert found.worst * UNIT <= 1.001 * np.exp(value) * (np.expm1(abs(off)) + 1e-6)
