"""What the statistical limits find: enough numbers to decide, and the tables that say how much.

The tables of docs/conformance.md are made by tests/meta/power.py. Lines that take no more than
some seconds are made again here; what they are made with is compared with what the suite measures.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from anychip.conformance.arithmetic import Rounded
from anychip.conformance.bounds import QUANTILE_LIMIT, RMS_LIMIT, STATISTICAL_COUNT, measure
from anychip.conformance.formats import FORMATS
from anychip.conformance.oracles import ORACLES
from tests.meta import power
from tests.meta.spoilt import (
    Asked,
    Fewer,
    Result,
    Rules,
    dtypes_of,
    fewer_bits,
    in_bits,
    quick_calls,
    telling,
)
from tests.unit.conformance.lower_precision import tf32

PAGE = Path(__file__).parents[3] / "docs" / "conformance.md"
FEW = {
    "l2_norm": {"y"}, "adamw_8bit": {"step", "exp_avg_scales", "exp_avg_sq_scales"},
    "adamw": {"step"}, "lamb": {"step"}, "lion": {"step"}, "sgd": {"step"},
    "unscale_and_check": {"found_inf"}, "top_k": {"y0"},
}  # fmt: skip
"""One number for a whole list; a scale for 256 codes, of which each shows it; a selection, exact.
"""
QUICKEST = ("group_norm", "embedding", "hadamard, permute, unpermute")
CLOSE = 0.3
"""As powers of 2: a factor of 1.25, of numbers that are printed with one digit."""


@pytest.mark.parametrize("name", ORACLES)
def test_statistical_limits_have_64_numbers_of_every_result_in_every_type(name: str) -> None:
    few = set()
    for dtype in dtypes_of(name):
        counts: dict[str, int] = {}
        for asked in quick_calls(name, dtype):
            for result, form in asked.forms().items():
                title = result.split("[")[0]
                count = form.numel() if asked.call.statistical else 0
                counts[title] = max(counts.get(title, 0), count)
        few |= {title for title, count in counts.items() if count < STATISTICAL_COUNT}
    assert few == FEW.get(name, set())


def test_tables_have_every_operator() -> None:
    listed = [name for names in power.FAMILIES.values() for name in names]
    assert sorted([*listed, *power.SCALARS]) == sorted(ORACLES)
    for name in (*power.FAMILIES, *power.PRODUCTS):
        assert len(line_of_page(name)) > 1
    for name in power.SCALARS:
        assert all(power.best(name, dtype) == [] for dtype in dtypes_of(name))


@pytest.mark.grid
@pytest.mark.parametrize("family", QUICKEST)
def test_noise_and_bias_that_are_found_are_those_of_the_page(family: str) -> None:
    agree(power.line(family), line_of_page(family))


@pytest.mark.grid
def test_bits_that_are_found_are_those_of_the_page() -> None:
    name = "linear_cross_entropy_partials"
    assert cells(power.line_of_products(name)) == line_of_page(name)


@pytest.mark.grid
def test_bias_of_a_training_that_is_found_is_that_of_the_page() -> None:
    assert abs(-power.training_bias("momentum") - float(line_of_page("momentum")[-1])) < CLOSE


def test_page_says_that_tf32_and_16_bit_sums_are_found() -> None:
    """TF32's factors of 11 bits wherever they are; sums of each type's own bits by some call."""
    for name in power.PRODUCTS:
        factors, _, bfloat16, float16 = line_of_page(name)[1:]
        assert min(numbers_of(factors)) >= 11
        assert numbers_of(bfloat16)[0] >= 8
        assert numbers_of(float16)[0] >= 11


def line_of_page(name: str) -> list[str]:
    """The cells of the line that begins so."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    (found,) = [line for line in lines if line.startswith((f"| {name} |", f"| {name}:"))]
    return cells(found)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def numbers_of(cell: str) -> list[float]:
    return [float(word.replace(",", "")) for word in cell.split(" / ") if word not in ("", "-")]


def agree(made: str, page: Sequence[str]) -> None:
    """Powers of 2 differ by no more than CLOSE, and how rare a number is by as much."""
    for new, old in zip(cells(made)[1:], page[1:], strict=True):
        for one, other in zip(numbers_of(new), numbers_of(old), strict=True):
            is_power = "/" in old
            assert abs(one - other if is_power else np.log2(one / other)) <= CLOSE, (new, old)


