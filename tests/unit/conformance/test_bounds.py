"""Does the verdict follow the two limits, at the edges of a type too?"""

import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from anychip.conformance.arithmetic import UNIT, Rounded
from anychip.conformance.bounds import _quantiles, measure
from anychip.conformance.calls import Arguments, Call, Draw
from anychip.conformance.case import CheckFailedError, Context
from anychip.conformance.formats import FORMATS, ulp
from anychip.conformance.oracles import oracle_of
from anychip.conformance.trial import Trial
from anychip.dispatch.operator import registered
from tests.meta.honest import HonestBackend

DTYPES = pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: FORMATS[d].name)


@DTYPES
def test_ulp_is_the_distance_to_the_next_number(dtype: torch.dtype) -> None:
    format = FORMATS[dtype]
    values = torch.tensor([1.0, 1.5, 2.0, 1e-3, 240.0, 3e-5, 0.0], dtype=dtype)
    bits = {4: torch.int32, 2: torch.int16}[values.element_size()]
    following = (values.view(bits) + 1).view(dtype)
    distance = (following.double() - values.double()).numpy()
    np.testing.assert_array_equal(ulp(values.double().numpy(), format), distance)


@DTYPES
def test_correctly_rounded_result_is_within_and_a_neighbour_is_not(dtype: torch.dtype) -> None:
    want = np.random.default_rng(1).standard_normal(5000)
    exact = Rounded(want, np.zeros(5000), np.zeros(5000))
    rounded = torch.tensor(want).to(dtype)
    good = measure("y", rounded, exact)
    assert good.failure is None
    assert 0.9 < good.max <= 1.0
    bits = {4: torch.int32, 2: torch.int16}[rounded.element_size()]
    wrong = rounded.clone()
    wrong.view(bits)[123] += 2 if rounded[123].double() > want[123] else -2
    bad = measure("y", wrong, exact)
    assert bad.failure is not None
    assert bad.where == (123,)
    assert "1 of 5000 elements" in bad.failure
    assert "[123]" in bad.failure


@DTYPES
def test_truncation_in_place_of_rounding_fails(dtype: torch.dtype) -> None:
    want = np.random.default_rng(2).standard_normal(500)
    step = ulp(want, FORMATS[dtype])
    truncated = torch.tensor(np.trunc(want / step) * step).to(dtype)
    assert measure("y", truncated, Rounded(want, np.zeros(500), np.zeros(500))).failure is not None


@pytest.mark.parametrize(
    ("got", "want", "passes"),
    [
        (math.nan, math.nan, True), (0.0, math.nan, False), (math.inf, math.nan, False),
        (math.inf, math.inf, True), (-math.inf, math.inf, False), (3e38, math.inf, False),
        (math.nan, 1.0, False), (math.inf, 1.0, False),
        (math.inf, 3.5e38, True),  # beyond the largest float32
        (3.4028235e38, 3.5e38, False), (0.0, -0.0, True),
    ],
)  # fmt: skip
def test_special_value_must_be_of_its_class(got: float, want: float, passes: bool) -> None:
    result = torch.tensor([1.0, got], dtype=torch.float32)
    oracle = Rounded(np.array([1.0, want]), np.zeros(2), np.zeros(2))
    assert (measure("y", result, oracle).failure is None) == passes


@pytest.mark.parametrize(("got", "want", "worst", "words"), [
    (3e-5, 0.0, 1e-7 * 2**24, "want 0, got 2.99999992e-05, bound 1e-07"),
    (1e-3, 1e-38, 0.0, "want 9.99999935e-39, got 0.00100000005, bound 7.01e-46"),
    (1.0 + 2**-20, 1.0, 0.0, "want 1, got 1.00000095 (off by 8 ULP; 16 of the bound)"),
    (math.nan, 1.0, 1.0, "want 1, got nan"),
], ids=["zero", "tiny", "near", "nan"])  # fmt: skip
def test_failure_says_how_far_off_in_numbers_that_mean_something(
    got: float, want: float, worst: float, words: str
) -> None:
    exact = float(np.float32(want))
    oracle = Rounded(np.array([exact]), np.array([worst]), np.zeros(1))
    found = measure("y", torch.tensor([got], dtype=torch.float32), oracle).failure
    assert found == f"1 of 1 elements are outside the bound\n  worst at [0]: {words}"


