"""When a rank goes wrong, do all others hear of it: soon, by name, and with the call?"""

import signal
from pathlib import Path
from typing import Any

import pytest

from anychip.comm import heartbeat
from tests.integration.collectives import striking
from tests.integration.collectives.processes import Outcome, Server

needs_native = pytest.mark.skipif(
    bool(heartbeat.load()[1]), reason=f"beats need Python's interpreter: {heartbeat.load()[1]}"
)


CHECKS = {"always": {"check": "always"}, "step": {"check": "step", "heartbeat_s": 1.5}}
checked = pytest.mark.parametrize("job", CHECKS.values(), ids=CHECKS)


def failed(outcomes: list[Outcome], *but: int) -> list[Outcome]:
    """The ranks but some; each must have ended by itself, with an error of communication."""
    rest = [outcome for rank, outcome in enumerate(outcomes) if rank not in but]
    assert [(o.status, o.kind) for o in rest] == [(0, "CommunicationError")] * len(rest)
    return rest


def assert_others_name(rank: int, outcomes: list[Outcome], text: str) -> None:
    """The error of each other rank names this one, and says this."""
    for outcome in failed(outcomes, rank):
        assert outcome.ranks == (rank,)
        assert text in outcome.error


@pytest.mark.grid
@checked
@pytest.mark.parametrize(
    ("call", "how", "odd"),
    [
        ("all_reduce", "shape", 0), ("all_reduce", "dtype", 1), ("all_reduce", "reduction", 2),
        ("all_reduce", "call", 0), ("reduce_scatter", "shape", 1),
        ("reduce_scatter", "reduction", 0), ("all_gather", "dtype", 2), ("broadcast", "shape", 2),
        ("broadcast", "root", 1), ("all_to_all", "dtype", 0), ("split", "groups", 1),
        ("all_gather", "missing", 1), ("reduce_scatter", "order", 2),
    ],
)  # fmt: skip
def test_collective_that_one_rank_makes_differently_fails_on_all(
    server: Server, job: dict[str, Any], call: str, how: str, odd: int
) -> None:
    for outcome in failed(server.run("one_call", 3, call=call, odd=odd, how=how, job=job)):
        assert outcome.ranks == (odd,)
        assert "the ranks disagree in call #1" in outcome.error
        assert f"rank {odd}: " in outcome.error
        others = ", ".join(str(rank) for rank in range(3) if rank != odd)
        assert f"ranks {others}: {call}" in outcome.error


@pytest.mark.grid
@checked
@pytest.mark.parametrize(("call", "how", "said"), [
    ("all_to_all", "shape", ("elements to rank", "which has room for")),
    *(("exchange", how, ("the ranks disagree: rank", "which expects"))
      for how in ("shape", "dtype")),
])  # fmt: skip
def test_message_that_its_receiver_takes_for_another_fails_on_all(
    server: Server, job: dict[str, Any], call: str, how: str, said: tuple[str, str]
) -> None:
    for outcome in failed(server.run("one_call", 3, call=call, odd=1, how=how, job=job)):
        assert all(text in outcome.error for text in said), outcome.error


@pytest.mark.grid
@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "exchange"])
def test_rank_that_does_not_come_is_named_within_the_time_limit(server: Server, call: str) -> None:
    outcomes = server.run("stays_away", 3, call=call, absent=0, job={"timeout_s": 1.0})
    for outcome in failed(outcomes):
        assert outcome.ranks == (0,)
        assert "rank 0 did not come within 1 s; its last call" in outcome.error
        assert "#1, barrier" in outcome.error
    # The absent one comes 3 s after the others: they have not waited for it.
    assert max(o.failed_at for o in outcomes[1:]) < outcomes[0].failed_at


@pytest.mark.grid
def test_rank_that_never_starts_is_named(server: Server) -> None:
    """By all the others at once, though one has waited less, and the other has the store."""
    settings = {"timeout_s": 4.0, "delays_s": [0.0, 2.0, None]}
    outcomes = server.run("one_call", 3, call="barrier", job=settings)
    assert_others_name(2, outcomes, "start: rank 2 did not come within 4 s")


@pytest.mark.grid
@pytest.mark.parametrize("absent", [0, 2])
def test_rank_that_closes_while_others_go_on_is_named(server: Server, absent: int) -> None:
    outcomes = server.run("leaving.leaves", 3, absent=absent)
    assert outcomes[absent].error == ""
    assert_others_name(
        absent, outcomes, f"barrier #2: rank {absent} ended without making this call"
    )


@pytest.mark.grid
def test_rank_that_takes_the_store_with_it_is_named(server: Server) -> None:
    """Rank 0 has it, and every call of the others asks it."""
    outcomes = server.run("leaving.leaves_apart", 3, absent=0, job={"check": "always"})
    assert_others_name(0, outcomes, "all_reduce: rank 0 ended, and with it the job's store")


@pytest.mark.grid
def test_calls_go_on_without_a_rank_that_is_not_in_their_group(server: Server) -> None:
    outcomes = server.run("leaving.leaves_apart", 3, absent=2, job={"check": "always"})
    assert [outcome.error for outcome in outcomes] == ["", "", ""]


@pytest.mark.grid
@pytest.mark.parametrize("absent", [0, 1])
def test_rank_that_ends_by_an_exception_says_which(server: Server, absent: int) -> None:
    outcomes = server.run("raises", 3, absent=absent, to_the_end=True)
    assert outcomes[absent].status == 1
    assert_others_name(absent, outcomes, f"rank {absent} ended with KeyError: ")


