"""Batches made ahead: the same, a bounded number, no part of the state, and no thread left."""

import gc
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anychip.train import data
from anychip.train.data.prefetch import Prefetcher
from tests import warm_python

PATIENCE_S = 60.0


def loader(**options: Any) -> data.Loader:
    tokens = torch.arange(400, dtype=torch.int32)
    return data.Loader(tokens, **{"context": 8, "batch_size": 3, **options})


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "anychip-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    assert prefetch_threads() == []
    yield
    assert prefetch_threads() == []


def pageable(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 3), st.sampled_from([None, pageable]),
    st.lists(st.sampled_from(["next", "next", "next", "close", "back", "on", "loop"]), max_size=20),
)  # fmt: skip
def test_loader_with_prefetch_does_what_one_without_does(
    depth: int, world_size: int, pin: Callable[[int], torch.Tensor] | None, calls: list[str]
) -> None:
    options = {"world_size": world_size, "rank": world_size - 1, "cross_document_targets": False}
    plain, ahead = loader(**options), loader(**options, prefetch=depth, pin=pin)
    states = [plain.state_dict()]
    for call in calls:
        if call in ("next", "loop"):
            count = 1 if call == "next" else 4
            wanted = list(islice(plain, count))
            got = [ahead.next_batch()] if call == "next" else list(islice(ahead, count))
            for (x, y), (x2, y2) in zip(wanted, got, strict=True):
                assert torch.equal(x, x2)
                assert torch.equal(y, y2)
            states.append(plain.state_dict())
        elif call == "close":
            ahead.close()
        else:
            state = states[len(states) // 2] if call == "back" else states[-1]
            plain.load_state_dict(state)
            ahead.load_state_dict(state)
        assert ahead.state_dict() == plain.state_dict()
    ahead.close()
    ahead.close()


def test_position_set_by_hand_is_where_the_next_batch_comes_from() -> None:
    plain, ahead = loader(), loader(prefetch=2)
    ahead.next_batch()
    plain.position = ahead.position = 21
    assert torch.equal(plain.next_batch()[0], ahead.next_batch()[0])
    ahead.close()


class Source:
    """Counts; notes how many it made, and raises when that is more than was asked for and depth."""

    def __init__(self, depth: int) -> None:
        self.depth, self.made, self.asked = depth, 0, 0
        self.changed = threading.Condition()

    def __iter__(self) -> Iterator[Callable[[], int]]:
        while True:
            with self.changed:
                self.made += 1
                assert self.made <= self.asked + self.depth, "more was made than there is space for"
                self.changed.notify_all()
            yield partial(int, self.made)

    def ask(self) -> None:
        with self.changed:
            self.asked += 1

    def wait_until_ahead(self) -> None:
        """Until as many are made as may be: the consumer is slow, the thread is not."""
        with self.changed:
            full = self.changed.wait_for(lambda: self.made == self.asked + self.depth, PATIENCE_S)
            assert full, f"{self.made} made, {self.asked} asked for"


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_thread_makes_as_many_ahead_as_asked_and_no_more(depth: int) -> None:
    source = Source(depth)
    prefetcher = Prefetcher(iter(source), depth=depth)
    for number in range(1, 50):
        if number % 7 == 0:
            source.wait_until_ahead()
        source.ask()
        assert prefetcher.take() == number
    source.wait_until_ahead()
    prefetcher.close()
    assert source.made == source.asked + depth


def test_state_is_that_of_what_was_taken_however_much_was_made() -> None:
    made = threading.Semaphore(0)

    def pin(nbytes: int) -> torch.Tensor:
        made.release()
        return pageable(nbytes)

    ahead = loader(prefetch=3, pin=pin)
    ahead.next_batch()
    for _ in range(4):
        assert made.acquire(timeout=PATIENCE_S)
    assert ahead.state_dict()["position"] == 3
    resumed = loader()
    resumed.load_state_dict(ahead.state_dict())
    assert torch.equal(resumed.next_batch()[0], ahead.next_batch()[0])
    ahead.close()


@pytest.mark.parametrize("world_size", [1, 3])
def test_batches_made_ahead_are_those_that_come(world_size: int) -> None:
    made = []

    def pin(nbytes: int) -> torch.Tensor:
        made.append(nbytes)
        return pageable(nbytes)

    ahead = loader(prefetch=2, world_size=world_size, pin=pin)
    for _ in range(20):
        ahead.next_batch()
    ahead.close()
    assert 20 <= len(made) <= 22, "what is made and not handed out would cost time in secret"


def test_pinned_memory_is_asked_for_in_the_thread_and_holds_the_batch() -> None:
    asked: list[tuple[str, torch.Tensor]] = []

    def pin(nbytes: int) -> torch.Tensor:
        asked.append((threading.current_thread().name, pageable(nbytes)))
        return asked[-1][1]

    ahead = loader(prefetch=1, pin=pin)
    tokens, targets = ahead.next_batch()
    ahead.close()
    name, memory = asked[0]
    assert name == "anychip-prefetch"
    assert memory.nbytes == 3 * 9 * 8
    windows = memory.view(torch.int64).view(3, 9)
    assert torch.equal(windows[:, :-1], tokens)
    assert torch.equal(windows[:, 1:], targets)


@pytest.mark.parametrize("good", [0, 1, 4])
def test_error_in_the_thread_reaches_the_consumer_with_its_traceback(good: int) -> None:
    left = [good]

    def pin_until_memory_runs_out(nbytes: int) -> torch.Tensor:
        if left[0] == 0:
            raise MemoryError("no page is left")
        left[0] -= 1
        return pageable(nbytes)

    ahead = loader(prefetch=1, pin=pin_until_memory_runs_out)
    for _ in range(good):
        ahead.next_batch()
    for _ in range(2):  # the second attempt begins anew, and fails again
        with pytest.raises(MemoryError, match="no page is left") as caught:
            ahead.next_batch()
        names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert names[-1] == "pin_until_memory_runs_out"
        assert prefetch_threads() == []
        assert ahead.position == 3 * good
    left[0] = 100
    plain = loader()
    plain.position = 3 * good
    assert torch.equal(ahead.next_batch()[0], plain.next_batch()[0])
    ahead.close()


@pytest.mark.parametrize("end", ["close", "break", "num_batches", "load", "collect"])
def test_thread_ends_with(end: str) -> None:
    ahead = loader(prefetch=2, num_batches=5 if end == "num_batches" else None)
    ahead.next_batch()
    assert len(prefetch_threads()) == 2
    if end == "close":
        ahead.close()
    elif end == "load":
        ahead.load_state_dict(ahead.state_dict())
    elif end == "collect":
        del ahead
        gc.collect()
    else:
        for _ in ahead:
            assert len(prefetch_threads()) == 2
            if end == "break":
                break
        assert end == "break" or ahead.position == 15
    assert prefetch_threads() == []


class Slow(data.InMemory):
    """Gives no answer before as many have asked: a source on whose latency one waits."""

    def __init__(self, tokens: torch.Tensor, at_once: int) -> None:
        super().__init__(tokens)
        self.together, self.has_met = threading.Barrier(at_once), False

    def read(self, begin: int, end: int) -> Any:
        if not self.has_met:
            self.together.wait(PATIENCE_S)
            self.has_met = True
        return super().read(begin, end)


@pytest.mark.parametrize("depth", [2, 5])
def test_as_many_batches_are_waited_for_at_once_as_are_made_ahead(depth: int) -> None:
    tokens = torch.arange(400, dtype=torch.int32)
    options: dict[str, Any] = {"context": 8, "batch_size": 1, "seed": 1}
    slow = data.join([Slow(tokens, depth)], None)
    ahead = data.Loader(slow, prefetch=depth, num_batches=20, **options)
    for (x, y), (x2, y2) in zip(data.Loader(tokens, num_batches=20, **options), ahead, strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)


def test_no_thread_without_prefetch() -> None:
    some = loader()
    some.next_batch()
    assert prefetch_threads() == []


@pytest.mark.grid
def test_program_that_closes_nothing_ends() -> None:
    code = (
        "import torch\n"
        "from anychip.train import data\n"
        "loader = data.Loader(torch.arange(400), context=8, batch_size=2, prefetch=2)\n"
        "print(loader.next_batch()[0].shape)"
    )
    done = warm_python.run("-c", code, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "torch.Size([2, 8])\n", "")
