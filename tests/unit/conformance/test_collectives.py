"""Do the questions about collectives know the answers, and do failing ranks end as they should?"""

import math
import sys
from typing import Any

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
    trial = rank_trials.Trial(alone(), torch.device("cpu"), dtype, "integers")
    values = trial.input(0, 1000).to(torch.int64)
    assert 16 * int(values.abs().max()) <= torch.iinfo(dtype).max
    assert 20 * int(values.abs().max()) > torch.iinfo(dtype).max
    if dtype in (torch.int32, torch.int64):
        assert not torch.equal(values.to(torch.float32).to(torch.int64), values)


@pytest.mark.parametrize(("numel", "parts"), [(0, 2), (1, 2), (7, 3), (7, 4), (8, 4), (5, 1)])
def test_cuts_hold_every_element_once(numel: int, parts: int) -> None:
    found = {way: rank_trials.cut(way, numel, parts) for way in rank_trials.CUTS}
    assert all(sum(s) == numel and len(s) == parts for s in found.values() if s is not None)
    assert (found["even"] is None) == (numel % parts == 0)
    assert parts == 1 or (found["gap"] or [])[parts // 2] == 0


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.uint8], ids=str)
def test_rare_sums_end_at_the_ends_of_the_type(dtype: torch.dtype, world: int) -> None:
    parts = [torch.ones(14, dtype=dtype) for _ in range(world)]
    rank_trials._make_rare(parts, "sum", 0)
    found, _ = rank_trials.joined(parts, "sum")
    if dtype.is_floating_point:
        assert np.isnan(found[0])
        assert np.isinf(found[1])
        assert np.isinf(found[4]) == (world > 1)
        assert np.abs(found[5]) > 0.9 * torch.finfo(dtype).max
        assert found[6] == world
    else:
        info = torch.iinfo(dtype)
        assert found[:3].tolist() == [info.max, info.min, world]


def test_wrong_infinity_number_or_nan_is_found() -> None:
    top = torch.tensor([2.0**127, float("nan"), 1.0])
    right = torch.tensor([float("inf"), float("nan"), 2.0])
    rank_trials.check_joined("sum", right, [top, top], "sum")
    for at, value in ((0, 2.0**127), (0, -float("inf")), (1, 0.0), (2, float("inf"))):
        wrong = right.clone()
        wrong[at] = value
        with pytest.raises(CheckFailedError, match=rf"first at \[{at}\]"):
            rank_trials.check_joined("sum", wrong, [top, top], "sum")
    for largest in (1.0, float("nan")):  # a maximum with NaN is that of the numbers, or NaN
        got, parts = torch.tensor([largest]), [torch.tensor([float("nan")]), torch.ones(1)]
        rank_trials.check_joined("max", got, parts, "max")
    with pytest.raises(CheckFailedError):
        rank_trials.check_joined("max", torch.zeros(1), parts, "max")


def test_what_a_rank_found_itself_is_shown_before_what_follows_from_it() -> None:
    answers = [
        Answer(kind="CommunicationError", error="rank 2 aborted", seconds=0.1),
        Answer(kind="died", error="no answer within 60 s", seconds=0.0),
        Answer(kind="CheckFailedError", error="5 expected", seconds=9.0),
    ]
    with pytest.raises(CheckFailedError) as found:
        collectives.all_well(answers)
    assert [line[:6] for line in str(found.value).splitlines()] == ["rank 2", "rank 0", "rank 1"]


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
    collectives.same_everywhere([{"a": "1", "b": "2"}, {"a": "1"}, {"c": "3"}])
    with pytest.raises(CheckFailedError, match="a: the ranks' bits differ"):
        collectives.same_everywhere([{}, {"a": "1"}, {"a": "3"}])


def test_backend_that_no_process_could_make_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference_to(RanksBackend())["class"] == "RanksBackend"
    script = type("Script", (HonestBackend,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Script", script, raising=False)
    for kind in (type("Here", (HonestBackend,), {}), script):
        with pytest.raises(ValueError, match="a class that can be imported expected"):
            reference_to(kind())


def test_ranks_answer_and_report_what_goes_wrong() -> None:
    """One start of processes for all of it."""
    ranks = Ranks(RanksBackend())

    def ask(question: str, world_size: int = 2, **arguments: Any) -> list[Answer]:
        return ranks.ask(question, world_size=world_size, **arguments)

    try:
        for number, world_size in enumerate((2, 4, 3, 2)):
            told = ask("ask_barrier", world_size, number=number)
            assert [a.kind for a in told] == [""] * world_size
        unknown = ask("ask_values", call="all_reduce", dtype="int3")
        assert {answer.kind for answer in unknown} == {"KeyError"}
        assert [a.kind for a in ask("ask_order")] == ["", ""], "they go on after a failure"
        ranks.become(WRONG["work-done-too-early"]())
        assert "is_done() is True" in ask("ask_early", number=1)[0].error
        ranks.become(WRONG["close-breaks-off"]())
        assert "just before close() are wrong" in ask("ask_close")[0].error
        ranks.become(RanksBackend())
        first, odd, last = ask("ask_death", 3, timeout_s=2.0)
        assert (first.kind, last.kind) == ("CommunicationError", "CommunicationError")
        assert odd.kind == "died"
        assert "SIGKILL" in odd.error
        assert ranks._members == [], "when one has died, all have ended"
    finally:
        ranks.close()
