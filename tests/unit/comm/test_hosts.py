"""Do all ranks come to one answer how their hosts are connected, and is memory theirs alone?"""

import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import HashStore

from anychip.comm import gloo, hosts, shared_memory
from anychip.comm.hierarchical import Hosts
from anychip.comm.hosts import Seat
from anychip.contract import CommunicationError, Membership

needs_native = pytest.mark.skipif(
    bool(shared_memory.load()[1]), reason=f"no shared memory here: {shared_memory.load()[1]}"
)


def connect(
    monkeypatch: pytest.MonkeyPatch, *wishes: hosts.HostTransport | None,
    missing: Callable[[int], str] = lambda rank: "",
    host: Callable[[int], str] = lambda rank: "here", timeout_s: float = 10.0,
) -> list[Any]:  # fmt: skip
    """What each of so many ranks gets: connections, those of gloo made up, or an error."""
    store, found, mine = HashStore(), [None] * len(wishes), threading.local()
    monkeypatch.setattr(hosts, "_missing", lambda: missing(mine.rank))
    monkeypatch.setattr(hosts, "_host", lambda: host(mine.rank))
    monkeypatch.setattr(gloo, "Gloo", lambda *given: Mock(description=given[-1]))

    def body(rank: int) -> None:
        mine.rank = rank
        try:
            seat = Seat(rank, len(wishes), "127.0.0.1", timeout_s, wishes[rank])
            found[rank] = hosts.connect(store, seat)
        except CommunicationError as error:
            found[rank] = str(error).partition("start: ")[2]

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(wishes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def memory_of_this_process() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:anychip (" in line]  # others have longer names


@needs_native
def test_ranks_of_one_host_share_memory_that_is_gone_when_they_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared, descriptors = os.listdir("/dev/shm"), len(os.listdir("/proc/self/fd"))
    ends = connect(monkeypatch, None, None)
    sent, came = torch.arange(300_000), torch.zeros(300_000, dtype=torch.int64)
    messages, limit = (
        [ends[1].recv([came], 0, 7), ends[0].send([sent], 1, 7)],
        timedelta(seconds=10),
    )
    waits = [threading.Thread(target=message.wait, args=(limit,)) for message in messages]
    for wait in waits:
        wait.start()
    for wait in waits:
        wait.join()
    assert torch.equal(came, sent)
    assert len(memory_of_this_process()) == 2
    for end in ends:
        end.abort()
        end.close()
        end.close()
    assert memory_of_this_process() == []
    assert (os.listdir("/dev/shm"), len(os.listdir("/proc/self/fd"))) == (shared, descriptors)
    with pytest.raises(RuntimeError, match="given up"):
        ends[0].send([sent], 1, 7).wait(timedelta(seconds=1))


@pytest.mark.parametrize(
    ("wishes", "changes", "said"),
    [
        (("sockets",) * 3, {}, "as ANYCHIP_TRANSPORT says"),
        ((None,) * 3, {"missing": lambda rank: "not built" * (rank == 1)},
         "no shared memory on rank 1: not built"),
        ((None,) * 3, {"host": str},
         "no shared memory: ranks 1, 2 and rank 0 have not one host and user"),
        (("shared_memory",) * 3, {"missing": lambda rank: "not built" * (rank == 1)},
         "ANYCHIP_TRANSPORT=shared_memory: no shared memory on rank 1: not built"),
        (("shared_memory",) * 3, {"host": str},
         "ANYCHIP_TRANSPORT=shared_memory: no shared memory: ranks 1, 2 and rank 0 have not one"
         " host and user"),
        (("sockets", None, "sockets"), {},
         "ANYCHIP_TRANSPORT must be the same on all ranks: rank 0: sockets, rank 1: unset,"
         " rank 2: sockets"),
    ],
    ids=["asked-for", "not-built", "two-hosts", "asked-not-built", "asked-hosts", "unlike"],
)  # fmt: skip
def test_ranks_that_share_no_memory_all_say_why(
    monkeypatch: pytest.MonkeyPatch, wishes: Any, changes: dict[str, Any], said: str
) -> None:
    found = connect(monkeypatch, *wishes, **changes)
    assert [getattr(end, "description", end) for end in found] == [said] * 3
    assert not any(isinstance(end, Hosts) for end in found)


@needs_native
def test_ranks_of_each_of_two_hosts_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = connect(monkeypatch, *(None,) * 5, host=lambda rank: "here" if rank in (0, 2) else "far")
    assert [end.host_of for end in ends] == [[0, 1, 0, 1, 1]] * 5
    assert [list(end.memory.places) for end in ends] == [[0, 2], [1, 3, 4]] * 2 + [[1, 3, 4]]
    assert len(memory_of_this_process()) == 5
    for end in ends:
        end.abort()
        end.close()
    assert memory_of_this_process() == []


@needs_native
@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        ((0, 1, 2, 3, 4, 5), "Hierarchical"), ((0, 1, 4, 5), "Hierarchical"),
        ((1, 0), "SharedCollectives"), ((0, 2, 4), "Messages"), ((0, 2, 1, 3), "Messages"),
        ((0, 1, 2), "Messages"), ((0, 1, 2, 3, 6), "Messages"), ((0, 6), "Messages"),
    ],
)  # fmt: skip
def test_group_goes_through_memory_where_its_hosts_are_alike(
    monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...], wanted: str
) -> None:
    ends = connect(monkeypatch, *(None,) * 7, host=lambda rank: str(rank // 2))
    for place, rank in enumerate(ranks):
        transport = ends[rank].transport(Membership(ranks, place, 3), 1.0)
        assert type(transport).__name__ == wanted
        transport.close()
    for end in ends:
        end.close()


@needs_native
def test_memory_is_handed_to_ranks_whatever_else_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    make = hosts._listener

    def with_strangers() -> socket.socket:
        listener = make()
        for greeting in (b"", b"\xff\xff\xff\xff"):  # one that goes, and one that is no rank
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                stranger.connect(listener.getsockname())
                stranger.sendall(greeting)
        return listener

    monkeypatch.setattr(hosts, "_listener", with_strangers)
    ends = connect(monkeypatch, None, None, None)
    assert all(isinstance(end, shared_memory.SharedMemory) for end in ends)
    for end in ends:
        end.close()


@needs_native
def test_memory_is_not_handed_to_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_user", lambda end: os.geteuid() + 1)
    first, second = connect(monkeypatch, None, None, timeout_s=1.0)
    assert "rank 1 did not fetch the shared memory in 1 s" in first
    assert "hands out what rank 0 should; ANYCHIP_TRANSPORT=sockets does without" in second