# What the tables are made with


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: FORMATS[d].name)
@pytest.mark.parametrize("name", ["linear", "silu"])
def test_simulated_limits_are_those_that_the_suite_measures(name: str, dtype: torch.dtype) -> None:
    asked = telling(name, dtype)[-1 if name == "silu" else 0]
    number, (result, *_) = asked.outputs(0)["y"], asked.results(1).values()
    for size in np.exp2(np.arange(-26.0, -4.0)):
        spoilt = result.value * (1.0 + size * power.noise(result))
        got = torch.from_numpy(spoilt.reshape(number.shape)).to(dtype)
        want = measure("y", got, number)
        assert want.rms is not None
        assert want.quantile is not None
        found = result.found(got.double().numpy().reshape(1, -1))
        assert found.single == (want.max > 1.0)
        assert found.statistical == (want.rms > RMS_LIMIT or want.quantile > QUANTILE_LIMIT)


def test_smallest_defect_is_found_in_every_run_and_half_of_it_is_not() -> None:
    result = telling("silu", torch.float32)[-1].results(40)["y"]
    for defect in power.DEFECTS.values():
        for rule, size in zip(Rules._fields, power.smallest_of_all(result, defect), strict=True):
            for part, is_found in ((1.01, True), (0.5, False)):
                spoilt = result.value * (1.0 + part * 2.0**size * defect(result))
                assert bool(getattr(result.found(spoilt), rule).all()) == is_found


def test_too_few_numbers_are_not_found_by_the_statistical_limits() -> None:
    for count, enough in ((STATISTICAL_COUNT - 1, False), (STATISTICAL_COUNT, True)):
        result = Result.joined([Rounded.exact(np.ones(count))], FORMATS[torch.float32])
        assert bool(result.found(result.value * 1.5).statistical) == enough


def test_numbers_are_rounded_to_bits_as_types_round_them() -> None:
    x = torch.cat((torch.randn(1000), torch.tensor([1.0 + 2.0**-9, 1.0 + 3 * 2.0**-9, -1e30, 0.0])))
    wide = x.double().numpy()
    assert np.array_equal(in_bits(wide, 8), x.bfloat16().double().numpy())
    assert np.array_equal(in_bits(wide, 11), tf32(x).double().numpy())
    assert np.array_equal(in_bits(wide, 24), wide)


@pytest.mark.parametrize("kind", ["factors", "sums"])
def test_oracle_of_all_bits_is_the_oracle(kind: str) -> None:
    asked = Asked("attention", ORACLES["attention"].plain[0], torch.float32)
    right = asked.outputs(0) | asked.gradients(0)
    with fewer_bits(kind, 52):
        same = asked.outputs(0) | asked.gradients(0)
    with fewer_bits(kind, 11):
        other = asked.outputs(0) | asked.gradients(0)
    for name, number in right.items():
        assert np.allclose(same[name].value, number.value, rtol=1e-12, atol=1e-14)
        assert not np.allclose(other[name].value, number.value, rtol=1e-6)
    again = asked.outputs(0)["y"]
    assert np.array_equal(again.value, right["y"].value)
    assert (again.worst > 0.0).any()


def test_sums_are_rounded_after_every_16_terms() -> None:
    """1 + 15 times 2^-9 is a number of 8 bits only after rounding; one block more is another."""
    x = Rounded.exact(np.concatenate((np.ones(1), np.full(31, 2.0**-9)))[None])
    with fewer_bits("sums", 8):
        total = x.sum(1)
    first = float(in_bits(np.array([1.0 + 15 * 2.0**-9]), 8)[0])
    assert total.value.tolist() == [float(in_bits(np.array([first + 16 * 2.0**-9]), 8)[0])]


def test_calls_of_fewer_bits_are_found_from_some_number_on() -> None:
    (asked,) = [a for a in telling("linear", torch.float32) if a.call.label == "5x64x64"]
    call = Fewer(asked, "factors")
    bits = call.bits(3, by=("statistical",))
    assert 11 < bits < 24
    assert call.is_found(bits - 3, 7, by=("statistical",))
    assert not call.is_found(24, 7, by=Rules._fields)
