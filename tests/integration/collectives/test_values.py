"""Are the values of collectives between processes right, bit for bit, whatever the sizes?"""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anychip.conformance.chapters.collectives import same_everywhere
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


@pytest.mark.parametrize(("world_size", "numels", "dtypes", "kinds"), [
    *((ranks, NUMELS, FLOATS, ["sum", "avg", "max", "min"]) for ranks in (2, 3, 4)),
    (3, NUMELS, INTEGERS, ["sum", "max", "min"]),
    (3, [5 * 64 * 1024 + 7], ["float32"], ["sum"]),  # steps in memory are of 256 KiB and more
], ids=["2-floats", "3-floats", "4-floats", "integers", "many-steps"])  # fmt: skip
def test_reduction_equals_ordered_numpy_sum(
    server: Server, world_size: int, numels: list[int], dtypes: list[str], kinds: list[str]
) -> None:
    outcomes = server.run("reductions", world_size, numels=numels, dtypes=dtypes, kinds=kinds)
    assert values(outcomes) == [[]] * world_size


def test_reduction_in_many_pieces_equals_ordered_numpy_sum(server: Server) -> None:
    # 64 KiB is where pieces begin; parts of 4 ranks are 5 and 21 of them in float32.
    numels = [16 * 1024 + 5, 80 * 1024 + 7]
    outcomes = server.run("reductions_in_pieces", 4, numels=numels, piece_nbytes=4096)
    assert values(outcomes) == [[]] * 4


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_moved_values_arrive_as_they_were(server: Server, world_size: int) -> None:
    numels = [0, 1, 2, 1001] if world_size == 3 else [1, 1001]
    dtypes = [*FLOATS, *INTEGERS, *MOVED] if world_size == 3 else ["float32"]
    outcomes = server.run("moves", world_size, numels=numels, dtypes=dtypes)
    assert values(outcomes) == [[]] * world_size


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    numels=st.lists(st.integers(0, 70_000), min_size=3, max_size=6), world_size=st.integers(2, 4),
    kind=st.sampled_from(["sum", "avg", "max", "min"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)  # fmt: skip
def test_reduction_of_any_size_equals_ordered_numpy_sum(
    server: Server, numels: list[int], world_size: int, kind: str, dtype: str
) -> None:
    outcomes = server.run("reductions", world_size, numels=numels, dtypes=[dtype], kinds=[kind])
    assert values(outcomes) == [[]] * world_size


EVERYWHERE = ("world", "columns", "rows", "triple")


@pytest.mark.grid
@pytest.mark.parametrize(("question", "arguments"), [
    ("ask_order", {}), ("ask_under_way", {"where": EVERYWHERE}), ("ask_groups", {}),
], ids=["order", "under-way", "groups"])  # fmt: skip
def test_rules_of_the_conformance_suite_hold_over_every_transport(
    server: Server, question: str, arguments: dict[str, Any]
) -> None:
    """Of calls in place, of nothing, in groups in any order, waited for in any order, by tags."""
    more = {"question": question, "job": {"timeout_s": 30.0}, **arguments}
    same_everywhere(values(server.run("rule_of_the_suite", 4, **more)))


def test_asynchronous_call_returns_before_the_others_come(server: Server) -> None:
    assert values(server.run("never_blocks", 3))[1:] == [[False, True]] * 2


def test_autograd_notices_values_that_were_communicated_into(server: Server) -> None:
    assert values(server.run("versions", 2)) == [[True] * 3] * 2


def test_groups_of_the_same_ranks_do_not_mix_their_messages(server: Server) -> None:
    assert values(server.run("twins", 2)) == [[2.0, 20.0]] * 2


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
