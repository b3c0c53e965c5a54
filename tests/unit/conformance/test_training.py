"""Is the stored envelope what its script makes, and does it tell a small bias from rounding?"""

from functools import partial

import numpy as np
import pytest
import torch

from anychip.conformance.formats import FP32, ulp
from anychip.conformance.oracles import training
from anychip.conformance.oracles.training_data import enlarge

EACH = pytest.mark.parametrize("name", list(training.RECIPES))
PART = 12


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@EACH
def test_stored_losses_begin_with_those_that_are_computed_now(name: str) -> None:
    order = training.orders(1)[0]
    losses = training.curve(training.RECIPES[name], torch.float64, order, steps=PART)
    assert np.allclose(losses, training.load(name).losses[:PART], rtol=1e-11, atol=0.0)


@EACH
def test_order_of_sums_changes_nothing_but_rounding(name: str) -> None:
    plain, permuted = training.orders(2)
    recipe = training.RECIPES[name]
    curves = [training.curve(recipe, torch.float64, o, steps=PART) for o in (plain, permuted)]
    assert np.allclose(*curves, rtol=1e-13, atol=0.0)
    narrow = training.curve(recipe, torch.float32, permuted, steps=PART)
    assert narrow != training.curve(recipe, torch.float32, plain, steps=PART)


@EACH
def test_stored_envelope_is_of_all_steps_and_its_samples_are_inside(name: str) -> None:
    known = training.load(name)
    assert known.losses.shape == known.spread.shape == (training.STEPS,)
    assert known.deviations.shape == (training.SAMPLES,)
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
    order = training.orders(3)[2]

    def deviation(bias: float) -> float:
        change = partial(enlarge, factor=1.0 + bias)
        return known.deviation(training.curve(recipe, torch.float32, order, change=change))

    assert deviation(known.smallest_bias) > known.limit
    assert deviation(known.smallest_bias / 4) <= known.limit, "a smaller bias could be stated"


def test_deviation_of_a_loss_that_is_not_a_number_is_outside() -> None:
    known = training.load("adamw")
    assert not known.deviation([*known.losses[:-1], float("nan")]) <= known.limit
    assert known.deviation(list(known.losses)) == 0.0


def test_envelope_follows_its_definition() -> None:
    losses, samples = [2.0, 1.0], [[2.0 + 3e-6, 1.0 + 1e-6], [2.0 - 3e-6, 1.0 - 5e-6]]
    found = training.envelope(losses, samples)
    assert np.allclose(found.spread, [3e-6, np.sqrt(13.0) * 1e-6], rtol=1e-6)
    wanted = [np.sqrt((1 + 1 / 13) / 2), np.sqrt((1 + 25 / 13) / 2)]
    assert np.allclose(found.deviations, wanted, rtol=1e-6)
    logs = np.log(wanted)
    assert np.isclose(found.limit, 3.0 * np.exp(logs.mean() + 3.09 * logs.std(ddof=1)), rtol=1e-6)
