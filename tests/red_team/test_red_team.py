"""Are generated mistakes what they say, and are some of them found? ``make red-team`` tries 500."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from anychip.dispatch import selection
from tests.mutants.campaign import Campaign
from tests.mutants.pool import Pool
from tests.red_team.__main__ import OURS, SILENCE_S, about
from tests.red_team.conditions import COUNT, Call, Condition, History
from tests.red_team.effects import Effect
from tests.red_team.generation import Bench, differ, outcome
from tests.red_team.methods import METHODS, method_mistakes
from tests.red_team.mistake import Mistake
from tests.red_team.probes import probe
from tests.red_team.reach import reach
from tests.red_team.seam import SIGNATURES, SPECS, Seam


def test_condition_holds_for_the_calls_that_its_sentence_names() -> None:
    x = torch.arange(12.0).view(3, 4)
    call = Call({"x": x, "w": None, "list": [x, x[:0]], "eps": 0.5}, History(count=3))
    true = (
        Condition("{}.shape[-1]", "x", "divides by", 4), Condition("rows of {}", "x", "<", 4),
        Condition("{} has a zero", "x", "==", True), Condition("{} is None", "w", "==", True),
        Condition("one of {} is empty", "list", "==", True), Condition("{}", "eps", ">=", 0.5),
        Condition(COUNT, "", "==", 3), Condition("max(abs({}))", "x", ">=", 11),
    )  # fmt: skip
    assert [str(c) for c in true if not c.holds(call)] == []
    other = Call({"x": x.view(4, 3) * 0.5 + 0.5, "w": x, "list": [x], "eps": 0.4}, History())
    assert [str(c) for c in true if c.holds(other)] == []


@pytest.mark.parametrize("operator", ["linear", "l2_norm"])
def test_probes_of_a_seed_are_the_same_and_have_other_sizes(operator: str) -> None:
    one, two = ([probe(SPECS[operator], torch.float32, seed) for seed in range(4)] for _ in "ab")
    assert [p.attrs for p in one] == [p.attrs for p in two]
    for left, right in zip(one, two, strict=True):
        assert not differ(outcome(operator, left), outcome(operator, right))
    assert len({str(p.args) for p in one}) == len(one)


def test_seam_without_a_mistake_changes_nothing_and_with_one_the_calls_it_names() -> None:
    before = selection.current
    try:
        seam = Seam("cpu")
        selection.activate(seam.backend)
        narrow, wide = (torch.linspace(-1, 1, n) for n in (15, 16))
        silu = torch.ops.anychip.silu
        want = [torch.nn.functional.silu(x) for x in (narrow, wide)]
        wide_only = (Condition("{}.shape[-1]", "x", ">=", 16),)
        seam.mistake = Mistake(backend="cpu", target=("silu", "forward"), conditions=wide_only,
                               effect=Effect("one element of {} is wrong", place=1.0))  # fmt: skip
        torch.testing.assert_close(silu(narrow), want[0])
        got = silu(wide)
        torch.testing.assert_close(got[:-1], want[1][:-1])
        assert abs(got[-1] - want[1][-1]) > 0.1
    finally:
        selection.current = before


def test_mistake_does_not_depend_on_those_that_were_drawn_before_it() -> None:
    before = selection.current
    try:
        seam = Seam("cpu")
        selection.activate(seam.backend)
        bench = Bench(seam, "cpu", "rope", 5)
        drawn = [bench.mistake(f"5/{place}", Counter()) for place in range(4)]
        assert [bench.mistake(f"5/{place}", Counter()) for place in (3, 2, 1, 0)] == drawn[::-1]
    finally:
        selection.current = before


def test_mistakes_in_methods_are_of_every_method() -> None:
    found = method_mistakes(300, random.Random(1))
    assert {mistake.target for mistake in found} == set(METHODS)
    assert len({mistake.id for mistake in found}) > 250


@pytest.mark.grid
@pytest.mark.parametrize("operator", ["linear", "relu", "rms_norm", "sgd"])
def test_mistake_on_a_side_stream_is_found_and_one_of_huge_sizes_is_not_reached(
    operator: str,
) -> None:
    """What is drawn depends on how strong the suite is, which the page says; these two do not."""
    huge = "{}.numel()", SIGNATURES[operator].positional[0], ">=", 1 << 60
    found, missed = (
        Mistake(backend="asynchronous", target=(operator, "forward"), conditions=(condition,),
                effect=Effect("{} has another sign"))
        for condition in (Condition("on a side stream", "", "==", True), Condition(*huge))
    )  # fmt: skip
    if SIGNATURES[operator].lists[0]:
        list_of = "elements of all {}", huge[1], ">=", 1 << 60
        missed = replace(missed, conditions=(Condition(*list_of),))
    pool = Pool(1, OURS, SILENCE_S)
    come = reach(pool, [found, missed])
    assert come[missed.id] == ()
    campaign = Campaign(pool, partial(about, come=come))
    verdicts = campaign.run([found], ())
    campaign.check_killers(verdicts)
    assert verdicts[0].answer.case.endswith(("rule:side-stream", "/design"))
    assert verdicts[0].answer.case in come[found.id]
    ((_, answer, _),) = campaign.pool.ask([(0, about(missed, "quick"))])
    assert (answer.outcome, answer.reason) == ("survived", f"no call meets {missed.conditions[0]}")
