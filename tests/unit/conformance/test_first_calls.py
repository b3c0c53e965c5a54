"""Tests for the rule about an operator's first calls."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import anychip.ops  # noqa: F401 - defines our operators
from anychip.conformance import first_calls
from anychip.conformance.case import CheckFailedError, Context
from anychip.conformance.chapters import operators
from anychip.conformance.oracles import oracle_of
from anychip.conformance.trial import Subject, Trial
from anychip.dispatch.operator import registered
from tests.meta.honest import HonestBackend

ROUNDING, WRONG = 2.0**-23, 2.0**-10


@pytest.mark.parametrize(("promised", "error", "is_right"), [
    ("bitwise", 0.0, True), ("bitwise", ROUNDING, False),
    ("unordered", ROUNDING, True), ("unordered", WRONG, False),
])  # fmt: skip
def test_a_later_call_has_the_bits_of_the_first_or_is_within_the_bound(
    monkeypatch: pytest.MonkeyPatch, promised: Any, error: float, is_right: bool
) -> None:
    operator, numbers = registered()["tanh"], itertools.count()
    monkeypatch.setattr(operator, "spec", replace(operator.spec, determinism=promised))
    of = Subject(operator, oracle_of(operator.spec), torch.float32)

    def run(context: Context, trial: Trial) -> Any:
        (result,) = operators.results_of(context, trial)
        return [result * (1.0 + error * (next(numbers) > 3))]

    with nullcontext() if is_right else pytest.raises(CheckFailedError):
        first_calls._ask(
            Context(HonestBackend()), of=of, made=Trial, run=run, judge=operators.judge
        )
