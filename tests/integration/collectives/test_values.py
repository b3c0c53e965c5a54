"""Are the values of collectives between processes right, bit for bit, whatever the sizes?"""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.collectives.processes import Outcome, Server

FLOATS = ["float32", "float64", "bfloat16", "float16"]
INTEGERS = ["int8", "uint8", "int16", "int32", "int64"]
MOVED = ["bool", "float8_e4m3fn", "float8_e5m2"]
# Empty; one element; fewer than ranks; odd; above 64 KiB.
NUMELS = [0, 1, 2, 1001, 20_011]


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned, when all did and ended in good order."""
    assert [(o.status, o.error) for o in outcomes] == [(0, "")] * len(outcomes)
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_reduction_of_floats_equals_ordered_numpy_sum(server: Server, world_size: int) -> None:
    kinds = ["sum", "avg", "max", "min"]
    outcomes = server.run("reductions", world_size, numels=NUMELS, dtypes=FLOATS, kinds=kinds)
    assert values(outcomes) == [[]] * world_size


def test_reduction_of_integers_equals_ordered_numpy_sum(server: Server) -> None:
    kinds = ["sum", "max", "min"]
    outcomes = server.run("reductions", 3, numels=NUMELS, dtypes=INTEGERS, kinds=kinds)
    assert values(outcomes) == [[]] * 3


def test_reduction_in_many_pieces_equals_ordered_numpy_sum(server: Server) -> None:
    # 64 KiB is where pieces begin; parts of 4 ranks are 5 and 21 of them in float32.
    numels = [16 * 1024 + 5, 80 * 1024 + 7]
    outcomes = server.run("reductions_in_pieces", 4, numels=numels, piece_nbytes=4096)
    assert values(outcomes) == [[]] * 4


def test_reduction_in_many_steps_equals_ordered_numpy_sum(server: Server) -> None:
    # Steps in memory are of 256 KiB and more.
    numels = [5 * 64 * 1024 + 7]
    outcomes = server.run("reductions", 3, numels=numels, dtypes=["float32"], kinds=["sum"])
    assert values(outcomes) == [[]] * 3


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_moved_values_arrive_as_they_were(server: Server, world_size: int) -> None:
    numels = [0, 1, 2, 1001] if world_size == 3 else [1, 1001]
    dtypes = [*FLOATS, *INTEGERS, *MOVED] if world_size == 3 else ["float32"]
    outcomes = server.run("moves", world_size, numels=numels, dtypes=dtypes)
    assert values(outcomes) == [[]] * world_size


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    numels=st.lists(st.integers(0, 70_000), min_size=3, max_size=6),
    world_size=st.integers(2, 4),
    kind=st.sampled_from(["sum", "avg", "max", "min"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_reduction_of_any_size_equals_ordered_numpy_sum(
    server: Server, numels: list[int], world_size: int, kind: str, dtype: str
) -> None:
    outcomes = server.run("reductions", world_size, numels=numels, dtypes=[dtype], kinds=[kind])
    assert values(outcomes) == [[]] * world_size


@pytest.mark.parametrize("numel", [1000, 100_003], ids=["small", "large"])
def test_reduction_has_the_same_bits_on_all_ranks_and_in_every_run(
    server: Server, numel: int
) -> None:
    digests = [
        digest
        for _ in range(2)
        for digest in values(server.run("bits", 4, numel=numel, reduction="avg"))
    ]
    assert len(set(digests)) == 1


def test_parts_are_reduced_and_gathered_where_they_are(server: Server) -> None:
    assert values(server.run("in_place_parts", 3)) == [True] * 3


@pytest.mark.grid
@pytest.mark.parametrize("numel", [100, 100_000], ids=["small", "large"])
def test_works_waited_for_from_last_to_first_are_right(server: Server, numel: int) -> None:
    assert values(server.run("asynchronous", 3, numel=numel)) == [[]] * 3


def test_asynchronous_call_gets_on_without_being_waited_for(server: Server) -> None:
    assert values(server.run("gets_on_alone", 2)) == [True] * 2


def test_asynchronous_call_returns_before_the_others_come(server: Server) -> None:
    assert values(server.run("never_blocks", 3))[1:] == [[False, True]] * 2


def test_autograd_notices_values_that_were_communicated_into(server: Server) -> None:
    assert values(server.run("versions", 2)) == [[True] * 3] * 2


def test_groups_of_a_grid_have_their_own_members_order_and_counts(server: Server) -> None:
    found = values(server.run("groups", 4))
    assert [f["row"] for f in found] == [1, 1, 5, 5]
    assert [f["column"] for f in found] == [2, 4, 2, 4]
    assert [f["turned"] for f in found] == [[1, 2, 3, 0], [0, 1, 1], [0, 1, 2], [0, 2, 3, 0]]
    assert found[3]["ranks"] == [[2, 3], [1, 3], [3, 0], [3]]
    assert {tuple(f["names"]) for f in found} == {("row", "col", "turned")}
    assert [f["traffic"] for f in found] == [[1, 0]] * 4


def test_groups_of_the_same_ranks_do_not_mix_their_messages(server: Server) -> None:
    assert values(server.run("twins", 2)) == [[2.0, 20.0]] * 2


def test_messages_are_matched_by_tag_then_by_order(server: Server) -> None:
    assert values(server.run("letters", 2)) == [[], [2, 1, 3, 4]]


def test_nothing_to_send_is_sent_to_nobody(server: Server) -> None:
    assert values(server.run("empty_messages", 3)) == [True] * 3


def test_calls_that_are_not_compared_work(server: Server) -> None:
    assert values(server.run("unchecked", 2, job={"check": "off"})) == [True] * 2


def test_store_after_many_calls_has_no_more_keys(server: Server) -> None:
    for before, after in values(server.run("many_calls", 2, count=600)):
        assert after == before


def test_close_leaves_no_thread_and_no_memory(server: Server) -> None:
    assert values(server.run("left_after_close", 3)) == [[]] * 3


def test_interpreter_ends_with_a_call_under_way(server: Server) -> None:
    assert values(server.run("ends_without_close", 3, to_the_end=True)) == [True] * 3


def test_native_collectives_move_and_reduce_with_uneven_parts(server: Server) -> None:
    assert values(server.run("native", 3)) == [[]] * 3


def test_backend_joins_the_default_group_and_leaves_it_alone(server: Server) -> None:
    for rank, found in enumerate(values(server.run("of_backend", 2))):
        assert found == [rank, 2, [2.0] * 3, True, True, True, [4.0] * 3, [8.0] * 3]
