"""Every fault that ANYCHIP_CANN_* can ask for, as code on torch_npu sees it: an error, in time."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch_npu")

from tests.npu import emulator_programs as programs
from tests.npu.emulator_process import run

CORE_EXCEPTION, LOST = "error code is 507015", "error code is 507010"


def test_allocations_that_fail_in_a_row_are_out_of_memory_once() -> None:
    # torch_npu asks again, once, after it has freed its cache.
    ended = run(programs.out_of_memory_by_fault, FAIL_ALLOCATION="2:2").checked()

    error, last = ended.out.splitlines()
    assert error.startswith("OutOfMemoryError NPU out of memory. Tried to allocate 34.00 MiB")
    assert last == "worked on"


def test_allocation_that_fails_once_is_hidden_by_the_adapter() -> None:
    ended = run(programs.out_of_memory_by_fault, FAIL_ALLOCATION="2:1").checked()

    assert ended.out == "worked on\n"


def test_allocations_that_fail_from_one_on_leave_no_memory() -> None:
    ended = run(programs.out_of_memory_by_fault, FAIL_ALLOCATION=2)

    assert ended.code == 1
    assert "worked on" not in ended.out
    assert ended.err.count("NPU out of memory. Tried to allocate 18.00 MiB") >= 1


@pytest.mark.parametrize(
    ("fault", "number"), [("aclnnAdds", 1), ("aclnnAdds:3", 3)], ids=["every-call", "third-call"]
)
def test_operator_that_fails_is_named_when_it_is_waited_for(fault: str, number: int) -> None:
    out = run(programs.add_five_times, FAIL_OPERATOR=fault).checked().out

    assert out.startswith(f"failed {number} RuntimeError")
    assert CORE_EXCEPTION in out
    assert f"emulated fault: aclnnAdds fails at call {number}" in out


def test_operator_fault_of_another_name_does_nothing() -> None:
    ended = run(programs.add_five_times, FAIL_OPERATOR="aclnnErf").checked()

    assert ended.out == "five 20.0\n"


def test_failure_of_one_stream_reaches_who_waits_for_its_event() -> None:
    ended = run(programs.failure_reaches_waiting_stream, FAIL_OPERATOR="aclnnInplaceMuls")

    on_event, on_stream = ended.checked().out.splitlines()
    assert CORE_EXCEPTION in on_event
    assert "emulated fault: aclnnInplaceMuls fails at call 1" in on_event
    assert on_stream == "RuntimeError ACL stream synchronize failed, error code:507015"


def test_lost_device_ends_every_wait_with_an_error() -> None:
    lines = run(programs.forty_additions, LOSE_DEVICE_AFTER=10).checked().out.splitlines()

    assert len(lines) == 5
    # The first may come from a launch, of which torch_npu says no status.
    assert LOST in lines[0] or "The Inner error is reported as above" in lines[0]
    assert "emulated fault: the device is lost (heartbeat)" in lines[0]
    assert all("507010" in line for line in lines[1:])


def test_device_lost_later_than_the_work_is_not_noticed() -> None:
    lines = run(programs.forty_additions, LOSE_DEVICE_AFTER=1000).checked().out.splitlines()

    assert lines == ["no error"] * 4


def test_dead_rank_that_nobody_has_waited_for_is_reported_too() -> None:
    ended = run(programs.reduce_twice_with_child, LINK_TIMEOUT_S=60)

    assert "HcclAllReduce: rank 1 ended" in ended.checked().out