def test_killed_rank_leaves_no_memory_with_the_others(server: Server) -> None:
    outcomes = server.run("left_after_close", 3, absent=1)
    assert [outcome.value for outcome in outcomes] == [[], None, []]


@pytest.mark.grid
@pytest.mark.parametrize(("absent", "asleep", "world_size"), [(0, 1, 3), (2, 0, 4)])
def test_killed_rank_ends_calls_that_wait_for_another(
    server: Server, absent: int, asleep: int, world_size: int
) -> None:
    number = int(signal.SIGKILL)
    outcomes = server.run("is_signalled_apart", world_size, absent=absent, number=number)
    assert_others_name(absent, outcomes, f"rank {absent} is lost: its process was killed")
    # The rank that they wait for sleeps, and is told when it wakes up: they have not waited so far.
    waiting = [o for rank, o in enumerate(outcomes) if rank not in (absent, asleep)]
    assert max(o.failed_at for o in waiting) < outcomes[asleep].failed_at


@pytest.mark.grid
@needs_native
@pytest.mark.parametrize("absent", [0, 1])
def test_stopped_rank_is_named_after_the_heartbeat_limit(server: Server, absent: int) -> None:
    number, limits = int(signal.SIGSTOP), {"timeout_s": 20.0, "heartbeat_s": 1.5}
    outcomes = server.run("is_signalled", 3, absent=absent, number=number, delay_s=0.1, job=limits)
    assert outcomes[absent].status == -signal.SIGKILL  # by the test, when the others had ended
    assert_others_name(absent, outcomes, f"rank {absent} has not been heard of for 1.5 s")


@pytest.mark.grid
@needs_native
@pytest.mark.parametrize("absent", [0, 1])
def test_rank_whose_interpreter_is_held_is_not_lost(server: Server, absent: int) -> None:
    limits = {"timeout_s": 20.0, "heartbeat_s": 1.5}
    case = {"absent": absent, "hold_s": 5.0, "rest_s": 0.0, "job": limits}
    outcomes = server.run("holds_the_interpreter", 3, **case)
    assert [(o.status, o.error, o.value) for o in outcomes] == [(0, "", True)] * 3


@pytest.mark.grid
@needs_native
def test_rank_whose_interpreter_is_held_for_too_long_is_named(server: Server) -> None:
    limits = {"timeout_s": 2.0, "heartbeat_s": 1.0}
    case = {"absent": 1, "hold_s": 8.0, "rest_s": 6.0, "job": limits}
    outcomes = server.run("holds_the_interpreter", 3, **case)
    assert_others_name(
        1, outcomes, "rank 1 is alive and gets nowhere for 2 s: a call in native code"
    )


@pytest.mark.grid
@needs_native
def test_stopped_host_of_the_store_blocks_nobody_who_asks_it(server: Server) -> None:
    # Rank 1 sleeps for 3 s and asks the store then, which is in the process that is stopped.
    number = int(signal.SIGSTOP)
    limits = {"timeout_s": 20.0, "heartbeat_s": 5.0, "check": "always"}
    outcomes = server.run("is_signalled_apart", 3, absent=0, number=number, job=limits)
    assert_others_name(0, outcomes, "rank 0 has not been heard of for 5 s")


@pytest.mark.grid
@needs_native
@pytest.mark.parametrize("seed", range(2 * len(striking.KINDS)))
def test_rank_struck_among_random_calls_is_named_or_all_results_are_right(
    server: Server, seed: int
) -> None:
    trial = striking.attempt(server, seed)
    assert trial.is_right, trial


@pytest.mark.grid
def test_abort_ends_the_calls_of_all_groups(server: Server) -> None:
    for outcome in failed(server.run("aborts", 4, absent=1)):
        assert outcome.ranks == (1,)
        assert "rank 1 aborted: the loss is not finite" in outcome.error


@pytest.mark.grid
def test_agreement_with_one_other_value_names_its_rank(server: Server) -> None:
    values = ["cpu 1.0", "cpu 1.1, and more", "cpu 1.0"]
    for outcome in failed(server.run("agreement", 3, values=values)):
        assert outcome.ranks == (1,)
        assert "ranks 0, 2: cpu 1.0; rank 1: cpu 1.1, and more" in outcome.error


def test_agreement_with_equal_values_is_silent(server: Server) -> None:
    assert [o.value for o in server.run("agreement", 2, values=["é", "é"])] == [True, True]


@pytest.mark.parametrize("lost", [0, 2])
def test_ranks_meet_again_after_a_loss_and_with_a_new_one(
    server: Server, lost: int, tmp_path: Path
) -> None:
    outcomes = server.run("generations", 5, launched=4, lost=lost, folder=str(tmp_path))
    assert outcomes[lost].status == -signal.SIGKILL
    left = [number for number in range(4) if number != lost]
    numbers = {0: [0, 1, 2, 3], 1: left, 2: [*left, 4]}
    pairs = {4: [1, 1, 5, 5], 3: [1, 1, 2]}
    for number in (*left, 4):
        assert outcomes[number].error == ""
        found = outcomes[number].value
        mine = [row for row in numbers.values() if number in row]
        assert [generation[:3] for generation in found] == [
            [row.index(number), row, pairs[len(row)][row.index(number)]] for row in mine
        ]
    # The first ended with the meeting. After the others none of our threads is left, and of
    # connections what a process has that was in one generation only.
    assert [outcomes[number].value[0][3:] for number in left] == [[True, 1]] * 3
    counts = [
        row[3:] for o in outcomes for row in (o.value or []) if len(row[1]) != 4 or 4 in row[1]
    ]
    assert len(counts) == 7
    assert counts == [[counts[-1][0], []]] * 7
