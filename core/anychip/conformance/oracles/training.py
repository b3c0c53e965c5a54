"""Oracle of the training chapter: 200 steps of a small decoder in float64, and float32's spread.

The curve of losses that float32 approaches, and samples of what rounding does to it, come from
``tests/meta/training_data.py``: the decoder in plain torch, with nothing of ours, in float64, and
in float32 with the parameters and the rows of each batch in another order, since a permutation
changes no result but the order of every sum. Both stand in ``training.json``.

Note: The envelope
    With ``d(t)`` a run's loss minus float64's at step t, and ``s(t)`` the root mean square of the
    samples' up to t (never falling, never below half an ULP of the loss), a run's *deviation* is
    ``sqrt(mean over t of (d(t) / s(t))^2)``: 1 on average for float32 as the samples are. The
    limit is the 99.9 % quantile of the log-normal distribution through the samples' deviations,
    times 3: a chip's functions may be a few ULP less exact than the host's (the table in
    :mod:`anychip.conformance.arithmetic`), and its sums longer chains.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from anychip.conformance import trainee
from anychip.conformance.formats import Array

STEPS = 200
SIZES = trainee.Sizes(vocab=32, context=16, layers=2, heads=2, width=32, batch=8)
DATA = Path(__file__).with_name("training.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How the parameters are updated.

    Attributes:
        momentum: of plain gradient descent; None: AdamW with the settings below, clipped.
        lr: peak of the schedule: linear over ``warmup`` steps, then half a cosine to a tenth.
    """

    momentum: float | None
    lr: float
    warmup: int = 20
    max_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.1

    def rate(self, step: int) -> float:
        """Learning rate of a step, from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / (STEPS - self.warmup)
        return self.lr * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * done)))


RECIPES = {
    # Not clipped: the size of a gradient counts, which AdamW would divide out.
    "momentum": Recipe(momentum=0.9, lr=0.05),
    "adamw": Recipe(momentum=None, lr=3e-3),
}


class Envelope(NamedTuple):
    """What a candidate's curve is compared with.

    Attributes:
        losses: float64's, by step.
        spread: s(t) of the samples.
        limit: of the deviation.
        deviations: of the samples.
        smallest_bias: the least power of 2 that the limit detects when every gradient is larger by
            it, relatively.
    """

    losses: Array
    spread: Array
    limit: float
    deviations: Array
    smallest_bias: float = 0.0

    def deviation(self, losses: Sequence[float]) -> float:
        """Of a run: 1 is float32 as usual; not finite when a loss is not."""
        off = (np.asarray(losses) - self.losses[: len(losses)]) / self.spread[: len(losses)]
        return float(np.sqrt(np.mean(off**2)))


def load(name: str) -> Envelope:
    """The stored envelope of a recipe."""
    found = json.loads(DATA.read_text(encoding="utf-8"))[name]
    arrays = {key: np.asarray(found[key]) for key in ("losses", "spread", "deviations")}
    return Envelope(limit=found["limit"], smallest_bias=found["smallest_bias"], **arrays)
