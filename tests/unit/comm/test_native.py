"""What a communicator over a chip's own library says before that library is asked."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from anychip import CommunicationError
from anychip.comm import native
from anychip.comm.native import compare_devices, refuse_shared


def test_ranks_with_devices_of_their_own_are_accepted() -> None:
    refuse_shared(["a on x", "b on x", "a on y"], "world, rank 0 of 3", "CCL")


def test_ranks_with_one_device_are_named() -> None:
    with pytest.raises(CommunicationError) as caught:
        refuse_shared(["a on x", "b on x", "a on x"], "world, rank 2 of 3", "CCL")
    assert caught.value.ranks == (0, 2)
    assert "CCL needs one device per rank" in str(caught.value)
    assert "ranks 0 and 2 have device a on x" in str(caught.value)
    assert "set_device" in str(caught.value)


def test_every_ranks_place_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.socket, "gethostname", lambda: "host")
    store = HashStore()
    job: Any = SimpleNamespace(rank=0, world_size=2, store=store, where="world, rank 0 of 2")
    store.set("device/1", "b on host")
    compare_devices(job, "a", "CCL")
    store.set("device/1", "a on host")
    with pytest.raises(CommunicationError, match="ranks 0 and 1"):
        compare_devices(job, "a", "CCL")
