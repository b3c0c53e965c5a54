"""Is a result as exact as its operator's specification demands? Two derived limits, one verdict.

An element's error is measured in units of its own bound, ``error / (ulp(want)/2 + u * bound)``:
half an ULP of the result's type for the one rounding at the end, and for the computation before it
the bound that the oracle carries along (:mod:`.arithmetic`). No absolute or relative tolerance is
chosen by hand anywhere.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from anychip.conformance.arithmetic import UNIT, Rounded, broadcast
from anychip.conformance.formats import STORED, Array, Format, ulp
from anychip.contract import HOST

DETERMINISTIC_LIMIT = 1.0
"""No element may be off by more than ``ulp/2 + u * worst``; 1 by construction."""

RMS_LIMIT = 1.0
"""Of ``error / (ulp/2 + u * spread)`` over all elements. A rounding error is uniform, so its root
mean square is 1/sqrt 3 = 0.58 of its size, and that of a sum of independent ones too. The factor
1.7 up to the limit is for errors that few rows share: they are few samples, not many."""

QUANTILE_LIMIT = 2.5
"""Of the 99.9 % quantile of the same ratio. The sum of many roundings is normal with standard
deviation 0.58 of its size; 99.9 % of it are below 3.29 * 0.58 = 1.9. The factor 1.3 is as above."""

QUANTILE = 0.999
STATISTICAL_COUNT = 64
"""Fewer elements say nothing about a distribution; the deterministic limit is all there is."""

MANY_ULP = 1e6
"""More are no distance but another number."""

BINS = 20
"""Of the histogram of errors, between 0 and the bound."""

_WHOLE = {
    dtype: Format(str(dtype).removeprefix("torch."), 1, 0, math.inf)
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
}
"""Types of results that are not rounded; only their names are used."""

Known = Mapping[tuple[str, str], float]
"""By :attr:`Measurement.of`: the largest error that was seen."""
NOTHING: Known = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The distribution of one result's errors, and the verdict.

    Attributes:
        name: which result: ``y``, ``gradient of weight`` ...
        format: its type, as in case ids: fp32, bf16, fp16.
        count: elements compared.
        median, p999, max: of the error in units of the deterministic bound; the limit is 1.
        rms, quantile: of the error in units of the statistical bound; None below 64 elements, or
        for
            inputs that are not random.
        max_ulp: largest error in ULP of the result's type, for people.
        where: index of the largest error.
        failure: what is wrong, or None.
        histogram: elements by error in units of the deterministic bound, in steps of 1/BINS; the
            last of BINS + 1 is for all above 1. Zeros at the end are left out.
    """

    name: str
    format: str
    count: int
    median: float = 0.0
    p999: float = 0.0
    max: float = 0.0
    rms: float | None = None
    quantile: float | None = None
    max_ulp: float = 0.0
    where: tuple[int, ...] = ()
    failure: str | None = None
    histogram: tuple[int, ...] = ()

    @property
    def of(self) -> tuple[str, str]:
        """Which result, of a list's all as one; and its format."""
        return _of(self.name, self.format)

    @property
    def of_limit(self) -> float:
        """The largest error in units of its limit: above 1, infinite or NaN is a failure."""
        if self.failure is not None:
            return math.inf
        parts = [self.max / DETERMINISTIC_LIMIT]
        if self.rms is not None and self.quantile is not None:
            parts += [self.rms / RMS_LIMIT, self.quantile / QUANTILE_LIMIT]
        return math.nan if any(map(math.isnan, parts)) else max(parts)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; numbers that are not finite become text."""
        return {key: _json_number(value) for key, value in asdict(self).items()}


def measure(
    name: str, got: torch.Tensor, want: Rounded, *, statistical: bool = True, known: Known = NOTHING
) -> Measurement:
    """Compares a result with the oracle's.

    Args:
        got: any float tensor; its dtype decides about the final rounding. Or whole numbers, which
            have none: they are exact but where the oracle says that there are two right ones.
        want: same shape.
        statistical: the inputs are random, so that the statistical limits hold.
        known: of errors that are no larger than these nobody asks how they are distributed.
    """
    if tuple(got.shape) != want.shape:
        return _rejected(name, got, f"shape {want.shape} expected, got {tuple(got.shape)}")
    if got.dtype in _WHOLE:
        return _measure_whole(name, got, want, known)
    if got.dtype not in STORED:
        return _rejected(name, got, f"a float or integer tensor expected, got {got.dtype}")
    format = STORED[got.dtype]
    actual = got.detach().to(HOST, torch.float64).numpy()
    worst = _in_numbers(want.worst, want.shape)
    wrong, settled = _special(actual, want.value, worst, format)
    with np.errstate(invalid="ignore"):  # of infinite numbers, which are settled
        error, size = np.abs(actual - want.value), np.abs(want.value)
    if settled.any():
        error, size = (np.where(settled, 0.0, each) for each in (error, size))
    # The final rounding is that of the computed number, which may be in the next binade.
    half = ulp(size + worst, format) / 2
    ratio, ulps = error / (half + worst), error / (2 * half)
    if wrong.any():
        ratio, ulps = (np.where(wrong, np.inf, each) for each in (ratio, ulps))
    statistic = None
    if statistical:
        statistic = (error / (half + _in_numbers(want.spread, want.shape)))[~settled]
    return _verdict(name, format, Errors(actual, want.value, ratio, ulps, statistic), known)


def _in_numbers(bound: Array, shape: tuple[int, ...]) -> Array:
    # An Inf or NaN among a row's inputs leaves no bound; what is finite then has to be exact.
    known = np.isfinite(bound)
    numbers: Array = (bound if known.all() else np.where(known, bound, 0.0)) * UNIT
    return broadcast(numbers, shape)


def _measure_whole(name: str, got: torch.Tensor, want: Rounded, known: Known) -> Measurement:
    """Codes and indices: off by nothing, or within what the oracle leaves open."""
    actual = got.detach().to(HOST, torch.float64).numpy()
    error = np.abs(actual - want.value)
    allowed = np.broadcast_to(want.worst, want.shape) * UNIT
    ratio = np.where(error == 0.0, 0.0, np.where(error <= allowed, 1.0, np.inf))
    return _verdict(name, _WHOLE[got.dtype], Errors(actual, want.value, ratio, error, None), known)


def _special(actual: Array, want: Array, worst: Array, format: Format) -> tuple[Any, Any]:
    """(wrong, settled) for what is not finite; near the largest number it may go both ways."""
    threshold = format.largest + ulp(np.array(format.largest), format) / 2
    size = np.abs(want)
    if np.isfinite(actual).all() and (size + worst < threshold).all():
        nowhere = np.zeros(want.shape, np.bool_)
        return nowhere, nowhere
    must_overflow = np.isfinite(want) & (size - worst >= threshold)
    may_overflow = np.isfinite(want) & (size + worst >= threshold)
    infinite = np.isinf(actual) & (np.sign(actual) == np.sign(want))
    same_class = np.where(np.isnan(want), np.isnan(actual), infinite)
    special = ~np.isfinite(want) | must_overflow
    wrong = np.where(special, ~same_class, ~np.isfinite(actual) & ~(may_overflow & infinite))
    return wrong, special | ~np.isfinite(actual)


class Errors(NamedTuple):
    """What a verdict is made of; arrays of the result's shape but for the last.

    Attributes:
        actual, want: the values.
        ratio: error in units of the deterministic bound.
        ulps: error in ULP of the result's type.
        statistic: error in units of the statistical bound, flat, of what is finite; None when the
            inputs are not random.
    """

    actual: Array
    want: Array
    ratio: Array
    ulps: Array
    statistic: Array | None


def _verdict(name: str, format: Format, errors: Errors, known: Known) -> Measurement:
    ratio = errors.ratio
    if ratio.size == 0:
        return Measurement(name=name, format=format.name, count=0)
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    rms = quantile = failure = None
    is_known = ratio[place] <= known.get(_of(name, format.name), -1.0)
    statistic = errors.statistic
    if statistic is not None and statistic.size >= STATISTICAL_COUNT:
        rms, quantile = float(np.sqrt(np.mean(statistic**2))), 0.0
        if not is_known or not statistic.max() <= QUANTILE_LIMIT:
            (quantile,) = _quantiles(statistic, QUANTILE)
    if ratio[place] > DETERMINISTIC_LIMIT:
        failure = _outside(errors, place)
    elif (
        rms is not None and quantile is not None and (rms > RMS_LIMIT or quantile > QUANTILE_LIMIT)
    ):
        failure = (
            f"no single error is too large, but together they are: root mean square {rms:.3g} "
            f"(limit {RMS_LIMIT:g}), 99.9 % quantile {quantile:.3g} (limit {QUANTILE_LIMIT:g}) of "
            f"the statistical bound; largest at {_at(place)}: want {errors.want[place]:.9g}, got "
            f"{errors.actual[place]:.9g}. Computed in a lower precision?"
        )
    if is_known and failure is None:
        return Measurement(name=name, format=format.name, count=ratio.size, max=float(ratio[place]))
    median, p999 = _quantiles(ratio, 0.5, QUANTILE)
    return Measurement(
        name=name,
        format=format.name,
        count=ratio.size,
        median=median,
        p999=p999,
        max=float(ratio[place]),
        rms=rms,
        quantile=quantile,
        max_ulp=float(errors.ulps[place]),
        where=place,
        failure=failure,
        histogram=_histogram(ratio),
    )


def _of(name: str, format: str) -> tuple[str, str]:
    return name.partition("[")[0], format


def _histogram(ratio: Array) -> tuple[int, ...]:
    # An error of exactly 1 is inside the bound; NaN is not, and fmin takes the number next to it.
    steps = np.ceil(np.fmin(ratio, 2.0) * BINS) - 1
    counts = np.bincount(np.minimum(np.maximum(steps, 0), BINS).astype(np.int64).ravel())
    return tuple(int(count) for count in counts)


def _outside(errors: Errors, worst: tuple[int, ...]) -> str:
    bad = errors.ratio > DETERMINISTIC_LIMIT
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    lines = [f"{int(bad.sum())} of {bad.size} elements are outside the bound"]
    if worst != first:
        lines.append(f"  first at {_at(first)}: {_described(errors, first)}")
    lines.append(f"  worst at {_at(worst)}: {_described(errors, worst)}")
    return "\n".join(lines)


def _described(errors: Errors, at: tuple[int, ...]) -> str:
    """One wrong element, in whichever numbers say something to a person."""
    got, want, ratio, ulps = (float(a[at]) for a in errors[:4])
    text = f"want {want:.9g}, got {got:.9g}"
    if not math.isfinite(ratio):  # of another class, or where nothing but one number is right
        return text
    # Next to 0 an ULP is that of a number without a size of its own, and how many there are tells
    # nothing; and of a million ULP nobody counts the digits.
    if want == 0.0 or ulps > MANY_ULP:
        return f"{text}, bound {abs(got - want) / ratio if ratio else 0.0:.3g}"
    return f"{text} (off by {ulps:.4g} ULP; {ratio:.4g} of the bound)"


def _quantiles(values: Array, *fractions: float) -> list[float]:
    """What ``np.quantile(values, fractions, method="lower")`` gives, in half the time."""
    places = [int(fraction * (values.size - 1)) for fraction in fractions]
    ordered = np.partition(values, (*places, -1), axis=None)
    is_number = not np.isnan(ordered[-1])  # NaN comes last
    return [float(ordered[place]) if is_number else math.nan for place in places]


def _at(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]"


def _rejected(name: str, got: torch.Tensor, why: str) -> Measurement:
    format = STORED[got.dtype].name if got.dtype in STORED else str(got.dtype)
    return Measurement(
        name=name, format=format, count=got.numel(), median=math.inf, p999=math.inf, max=math.inf,
        max_ulp=math.inf, failure=why,
    )  # fmt: skip


def _json_number(value: Any) -> Any:
    if isinstance(value, float):
        # Six digits tell what there is to tell, and there are thousands of these.
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return list(value) if isinstance(value, tuple) else value
