"""Ranks that meet: who is named when one does not come; who is in it when they meet again."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistNetworkError, DistStoreError, HashStore

from anychip.comm import Meeting, generations, meeting
from anychip.comm.generations import Seat
from anychip.comm.meeting import meet
from anychip.contract import CommunicationError


def come(store: HashStore, rank: int, world_size: int, timeout_s: float) -> None:
    meet(store, rank, world_size, timeout_s=timeout_s, where=f"rank {rank}: start")


def error_of(rank: int, store: HashStore, timeout_s: float) -> CommunicationError:
    with pytest.raises(CommunicationError) as caught:
        come(store, rank, 4, timeout_s)
    return caught.value


def test_all_who_come_meet() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(come, store, rank, 3, 30.0) for rank in range(3)]
    assert [call.result() for call in calls] == [None] * 3


def test_first_to_give_up_speaks_for_all_and_to_those_who_come_too_late() -> None:
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(come, store, 1, 4, 60.0)
        store.wait(["place/1"], timedelta(seconds=30))
        errors = [error_of(0, store, 0.2)]
        error = patient.exception(timeout=30)  # its own limit is not waited for
    assert isinstance(error, CommunicationError)
    errors += [error, error_of(2, store, 60.0)]
    for rank, found in zip((0, 1, 2), errors, strict=True):
        assert str(found) == f"rank {rank}: start: ranks 2, 3 did not come within 0.2 s"
        assert found.ranks == (2, 3)


def test_rank_that_gives_up_stays_until_the_others_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_NEWS_S", 60.0)
    store = HashStore()
    store.set("place/1", "here")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(come, store, 0, 3, 0.1)
        store.wait(["told/0"], timedelta(seconds=30))
        with pytest.raises(TimeoutError):
            call.result(timeout=0.5)
        store.set("told/1", "")
        assert isinstance(call.exception(timeout=30), CommunicationError)


def test_rank_that_is_lost_meanwhile_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_NEWS_S", 0.1)
    store = HashStore()
    store.set("place/1", "here")
    assert error_of(0, store, 0.1).ranks == (2, 3)


def test_rank_that_comes_while_another_gives_up_is_not_named() -> None:
    class TimeIsUp(HashStore):
        def wait(self, keys: list[str], timeout: timedelta) -> None:
            self.compare_set("place/1", "", "here")
            raise DistStoreError("wait timeout")

    come(TimeIsUp(), 0, 2, 0.1)


def test_store_that_is_gone_is_told_by_its_machine() -> None:
    class Gone(HashStore):
        def wait(self, keys: list[str], timeout: timedelta) -> None:
            raise DistNetworkError("connection reset")

        def multi_get(self, keys: list[str]) -> list[bytes]:
            raise DistNetworkError("connection reset")

    error = error_of(1, Gone(), 0.1)
    assert error.reason == "the store, on rank 0's machine, cannot be reached any more"
    assert error.ranks == (0,)


class Processes:
    """Processes that are threads here, each of one name; they come when they are told to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(generations, "name_of_process", lambda: threading.current_thread().name)
        self.store, self._pool = HashStore(), ThreadPoolExecutor(8)

    def come(
        self, name: str, former: int | None = None, timeout_s: float = 30.0, **meeting: float
    ) -> Future[Seat]:
        def body() -> Seat:
            threading.current_thread().name = name
            return generations.come(self.store, former, Meeting(**meeting), timeout_s)  # type: ignore[arg-type]

        return self._pool.submit(body)

    def wait_for(self, count: int, generation: int) -> None:
        while generations.num_waiting(self.store, generation - 1) < count:
            time.sleep(0.005)


def test_slow_rank_is_left_to_the_next_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Processes(monkeypatch)
    most = {"at_least": 2, "at_most": 3, "settle_s": 0.2}
    first = [ranks.come(name, former, **most) for name, former in (("b", 1), ("c", 2))]
    assert [call.result(30) for call in first] == [Seat(1, 0, 2), Seat(1, 1, 2)]
    slow = ranks.come("a", 0, **most)  # it was rank 0, and would be enough with a new one
    new = ranks.come("n", None, **most)
    ranks.wait_for(2, generation=2)
    time.sleep(0.5)
    assert not slow.done()
    assert not new.done()
    again = [ranks.come(name, None, at_least=4, at_most=4) for name in ("c", "b")]
    assert [call.result(30) for call in again] == [Seat(2, 1, 4), Seat(2, 0, 4)]
    assert sorted([slow.result(30).rank, new.result(30).rank]) == [2, 3]


def test_more_than_there_are_places_for_wait_for_the_next_meeting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, two = Processes(monkeypatch), {"at_least": 2, "at_most": 2}
    new = ranks.come("new", None, **two)
    ranks.wait_for(1, generation=1)
    # Three come before the roster is closed: those of the generation before are first.
    held = generations._closed

    def closed(roster: generations.Roster, **more: Any) -> generations.Roster:
        return held(roster, **more) if len(roster.members) == 3 else roster

    monkeypatch.setattr(generations, "_closed", closed)
    old = [ranks.come(f"old {rank}", rank, **two) for rank in (0, 1)]
    assert [call.result(30) for call in old] == [Seat(1, 0, 2), Seat(1, 1, 2)]
    ranks.wait_for(1, generation=2)
    monkeypatch.undo()
    monkeypatch.setattr(generations, "name_of_process", lambda: threading.current_thread().name)
    again = [ranks.come("old 0", None, at_least=2, at_most=3, settle_s=0.2)]
    assert again[0].result(30) == Seat(2, 0, 2)
    assert new.result(30) == Seat(2, 1, 2)


def test_process_that_nobody_meets_gives_up_and_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Processes(monkeypatch)
    new = ranks.come("new", None, at_least=1, at_most=1, timeout_s=0.3)
    with pytest.raises(CommunicationError, match=r"1 came to generation 1 within 0\.3 s; this pro"):
        new.result(30)
    assert generations.num_waiting(ranks.store, 0) == 0
    assert ranks.come("old", 3, at_least=1, at_most=1).result(30) == Seat(1, 0, 1)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [({"at_least": 0, "at_most": 2}, "got 0 and 2"), ({"at_least": 3, "at_most": 2}, "got 3 and"),
     ({"at_least": 1, "at_most": 1, "settle_s": -1}, "settle_s of at least 0 expected, got -1")],
)  # fmt: skip
def test_meeting_of_nobody_is_refused(wrong: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Meeting(**wrong)  # type: ignore[arg-type]
