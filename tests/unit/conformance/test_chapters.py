"""Do chapters ask what they should of whom they should? Streams, graphs, gradients, training."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from anychip import conformance
from anychip.conformance import trainee
from anychip.conformance.arithmetic import Rounded
from anychip.conformance.case import CheckFailedError, Context
from anychip.conformance.chapters import all_cases, errors, gradients, optimizer, streams, training
from anychip.conformance.chapters.collectives import RULES
from anychip.conformance.oracles import oracle_of
from anychip.conformance.oracles import training as oracle
from anychip.conformance.rank_questions import PLANS
from anychip.dispatch import selection
from anychip.dispatch.operator import registered
from tests.meta.asynchronous import AsynchronousBackend, Stream
from tests.meta.honest import HonestBackend, HonestRows, Row, make_table, reference_rows


@pytest.fixture(autouse=True)
def selection_is_restored() -> Iterator[None]:
    before = selection.current
    yield
    selection.current = before


def test_backend_without_streams_is_not_asked_about_them() -> None:
    report = conformance.run(HonestRows(), chapters=["streams"])
    assert {result.outcome for result in report.results} == {"unsupported"}
    assert report.passed


def test_backend_without_graphs_is_asked_only_whether_it_says_so() -> None:
    report = conformance.run(HonestRows(), chapters=["device"], select="graphs or capture")
    found = {result.case: (result.outcome, result.capability) for result in report.results}
    assert found.pop("device/undeclared/capture") == ("passed", None)
    assert len(found) == 8
    assert set(found.values()) == {("unsupported", "graphs")}


def test_read_without_a_wait_comes_too_soon_on_an_asynchronous_device() -> None:
    """What every race stands on: without what is under test, it is lost."""
    backend = AsynchronousBackend()
    race, others, begin = streams.Race(Context(backend)), backend.stream(), threading.Event()
    race.stream.add(begin.wait)  # however busy the machine is
    race.start()
    with backend.use_stream(others):
        found = race.read()
    others.synchronize()
    begin.set()
    with pytest.raises(CheckFailedError, match="the bits differ"):
        race.check("read", found)


QUIET_S = 0.3


class LateThread:
    """A row for two threads, of which one begins when the other can go on no more without it.

    From then on each call waits for one of the other thread, between what it writes to the room
    and what it reads there.

    Args:
        is_shared: whether calls have one room, or each thread its own.
    """

    def __init__(self, row: Row, *, is_shared: bool) -> None:
        self.row = row
        self.room: Any = SimpleNamespace() if is_shared else threading.local()
        self.alone, self.first, self.lock = threading.get_ident(), 0, threading.Lock()
        self.called, self.has_begun = threading.Event(), False
        self.meeting = threading.Barrier(2, timeout=30 * QUIET_S)

    def call(self, *args: Any, **attrs: Any) -> Any:
        if (thread := threading.get_ident()) == self.alone:
            return self.row(*args, **attrs)
        with self.lock:
            self.first = self.first or thread
        meets, is_late = self.has_begun, thread != self.first and not self.has_begun
        self.called.set()
        while is_late and self.called.wait(QUIET_S):
            self.called.clear()
        self.room.arguments = args
        if meets and not self.meeting.broken:
            with suppress(threading.BrokenBarrierError):  # the other thread has no more calls
                self.meeting.wait()
        found = self.row(*self.room.arguments, **attrs)
        self.has_begun |= is_late
        return found


@pytest.mark.parametrize("is_shared", [True, False], ids=["one room", "two rooms"])
def test_room_that_threads_share_is_found_however_late_one_of_them_begins(is_shared: bool) -> None:
    rows = reference_rows()
    late = LateThread(rows["rms_norm", "forward"], is_shared=is_shared)
    rows["rms_norm", "forward"] = late.call
    backend = type("Late", (HonestBackend,), {"operators": make_table(rows)})()
    select = "operators/rms_norm/fp32/rule:two-threads"
    (result,) = conformance.run(backend, chapters=["operators"], select=select).results
    assert late.has_begun
    assert result.outcome == ("failed" if is_shared else "passed")
    assert ("while another thread calls it too" in result.reason) == is_shared


def test_call_is_asked_of_every_number_of_ranks_and_rule_of_one_at_least_at_level_quick() -> None:
    cases = [c for c in all_cases(Context(HonestRows()), ["collectives"]) if not c.full]
    worlds: dict[str, str] = {}
    for case in cases:
        _, world, name = case.id.split("/", 2)
        worlds[name] = worlds.get(name, "") + world
    assert all(worlds[f"{call}/{dtype}"] == "1234" for call in PLANS for dtype in ("fp32", "int64"))
    assert set(RULES) | {"killed", "abort"} <= set(worlds)


def test_every_operator_of_several_tensors_refuses_a_shape_but_those_that_are_listed() -> None:
    """So that the chapter's list of exceptions is neither too long nor too short."""
    free, context = set(), Context(HonestRows())
    for name, operator in registered().items():
        if operator.spec.namespace != "anychip":
            continue
        placed = errors.trial_of(operator, oracle_of(operator.spec)).place(context)
        try:
            refused = list(errors.shape(context, operator, placed))
        except CheckFailedError:
            refused = []
        if not refused and len(placed.placed) > 1:
            free.add(name)
    assert free == errors.ANY_SHAPES


