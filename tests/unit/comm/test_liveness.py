"""Does the side channel find what becomes of ranks, whatever strangers send it?"""

import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from anychip.comm import heartbeat
from anychip.comm.joining import LOOPBACK
from anychip.comm.ledger import Failure
from anychip.comm.liveness import Liveness
from anychip.contract.errors import CommunicationError

SECRET = b"of the job, 16 characters"


class Ranks:
    """Ranks of one process. ``store`` has rank 0's address for strangers too."""

    def __init__(self, world_size: int, **settings: Any) -> None:
        self.store, self.world_size = HashStore(), world_size
        self.settings = {"heartbeat_s": 20.0, "progress_s": 20.0, **settings}
        self.ends: dict[int, Liveness] = {}
        self.heard = {rank: threading.Event() for rank in range(world_size)}
        self.asked: dict[int, list[str]] = {rank: [] for rank in range(world_size)}

    def come(self, rank: int, **settings: Any) -> Liveness:
        told = {"address": LOOPBACK, "secret": SECRET, **self.settings, **settings}
        end = Liveness(
            self.store, rank, self.world_size, on_failure=lambda failure: self.heard[rank].set(),
            on_question=lambda text: self.asked[rank].append(text), **told,
        )  # fmt: skip
        self.ends[rank] = end
        return end

    def failures(self, *ranks: int) -> set[Failure | None]:
        assert all(self.heard[rank].wait(15) for rank in ranks)
        return {self.ends[rank].failure for rank in ranks}


@contextmanager
def made(world_size: int, **settings: Any) -> Iterator[Ranks]:
    ranks = Ranks(world_size, **settings)
    try:
        yield ranks
    finally:
        for end in ranks.ends.values():
            end.close()


def call(store: HashStore) -> socket.socket:
    port = int(store.get("liveness").decode().split()[0])
    return socket.create_connection((LOOPBACK, port), timeout=10)


def is_open(store: HashStore) -> bool:
    try:
        call(store).close()
    except ConnectionRefusedError:
        return False
    return True


def lost(rank: int) -> Failure:
    return Failure((rank,), f"rank {rank} is lost: its process was killed or has crashed")


def die(end: Liveness) -> None:
    """What the kernel does for a process that is killed."""
    for peer in list(end._peers.values()):
        peer.socket.shutdown(socket.SHUT_RDWR)


HOSTILE = {
    "nested": b"[" * 200_000, "number": b"5\n", "infinite rank": b'{"hello": 1e999, "token": ""}\n',
    "unknown rank": b'{"hello": 77, "token": ""}\n', "no newline": b"x" * 5_000_000,
    "noise": secrets.token_bytes(4096), "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
def test_stranger_changes_nothing(sent: bytes) -> None:
    with made(3) as ranks, ExitStack() as strangers:
        for rank in (0, 1):
            ranks.come(rank)
        for _ in range(100):  # more than are kept
            end = strangers.enter_context(call(ranks.store))
            try:
                end.sendall(sent)
            except OSError:
                continue  # it was shown the door
        ranks.come(2)
        assert not is_open(ranks.store)
        die(ranks.ends[1])
        assert ranks.failures(0, 2) == {lost(1)}


def test_strangers_that_take_all_descriptors_do_not_end_the_thread() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with made(3) as ranks, ExitStack() as strangers:
        for rank in (0, 1):
            ranks.come(rank)
        for _ in range(10):  # each is answered: its other end has a descriptor too
            assert len(strangers.enter_context(call(ranks.store)).recv(32)) == 32
        last = socket.socket()  # the call takes its descriptor; none is left for the other end
        used = {int(name) for name in os.listdir("/proc/self/fd")}
        kept = [os.dup(last.fileno()) for _ in set(range(max(used))) - used]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 1, before[1]))
        try:
            last.close()
            end = strangers.enter_context(call(ranks.store))
            assert len(end.recv(32)) == 32  # the others were given up for it
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for descriptor in kept:
                os.close(descriptor)
        ranks.come(2)
        die(ranks.ends[2])
        assert ranks.failures(0, 1) == {lost(2)}


