"""Ranks that meet: who is named when one does not come, whenever the others have started."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch.distributed import DistNetworkError, HashStore

from anychip.contract import CommunicationError
from anychip.contract.collectives.meeting import meet


def come(store: HashStore, rank: int, world_size: int, timeout_s: float) -> None:
    meet(store, rank, world_size, timeout_s=timeout_s, where=f"rank {rank}: start")


def error_of(call: Future[None]) -> CommunicationError:
    error = call.exception(timeout=30)
    assert isinstance(error, CommunicationError), error
    return error


def test_all_who_come_meet() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(come, store, rank, 3, 30.0) for rank in range(3)]
    assert [call.result() for call in calls] == [None] * 3


def test_first_to_give_up_speaks_for_all_and_to_those_who_come_too_late() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        begin = time.monotonic()
        patient = pool.submit(come, store, 1, 4, 60.0)
        hasty = pool.submit(come, store, 0, 4, 0.2)
        errors = [error_of(hasty), error_of(patient)]
    assert time.monotonic() - begin < 30, "the other's limit was not waited for"
    with pytest.raises(CommunicationError) as late:
        come(store, 2, 4, 60.0)
    for error in [*errors, late.value]:
        assert error.ranks == (2, 3)
        assert "ranks 2, 3 did not come within" in str(error)
    assert str(errors[1]).startswith("rank 1: start: ")


def test_rank_that_comes_while_another_gives_up_is_not_named() -> None:
    """The place is taken before anybody can write into it that it stayed empty."""

    class ComesNow(HashStore):
        def check(self, keys: list[str]) -> bool:
            found: bool = super().check(keys)
            if keys == ["place/1"] and not found:
                self.compare_set("place/1", "", "here")
            return found

    come(ComesNow(), 0, 2, 0.1)


def test_store_that_is_gone_is_told_by_the_name_of_its_rank() -> None:
    class Gone(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise DistNetworkError("connection reset")

    with pytest.raises(CommunicationError, match="nor the process of rank 0") as caught:
        come(Gone(), 1, 2, 0.1)
    assert caught.value.ranks == (0,)
