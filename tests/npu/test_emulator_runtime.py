"""The emulated devices through the real torch_npu: memory, order of work, events, strict mode."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch_npu")

from tests.npu import emulator_programs as programs
from tests.npu.emulator_process import run


def test_memory_filled_says_what_is_left_and_comes_back() -> None:
    ended = run(programs.fill_memory, MEMORY_MB=64).checked()

    error, numbers = ended.out.splitlines()
    assert error.startswith("OutOfMemoryError NPU out of memory. Tried to allocate")
    assert "64.00 MiB total capacity" in error
    # Segments of 20 MiB hold two blocks of 8: three of them fit into 64.
    assert numbers == "allocated 6 free 64 total 64"


def test_memory_of_two_devices_is_counted_apart() -> None:
    run(programs.two_devices).checked()


def test_stream_without_wait_reads_what_was_there_before() -> None:
    assert run(programs.missing_wait).checked().out.split() == ["without", "0.0", "with", "4.0"]


def test_delays_show_work_that_is_not_waited_for() -> None:
    early, late = run(programs.late_work, DELAY_US=20_000).checked().out.splitlines()

    assert float(early.split()[1]) < 40
    assert late == "late 40.0"


def test_synchronous_mode_leaves_nothing_to_wait_for() -> None:
    ended = run(programs.late_work, DELAY_US=20_000, SYNCHRONOUS=1).checked()

    assert ended.out.splitlines() == ["early 40.0", "late 40.0"]


def test_elapsed_time_is_that_of_the_work_between() -> None:
    # 507006: ACL_ERROR_RT_EVENT_NOT_COMPLETE
    assert run(programs.elapsed_time).checked().out == "never recorded 507006\n"


def test_host_access_in_strict_mode_ends_with_what_happened() -> None:
    ended = run(programs.host_reads_device_memory)

    assert ended.code == -11
    assert ended.out == ""
    assert "strict mode: code on the host touched device memory" in ended.err


def test_host_access_without_strict_mode_reads() -> None:
    assert run(programs.host_reads_device_memory, STRICT=0).checked().out == "read 3.0\n"


def test_crash_elsewhere_does_not_blame_device_memory() -> None:
    ended = run(programs.host_follows_null)

    assert ended.code == -11
    assert "strict mode" not in ended.err


def test_crash_in_strict_mode_leaves_the_traceback_to_who_watched_before() -> None:
    ended = run(programs.host_reads_device_memory_watched)

    assert ended.code == -11
    assert "strict mode" in ended.err
    assert "in host_reads_device_memory" in ended.err


def test_settings_of_devices_are_what_the_adapter_sees() -> None:
    ended = run(programs.versions, DEVICES=3, SOC="Ascend910B4", VERSION="9.1.0").checked()

    assert ended.out == "3 Ascend910B4 9.1.0\n"


@pytest.mark.parametrize(("name", "value", "says"), [
    ("DEVICE", 3, "ANYCHIP_CANN_DEVICE is not a setting"),
    ("DEVICES", "three", "ANYCHIP_CANN_DEVICES: expected a number, got 'three'"),
    ("FAIL_OPERATOR", "aclnnAdd:often", "expected a number, got 'often'"),
    ("FAIL_ALLOCATION", "2:", "expected a number, got ''"),
], ids=["unknown-name", "not-a-number", "not-a-count", "no-count"])  # fmt: skip
def test_setting_that_means_nothing_is_refused(name: str, value: object, says: str) -> None:
    ended = run(programs.versions, **{name: value})

    assert ended.code == 2
    assert f"cann emulator: {says}" in ended.err or says in ended.err


def test_operator_without_row_is_a_clean_error() -> None:
    lines = run(programs.unknown_operator).checked().out.splitlines()

    assert len(lines) == 2
    for line in lines:
        assert line.startswith("RuntimeError")
        assert "aclnnErfinv: the emulator does not implement this operator" in line


WANTED_ANSWERS = {
    "aclrtFree": (107000, "the address is not of device memory"),
    "aclrtSynchronizeStream": (107017, "the stream does not exist, or was destroyed"),
    "aclrtSetDevice": (107001, "device 99 of 2"), "aclrtMemcpy": (107000, "2 bytes into 1"),
    "too many ranks": (9, "the emulator has 1 to 64 ranks, not 65"),
    "no such communicator": (9, "process 0, which made it, may have ended"),
    "not an id": (9, "no communicator elsewhere"),
    "no communicator": (1, "HcclBarrier: no communicator"),
    "aclnnAdd": (161001, "aclnnAdd: argument 1 is missing"),
}  # fmt: skip


def test_bad_calls_get_a_status_and_a_message_and_the_process_goes_on() -> None:
    lines = run(programs.bad_calls).checked().out.splitlines()

    answers = dict(line.split(": ", 1) for line in lines)
    assert answers.keys() == WANTED_ANSWERS.keys()
    for name, (status, message) in WANTED_ANSWERS.items():
        assert answers[name].startswith(f"{status} "), name
        assert message in answers[name], name
