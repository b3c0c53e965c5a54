"""Who is named when ranks make different calls, and when the odd one is the last to say so."""

import pytest
from torch.distributed import HashStore

from anychip.comm import ledger
from anychip.comm.ledger import Failure, Ledger, Note
from anychip.contract import Membership


def waiting_ledger(store: HashStore, rank: int) -> tuple[Ledger, Note]:
    """The ledger of one of three ranks, of which rank 0 has left out the first call."""
    found = Ledger(store, Membership((0, 1, 2), rank), check="step", ask=lambda _: None)
    note, _ = found.enter("sum of 8 float32" if rank == 0 else "gather of 8 float32")
    note.waited = note.begun
    return found, note


def test_judge_of_a_tie_waits_for_the_rank_that_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store, pauses = HashStore(), []
    ledgers = [waiting_ledger(store, rank)[0] for rank in range(3)]
    ledgers[0].answer(1)

    def third_rank_comes(_: float) -> None:
        pauses.append(None)
        if len(pauses) == 3:
            ledgers[2].answer(1)

    monkeypatch.setattr(ledger, "_ANSWER_S", 0.0)
    monkeypatch.setattr(ledger, "_GRACE_S", 0.0)
    monkeypatch.setattr(ledger.time, "sleep", third_rank_comes)
    failure = ledgers[1].judge(0.0)
    assert isinstance(failure, Failure)
    assert failure.ranks == (0,)
    assert "ranks 1, 2: gather of 8 float32" in failure.reason
