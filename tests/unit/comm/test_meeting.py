"""Ranks that meet: who is named when one does not come, whenever the others have started."""

from concurrent.futures import ThreadPoolExecutor, TimeoutError
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, DistStoreError, HashStore

from anychip.comm import meeting
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
