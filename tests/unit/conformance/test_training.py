"""Is the stored envelope what its script makes, and does it tell a small bias from rounding?

And does a training that is off name the rows that are to blame?
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch

from anychip.conformance import culprit
from anychip.conformance.chapters.training import horizon
from anychip.conformance.formats import FP32, ulp
from anychip.conformance.oracles import training
from anychip.dispatch import selection
from tests.meta import training_data

EACH = pytest.mark.parametrize("name", list(training.RECIPES))
PART = 12


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@EACH
def test_stored_losses_begin_with_those_that_are_computed_now(name: str) -> None:
    order = training_data.orders(1)[0]
    losses = training_data.curve(training.RECIPES[name], torch.float64, order, steps=PART)
    assert np.allclose(losses, training.load(name).losses[:PART], rtol=1e-11, atol=0.0)


@EACH
def test_order_of_sums_changes_nothing_but_rounding(name: str) -> None:
    plain, permuted = training_data.orders(2)
    recipe = training.RECIPES[name]
    curves = [training_data.curve(recipe, torch.float64, o, steps=PART) for o in (plain, permuted)]
    assert np.allclose(*curves, rtol=1e-13, atol=0.0)
    narrow = training_data.curve(recipe, torch.float32, permuted, steps=PART)
    assert narrow != training_data.curve(recipe, torch.float32, plain, steps=PART)


@EACH
def test_stored_envelope_is_of_all_steps_and_its_samples_are_inside(name: str) -> None:
    known = training.load(name)
    assert known.losses.shape == known.spread.shape == (training.STEPS,)
    assert known.deviations.shape == (training_data.SAMPLES,)
    assert known.deviations.max() < known.limit
    assert np.all(np.diff(known.spread) >= 0.0)
    # Stored with four digits.
    assert np.all(known.spread >= 0.999 * ulp(known.losses, FP32) / 2)
    assert known.losses[-20:].mean() < 0.3 * known.losses[0]


@pytest.mark.grid
@EACH
def test_smallest_bias_that_is_stated_is_outside_and_a_quarter_of_it_is_inside(name: str) -> None:
    """The very number that is stated, in an order of sums that the trial did not have."""
    recipe, known = training.RECIPES[name], training.load(name)
    assert np.log2(known.smallest_bias) == int(np.log2(known.smallest_bias))
    order = training_data.orders(3)[2]

    def deviation(bias: float) -> float:
        change = partial(training_data.enlarge, factor=1.0 + bias)
        return known.deviation(training_data.curve(recipe, torch.float32, order, change=change))

    assert deviation(known.smallest_bias) > known.limit
    assert deviation(known.smallest_bias / 4) <= known.limit, "a smaller bias could be stated"


def test_deviation_of_a_loss_that_is_not_a_number_is_outside() -> None:
    known = training.load("adamw")
    assert not known.deviation([*known.losses[:-1], float("nan")]) <= known.limit
    assert known.deviation(list(known.losses)) == 0.0


def test_envelope_follows_its_definition() -> None:
    losses, samples = [2.0, 1.0], [[2.0 + 3e-6, 1.0 + 1e-6], [2.0 - 3e-6, 1.0 - 5e-6]]
    found = training_data.envelope(losses, samples)
    assert np.allclose(found.spread, [3e-6, np.sqrt(13.0) * 1e-6], rtol=1e-6)
    wanted = [np.sqrt((1 + 1 / 13) / 2), np.sqrt((1 + 25 / 13) / 2)]
    assert np.allclose(found.deviations, wanted, rtol=1e-6)
    logs = np.log(wanted)
    assert np.isclose(found.limit, 3.0 * np.exp(logs.mean() + 3.09 * logs.std(ddof=1)), rtol=1e-6)


PARTS = [culprit.Part(f"op{n}", "forward", frozenset({f"row{n}"})) for n in range(13)]


@pytest.mark.parametrize("needed", [{0}, {5}, {12}, {2, 3}, {0, 12}, {1, 6, 11}], ids=str)
def test_smallest_set_of_rows_that_is_enough_is_found(needed: set[int]) -> None:
    asked = []

    def passes(by_reference: Sequence[culprit.Part]) -> bool:
        asked.append(len(by_reference))
        return {PARTS[n] for n in needed} <= set(by_reference)

    whole: list[culprit.Part] = []

    def all_of_it(by_reference: Sequence[culprit.Part]) -> bool:
        whole.extend(by_reference)
        return passes(by_reference)

    found = culprit.told(culprit.found_by(PARTS, passes, all_of_it))
    named = [part for part in PARTS if f"{part.operator} forward" in found]
    assert named == whole == [PARTS[n] for n in sorted(needed)]
    assert found.startswith("to blame: " if len(needed) == 1 else "no row alone is to blame: ")
    assert len(asked) <= 3 + 2 * 4 * len(needed)


def test_what_only_the_beginning_confirms_is_searched_for_in_the_whole() -> None:
    def beginning(by_reference: Sequence[culprit.Part]) -> bool:
        return PARTS[3] in by_reference

    def whole(by_reference: Sequence[culprit.Part]) -> bool:
        return {PARTS[3], PARTS[4]} <= set(by_reference)

    assert culprit.found_by(PARTS, beginning, whole) == [PARTS[3], PARTS[4]]


@pytest.mark.parametrize(("answers", "words"), [
    ([True, True], "a fault that comes and goes"),
    ([False, False, False, False], "no row is to blame"),
], ids=["again", "device"])  # fmt: skip
def test_what_no_row_explains_is_said(answers: list[bool], words: str) -> None:
    def answer(by_reference: Sequence[culprit.Part]) -> bool:
        return answers.pop(0)

    assert words in culprit.told(culprit.found_by(PARTS, answer, partial(answer)))
    assert not answers


def test_search_that_finds_no_end_says_so_and_errors_are_no_pass() -> None:
    asked = []

    def train() -> bool:
        forbid = selection.current.policy.forbid
        asked.append(forbid)
        if len(asked) == 3:
            raise RuntimeError("the chip is away")
        return len(forbid) == len(PARTS)

    assert f"not found in {culprit.TRIALS} trainings" in culprit.accuse(PARTS, train, train)
    assert len(asked) == culprit.TRIALS
    assert asked[1] == {f"op{n}": {f"row{n}"} for n in range(13)}
    assert selection.current.policy.forbid == {}


def test_horizon_is_where_a_curve_is_far_off() -> None:
    known = training.load("momentum")
    losses = known.losses.copy()
    assert horizon(list(losses), known) == (training.STEPS, known.limit)
    losses[50:] += 1.0
    steps, limit = horizon(list(losses), known)
    assert steps == 51
    assert known.limit < limit < known.deviation(losses[:steps])
    assert horizon([float("nan")] * training.STEPS, known) == (8, limit)
