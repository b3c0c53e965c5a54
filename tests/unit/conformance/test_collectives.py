"""Do the questions about collectives know the answers, and do failing ranks end as they should?"""

import math

import numpy as np
import pytest
import torch

from anychip.comm import alone
from anychip.conformance import rank_trials
from anychip.conformance.case import CheckFailedError
from anychip.conformance.chapters import collectives
from anychip.conformance.ranks import Answer, Ranks, reference_to
from tests.meta.honest import HonestBackend
from tests.meta.wrong_collectives import CATALOGUE, RanksBackend

FLOATS = [torch.float32, torch.bfloat16, torch.float16]

WRONG = {wrong.name: wrong.make for wrong in CATALOGUE}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sum_in_any_order_is_within_the_bound_and_one_rank_less_is_not(dtype: torch.dtype) -> None:
    parts = [torch.randn(400, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    parts = [part.to(dtype) for part in parts]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        total = parts[order[0]].clone()
        for rank in order[1:]:
            total += parts[rank]
        rank_trials.check_joined("sum", total, parts, "sum")
        rank_trials.check_joined("avg", total / 4, parts, "avg")
    with pytest.raises(CheckFailedError, match="elements are wrong; first at"):
        rank_trials.check_joined("sum", total - parts[3], parts, "sum")


def test_want_is_the_exact_sum() -> None:
    parts = [torch.tensor([1e8, 0.1]), torch.tensor([1.0, 0.2]), torch.tensor([-1e8, 0.3])]
    want, _ = rank_trials.joined(parts, "sum")
    assert want.tolist() == [math.fsum(float(p[i]) for p in parts) for i in range(2)]
    assert rank_trials.joined(parts, "max")[0].tolist() == [1e8, float(np.float32(0.3))]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64], ids=str)
def test_integers_of_a_trial_use_their_type_and_their_sum_fits(dtype: torch.dtype) -> None:
    device = torch.device("cpu")
    trial = rank_trials.Trial(alone(), device, dtype, "integers")
    values = trial.input(0, 1000).to(torch.int64)
    assert 16 * int(values.abs().max()) <= torch.iinfo(dtype).max
    assert 20 * int(values.abs().max()) > torch.iinfo(dtype).max
    if dtype in (torch.int32, torch.int64):
        assert not torch.equal(values.to(torch.float32).to(torch.int64), values)


@pytest.mark.parametrize(("numel", "parts"), [(0, 2), (1, 2), (7, 4), (8, 4)])
def test_cuts_hold_every_element_once(numel: int, parts: int) -> None:
    found = list(rank_trials.cuts(numel, parts))
    assert all(sum(sizes) == numel for sizes in found if sizes is not None)
    assert (found[0] is None) == (numel % parts == 0)


def test_rank_that_was_told_too_late_or_nothing_fails() -> None:
    good = Answer(kind="CommunicationError", error="rank 1 is lost", ranks=(1,), seconds=0.1)
    collectives.check_told(0, good, names=1)
    late = Answer(kind="CommunicationError", error="rank 1 is lost", ranks=(1,), seconds=99.0)
    for wrong in (late, Answer(value=None), Answer(kind="OSError", error="OSError: broken pipe")):
        with pytest.raises(CheckFailedError):
            collectives.check_told(0, wrong)
    with pytest.raises(CheckFailedError, match="has to name rank 2"):
        collectives.check_told(0, good, names=2)


def test_bits_that_differ_between_ranks_are_a_failure() -> None:
    collectives.same_everywhere([{"a": "1", "b": "2"}, {"a": "1"}])
    with pytest.raises(CheckFailedError, match="a: the ranks' bits differ"):
        collectives.same_everywhere([{"a": "1"}, {"a": "3"}])


def test_backend_that_no_process_could_make_is_refused() -> None:
    assert reference_to(RanksBackend())["class"] == "RanksBackend"
    with pytest.raises(ValueError, match="a class that can be imported expected"):
        reference_to(type("Here", (HonestBackend,), {})())


def test_ranks_answer_and_report_what_goes_wrong() -> None:
    """One start of processes for all of it."""
    ranks = Ranks(RanksBackend(), 2)
    try:
        assert [a.kind for a in ranks.ask("ask_barrier", number=0)] == ["", ""]
        unknown = ranks.ask("ask_values", call="all_reduce", dtype="int3")
        assert {answer.kind for answer in unknown} == {"KeyError"}
        assert [a.kind for a in ranks.ask("ask_order")] == ["", ""], "they go on after a failure"
        ranks.become(WRONG["work-done-too-early"]())
        assert "is_done() is True" in ranks.ask("ask_early", number=1)[0].error
        ranks.become(WRONG["close-breaks-off"]())
        assert "just before close() are wrong" in ranks.ask("ask_close")[0].error
        ranks.become(RanksBackend())
        first, last = ranks.ask("ask_death", timeout_s=2.0)
        assert first.kind == "CommunicationError"
        assert last.kind == "died"
        assert "SIGKILL" in last.error
        assert ranks._members == [], "when one has died, all have ended"
    finally:
        ranks.close()
