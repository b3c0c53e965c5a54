"""What a transport over a chip's own library says before that library is asked."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from anychip import CommunicationError
from anychip.comm import library
from anychip.comm.library import Library, refuse_shared
from anychip.contract import Capabilities, Membership


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
