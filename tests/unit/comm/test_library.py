"""What a transport over a chip's own library says before that library is asked."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from anychip import CommunicationError
from anychip.comm import library
from anychip.comm.library import Library, refuse_shared
from anychip.contract import Capabilities, CollectiveCall, Membership


def job_of(*others: str) -> Any:
    """Rank 0's, with what the other ranks have said."""
    store = HashStore()
    for rank, place in enumerate(others, 1):
        store.set(f"device/{rank}", place)
    return SimpleNamespace(rank=0, world_size=1 + len(others), store=store)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.socket, "gethostname", lambda: "x")


def test_ranks_with_devices_of_their_own_are_accepted() -> None:
    refuse_shared(job_of("b on x", "a on y"), "a", "CCL")


def test_ranks_with_one_device_are_named() -> None:
    with pytest.raises(CommunicationError) as caught:
        refuse_shared(job_of("b on x", "a on x"), "a", "CCL")
    assert caught.value.ranks == (0, 2)
    assert str(caught.value).startswith("world, rank 0 of 3: start: CCL needs one device per rank")
    assert "ranks 0 and 2 have device a on x" in str(caught.value)
    assert "set_device" in str(caught.value)


def test_part_of_a_group_knows_what_the_library_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(library.dist, "new_group", lambda ranks, **how: tuple(ranks))
    job: Any = SimpleNamespace(timeout_s=1.0)
    takes, connected = Capabilities({}, {}), []
    whole = Library(job, Membership((0, 1), 0), "acmeccl", "acme", takes, connected.append)
    assert whole.part(Membership((0,), 0)).capabilities is takes
    assert connected == [(0, 1), (0,)]


def test_abort_leaves_a_call_that_is_being_made_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries crash when a group is destroyed while they are given a call of it."""
    events: list[str] = []
    is_inside, may_go_on = threading.Event(), threading.Event()

    def slow(tensor: torch.Tensor, *_: object, **__: object) -> None:
        is_inside.set()
        may_go_on.wait(60)
        events.append("called")

    monkeypatch.setattr(library.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(library.dist, "new_group", lambda ranks, **how: tuple(ranks))
    monkeypatch.setattr(library.dist, "all_reduce", slow)
    monkeypatch.setattr(library, "_CALL_S", 60.0)
    job: Any = SimpleNamespace(timeout_s=1.0)
    give_up = lambda group: events.append("aborted")  # noqa: E731
    ours = Library(job, Membership((0, 1), 0), "acmeccl", "acme", abort=give_up)
    call = CollectiveCall("all_reduce", (torch.ones(1),), (torch.ones(1),))

    caller = threading.Thread(target=ours.all_reduce, args=(call,))
    caller.start()
    assert is_inside.wait(60)
    ender = threading.Thread(target=ours.abort)
    ender.start()
    ender.join(0.05)
    may_go_on.set()
    for thread in (caller, ender):
        thread.join(60)

    assert events == ["called", "aborted"]
    with pytest.raises(RuntimeError, match="the group has been given up"):
        ours.all_reduce(call)
    assert len(events) == 2


def test_call_that_never_returns_does_not_keep_the_job_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[object] = []
    monkeypatch.setattr(library.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(library.dist, "new_group", lambda ranks, **how: tuple(ranks))
    monkeypatch.setattr(library, "_CALL_S", 0.01)
    job: Any = SimpleNamespace(timeout_s=1.0)
    ours = Library(job, Membership((0, 1), 0), "acmeccl", "acme", abort=events.append)
    stuck = threading.Thread(target=ours._turn.acquire)
    stuck.start()
    stuck.join()
    ours.abort()
    assert events == [(0, 1)]
