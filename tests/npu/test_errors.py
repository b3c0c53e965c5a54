"""Every fault of the device and of its links ends in the documented error, in time.

Run against torch_npu 2.13.0 on an emulated CANN; not run on Ascend silicon.
"""

from collections.abc import Callable

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch_npu")

from tests.npu import backend_programs as programs
from tests.npu.conftest import RunJob
from tests.npu.emulator_process import Ended, run

FAILED = "emulated fault: aclnnAdds fails at call 2"
LINK_TIMEOUT_S = 4


def lines(ended: Ended) -> list[str]:
    """What a program that came to its end has printed."""
    return ended.checked().out.splitlines()


def test_failed_kernel_is_a_device_error_when_it_is_waited_for() -> None:
    step, error = lines(run(programs.kernel_fails, "0", FAIL_OPERATOR="aclnnAdds:2"))

    assert step == "synchronize"
    assert error.startswith("DeviceError 507015 - npu: synchronize(device current) failed with ")
    assert "ACL_ERROR_RT_AICORE_EXCEPTION (507015)" in error
    assert FAILED in error


def test_failed_kernel_with_blocking_launches_is_raised_by_its_call() -> None:
    step, error = lines(run(programs.kernel_fails, "1", FAIL_OPERATOR="aclnnAdds:2"))

    assert step == "call"
    assert "507015" in error
    assert FAILED in error


def test_failed_kernel_of_a_row_with_blocking_launches_is_a_device_error_that_names_it() -> None:
    step, error = lines(run(programs.row_fails, FAIL_OPERATOR="aclnnRmsNorm"))

    assert step == "call"
    assert error.startswith("DeviceError 507015 - npu: rms_norm")
    assert "emulated fault: aclnnRmsNorm fails at call 1" in error


def test_memory_that_is_too_small_is_out_of_memory_with_sizes_and_the_device_works_on() -> None:
    *errors, last = lines(run(programs.memory_runs_out, MEMORY_MB=64))

    assert last == "worked on"
    assert len(errors) == 3
    for error in errors:
        assert error.startswith("OutOfMemoryError - - backend 'npu': cannot allocate 268435456 ")
        assert "of 67108864 bytes are free" in error


def test_allocation_that_fails_in_the_driver_is_out_of_memory_and_the_device_works_on() -> None:
    # torch_npu asks again after it has freed its cache: three times in all.
    error, last = lines(run(programs.allocation_fails, FAIL_ALLOCATION="1:3"))

    assert error.startswith("OutOfMemoryError - - backend 'npu': cannot allocate 35651584 bytes")
    assert last == "worked on"


def test_pinned_memory_that_is_not_there_is_out_of_memory() -> None:
    (error,) = lines(run(programs.pinned_runs_out))

    assert error.startswith("OutOfMemoryError - - backend 'npu': cannot allocate 1125899906842624 ")


@pytest.mark.parametrize(("program", "after"), [
    (programs.device_is_lost, 5), (programs.launch_finds_device_lost, 3),
], ids=["at work", "at a launch"])  # fmt: skip
def test_lost_device_is_a_device_error_at_each_wait(
    program: Callable[[], None], after: int
) -> None:
    first, second = lines(run(program, LOSE_DEVICE_AFTER=after))

    for error in (first, second):
        assert error.startswith("DeviceError 507010 - npu: synchronize(device current) failed")
        assert "ACL_ERROR_RT_LOST_HEARTBEAT" in error


def test_dead_rank_is_named_by_the_other(run_job: RunJob) -> None:
    other, dead = run_job(programs.rank_dies, 2, 1)

    assert (other.code, dead.code) == (3, 7)
    at_wait, at_next_call = other.out.splitlines()[:2]
    assert at_wait.startswith("CommunicationError - (1,) npu: synchronize(device current): rank 1")
    assert at_next_call.startswith("CommunicationError - (1,) world, rank 0 of 2: all_reduce")


def test_link_that_is_down_fails_on_both_ranks_within_its_timeout(run_job: RunJob) -> None:
    ended = run_job(programs.link_is_down, 2, LINK_DOWN=1, LINK_TIMEOUT_S=LINK_TIMEOUT_S)

    for rank in ended:
        assert rank.code == 3, rank.err
        at_wait, at_next_call = rank.out.splitlines()[:2]
        assert at_wait.startswith("CommunicationError - () npu: synchronize(device current)")
        assert at_next_call.startswith("CommunicationError")
        # Whoever found it first has said what CANN told it, and the other rank repeats that.
        assert "world failed with ACL_ERROR_RT_AICORE_EXCEPTION: HcclAllReduce" in at_wait


def test_slow_rank_is_waited_for(run_job: RunJob) -> None:
    for rank in run_job(programs.sums, 2, SLOW_RANK="1:300"):
        assert float(lines(rank)[-1].split()[1]) >= 3 * 0.3


def test_close_lets_the_device_end_what_was_waited_for(run_job: RunJob) -> None:
    for rank in run_job(programs.sum_read_after_close, 2, SLOW_RANK="1:300"):
        assert lines(rank) == ["{3.0}"]


def test_ranks_that_disagree_are_told_so_and_nothing_is_sent(run_job: RunJob) -> None:
    for rank in run_job(programs.ranks_disagree, 2):
        error, closed = lines(rank)
        assert closed == "closed"
        assert error.startswith("CommunicationError - (1,)")
        assert "rank 0: all_reduce sum (100,) torch.float32" in error
        assert "rank 1: all_reduce sum (101,) torch.float32" in error


def test_dtype_that_hccl_does_not_reduce_is_refused_before_the_call(run_job: RunJob) -> None:
    for rank in run_job(programs.refusals, 2):
        of_bool, of_byte = lines(rank)
        assert of_bool.endswith("does not take torch.bool with reduction 'sum'")
        assert of_byte.endswith("does not take torch.uint8 with reduction 'sum'")


def test_abort_lets_the_queue_issue_the_calls_that_were_made_before(run_job: RunJob) -> None:
    """Issued after it, they would use a communicator that is gone."""
    for rank in run_job(programs.aborts_while_calls_are_queued, 2):
        assert lines(rank) == ["closed"]
