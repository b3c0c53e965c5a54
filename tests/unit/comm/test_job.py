"""What is waited for when a job ends."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore

from anychip.comm import job
from anychip.comm.job import Job
from anychip.comm.ledger import Failure
from anychip.comm.solo import Solo
from anychip.contract import CommunicationError, Membership


@pytest.mark.parametrize("failure", [None, Failure((1,), "rank 1 is lost")], ids=["well", "failed"])
def test_close_lets_the_device_end_unless_the_job_has_failed(failure: Failure | None) -> None:
    done: list[str] = []

    class Chip(Solo):
        def drain(self) -> None:
            done.append("drained")

        def close(self) -> None:
            done.append("closed")

    news: Any = SimpleNamespace(failure=failure, close=lambda: done.append("told"))
    named: Any = {"news": lambda *calls: news, "connect": lambda store: None}
    found = Job(0, 2, HashStore(), timeout_s=1.0, **named)
    found.hold(Chip("acme"))
    found.close()
    assert done == [*([] if failure else ["drained"]), "told", "closed"]


def test_connection_lost_after_the_rank_with_the_store_ended_names_that_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who is missing from the call is not known then: the store says it, and it is gone."""

    def missing() -> tuple[int, ...]:
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(job, "_NEWS_S", 0.0)
    news: Any = SimpleNamespace(
        failure=None, gone={0}, verdict=lambda _: None, report=lambda failure: failure
    )
    named: Any = {"news": lambda *calls: news, "connect": lambda store: None}
    found = Job(3, 4, HashStore(), timeout_s=1.0, **named)
    error = found.explain("data, rank 1 of 2: sum", OSError("closed by peer"), missing)
    assert error.ranks == (0,)
    assert "rank 0 ended, and after that rank 3 lost a connection" in str(error)


def test_rank_that_connects_while_the_others_end_is_told_why() -> None:
    """These were connected first; the failure of theirs cuts the store that this one asks."""
    failure = Failure((0,), "rank 0 sends what rank 1 does not expect")

    def connect(store: HashStore) -> None:
        raise DistNetworkError("Broken pipe")

    news: Any = SimpleNamespace(failure=failure, gone=set(), verdict=lambda _: failure)
    found = Job(2, 3, HashStore(), timeout_s=1.0, news=lambda *calls: news, connect=connect)
    with pytest.raises(CommunicationError, match=f"rank 2 of 3: start: {failure.reason}") as told:
        found.host(Membership((0, 1, 2), 2))
    assert told.value.ranks == (0,)