@pytest.mark.parametrize("theirs", [b"another one of 16 characters", b""])
def test_rank_with_another_secret_is_not_taken(theirs: bytes) -> None:
    with made(2) as ranks:
        ranks.come(0)
        with pytest.raises(CommunicationError, match="ANYCHIP_SECRET must be the same") as caught:
            ranks.come(1, secret=theirs)
        assert caught.value.ranks == (0,)
        ranks.come(1)


def test_thread_that_dies_is_a_failure_of_its_rank_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with made(3) as ranks:
        for rank in range(3):
            ranks.come(rank)

        def turn() -> None:
            raise MemoryError("of the test")

        monkeypatch.setattr(ranks.ends[2], "_turn", turn)
        text = "rank 2 cannot watch the others: MemoryError: of the test"
        assert ranks.failures(0, 1, 2) == {Failure((2,), text)}


@pytest.mark.parametrize("asker", [0, 1])
def test_question_of_a_rank_reaches_all_others(asker: int) -> None:
    with made(3) as ranks:
        for rank in range(3):
            ranks.come(rank)
        ranks.ends[asker].ask("7 1")
        others = [ranks.asked[rank] for rank in range(3) if rank != asker]
        deadline = time.monotonic() + 15
        while not all(others) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert others == [["7 1"]] * 2


def test_rank_that_never_calls_is_named() -> None:
    with made(3, heartbeat_s=2.0, progress_s=0.3) as ranks:
        for rank in (0, 1):
            ranks.come(rank)
        assert ranks.failures(0, 1) == {Failure((2,), "rank 2 did not call rank 0 within 2 s")}


def test_beats_of_python_are_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "load", lambda: (None, "it was not built"))
    with made(2, heartbeat_s=0.5, progress_s=6.0) as ranks:
        first, second = ranks.come(0), ranks.come(1)
        deadline = time.monotonic() + 15
        while first._peers[1].ticks < 0 and time.monotonic() < deadline:  # it has not read yet
            time.sleep(0.01)
        assert (first.why_slow, first._peers[1].patience) == ("it was not built", 10)
        beats = second._peers[0]
        begun = beats.ticks
        while beats.ticks < begun + 3:
            assert second.failure is None
            second._settled.wait(0.01)
        monkeypatch.setattr(second._heartbeat, "tick", lambda: None)  # as if it were stopped
        text = "rank 1 has not been heard of for 5 s: its process is stopped, or its machine"
        (failure,) = ranks.failures(0)
        assert failure is not None
        assert failure.ranks == (1,)
        assert failure.reason.startswith(text)


def test_silent_ranks_are_named_together_by_a_watcher_that_is_always_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: list[Failure] = []
    watcher = object.__new__(Liveness)
    watcher.heartbeat_s, watcher.progress_s, watcher._interval = 5.0, 1e6, 1.0
    watcher._judged, watcher._strangers, watcher._listener = 0.0, [], None
    place = {"patience": 1, "turned": 0.0, "host": "10.0.0.2"}
    silent: Any = [SimpleNamespace(rank=rank, heard=rank / 4, **place) for rank in (2, 1)]
    heard: Any = SimpleNamespace(rank=3, heard=1e6, **place)
    watcher._peers = {peer.rank: peer for peer in (*silent, heard)}
    monkeypatch.setattr(watcher, "_drop", lambda peer: watcher._peers.pop(peer.rank))
    monkeypatch.setattr(watcher, "_settle", lost.append)
    for turn in range(1, 11):
        heard.heard = 1e6
        watcher._judge(4.0 * turn)
    text = (
        "ranks 1, 2 have not been heard of for 5 s: their processes are stopped, or their machine,"
        " 10.0.0.2, is out of reach"
    )
    assert lost == [Failure((1, 2), text)]