def test_second_derivative_beside_a_jump_is_that_of_the_smaller_step() -> None:
    positional = SimpleNamespace(positional=("x",))
    trial: Any = SimpleNamespace(
        arguments=((torch.zeros(1),), {}), leaf_names=("x",), signature=positional
    )

    def backward(given: Any, x: Rounded) -> tuple[Rounded]:
        return (Rounded.exact(2.0 * x.value + (x.value > gradients.STEP / 2)),)

    oracle: Any = SimpleNamespace(backward=backward)
    (found,) = gradients.hessian_product(trial, oracle, [torch.ones(1)], [np.ones(1)])
    np.testing.assert_allclose(found, [2.0], rtol=1e-9)


def test_history_of_the_loss_scale_is_what_its_rule_gives() -> None:
    """Counted anew: back-off at the second overflow since growth, growth at two clean in a row."""
    scale, clean, skipped = 1024.0, 0, 0
    for odd, want in optimizer.HISTORY:
        clean, skipped = (0, skipped + 1) if odd is not None else (clean + 1, skipped)
        if odd is not None and skipped >= 2:
            scale /= 2
        elif clean == 2:
            scale, clean, skipped = scale * 2, 0, 0
        assert scale == want


def test_text_of_another_seed_is_another_and_of_seed_0_is_that_of_always() -> None:
    first = trainee.batch(trainee.Sizes(), 3, 1)[0]
    assert torch.equal(first, trainee.batch(trainee.Sizes(), 3, 1, seed=0)[0])
    assert not torch.equal(first, trainee.batch(trainee.Sizes(), 3, 1, seed=1)[0])


def test_operators_that_were_not_called_are_noticed() -> None:
    recipe = oracle.RECIPES["momentum"]
    with pytest.raises(CheckFailedError, match="something else did the work"):
        training.check_work({}, recipe)


def test_text_and_weights_are_the_same_whatever_the_generator() -> None:
    first = trainee.decoder(trainee.Sizes(), torch.device("cpu"))
    torch.manual_seed(5)
    second = trainee.decoder(trainee.Sizes(), torch.device("cpu"))
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    tokens, targets = trainee.batch(trainee.Sizes(), 3, 1)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert tokens.tolist() != trainee.batch(trainee.Sizes(), 1, 3)[0].tolist()
    ruled = (targets == (tokens * 5 + 3) % 32).float().mean()
    assert 0.7 < float(ruled) < 1.0


def test_asynchronous_device_tells_who_waits_what_its_work_raised() -> None:
    backend = AsynchronousBackend()
    stream = backend.stream()
    assert isinstance(stream, Stream)
    stream.add(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        backend.synchronize()
    done = stream.mark()
    backend.synchronize()
    assert done.is_set()