@pytest.mark.parametrize("got", [65504.0, math.inf])
def test_overflow_within_the_bound_may_go_both_ways(got: float) -> None:
    oracle = Rounded(np.array([65519.9]), np.array([2.0**24]), np.zeros(1))
    assert measure("y", torch.tensor([got], dtype=torch.float16), oracle).failure is None


def test_small_result_near_overflow_fails() -> None:
    oracle = Rounded(np.array([65519.9]), np.array([2.0**24]), np.zeros(1))
    assert measure("y", torch.zeros(1, dtype=torch.float16), oracle).failure is not None


def test_many_errors_within_the_worst_bound_fail_the_statistical_one() -> None:
    rng = np.random.default_rng(3)
    want = rng.standard_normal(4096)
    # The worst case of a sum of 4096 terms allows far more than is likely.
    oracle = Rounded(want, np.full(4096, 4096.0), np.full(4096, 64.0))
    likely = torch.tensor(want + 64 * 2.0**-24 * rng.uniform(-1, 1, 4096)).float()
    lower = torch.tensor(want + 1000 * 2.0**-24 * rng.uniform(-1, 1, 4096)).float()
    assert measure("y", likely, oracle).failure is None
    found = measure("y", lower, oracle)
    assert found.max < 1.0
    assert found.failure is not None
    assert "root mean square" in found.failure
    assert measure("y", lower, oracle, statistical=False).failure is None


def test_few_elements_have_no_statistics() -> None:
    oracle = Rounded(np.ones(63), np.full(63, 1000.0), np.full(63, 1.0))
    found = measure("y", torch.full((63,), 1.0 + 500 * 2.0**-24), oracle)
    assert found.rms is None
    assert found.failure is None


def test_wrong_shape_is_a_failure_that_names_both() -> None:
    found = measure("y", torch.zeros(3), Rounded.exact(np.zeros(4)))
    assert found.failure is not None
    assert "(4,)" in found.failure
    assert "(3,)" in found.failure


def test_empty_result_passes_without_numbers() -> None:
    found = measure("y", torch.zeros(0, 5), Rounded.exact(np.zeros((0, 5))))
    assert (found.failure, found.count, found.max) == (None, 0, 0.0)


@pytest.mark.parametrize("last", [1.0, math.inf, math.nan])
def test_quantiles_are_numpys(last: float) -> None:
    for size in (1, 2, 3, 999, 1000, 1001, 2001, 4096):
        values = np.random.default_rng(size).random((size, 1))
        values[-1] = last
        want = np.quantile(values, (0.5, 0.999), method="lower")
        np.testing.assert_array_equal(_quantiles(values, 0.5, 0.999), want)


def test_tensors_of_a_list_are_judged_together_and_the_wrong_one_is_named() -> None:
    def make(draw: Draw) -> Arguments:
        return ([draw.normal(20) for _ in range(5)], draw.scalar(2.0)), {"max_norm": 1.0}

    clip, context = registered()["clip"], Context(HonestBackend())
    trial = Trial(clip, Call("list", make), torch.float32)
    wanted = trial.expected(oracle_of(clip.spec))

    def compare(part: float, *, times: float = 1.0) -> None:
        bounds = [ulp(w.value, FORMATS[torch.float32]) / 2 + w.worst * UNIT for w in wanted]
        moved = [w.value + part * b for w, b in zip(wanted, bounds, strict=True)]
        moved[3] = moved[3] * times
        results = [torch.from_numpy(value).float() for value in moved]
        trial.compare(context, results, wanted, statistical=True)

    compare(0.5)
    assert [(m.name, m.count) for m in context.measurements] == [("tensors[:]", 100)]
    with pytest.raises(CheckFailedError, match=r"tensors\[3\]: 20 of 20 elements"):
        compare(0.5, times=1.001)
    with pytest.raises(CheckFailedError, match=r"tensors\[:\]: no single error is too large"):
        compare(0.88)


def test_statistical_bound_is_computed_where_it_is_asked_for() -> None:
    spread = Mock(return_value=np.zeros(100))
    want = Rounded(np.ones(100), np.zeros(100), spread)
    for statistical in (False, True, True):
        measure("y", torch.ones(100), want, statistical=statistical)
        assert spread.call_count == statistical
