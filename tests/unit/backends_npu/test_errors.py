"""Errors of torch_npu, as it words them, become the contract's with code, name and message."""

from types import SimpleNamespace

import pytest
import torch

from anychip.contract import CommunicationError, DeviceError
from anychip_npu import cann, errors
from anychip_npu.device import NpuDevice

LATE = (
    "npuSynchronizeDevice: NPU function error: AclrtSynchronizeDeviceWithTimeout, error code is "
    "507015\n[Error]: The aicore execution is abnormal."
)

QUEUED = (
    "The Inner error is reported as above. The process exits for this inner error, and the current "
    "working operator name is aclnnMm."
)


@pytest.mark.parametrize(("text", "code", "label"), [
    (LATE, 507015, "ACL_ERROR_RT_AICORE_EXCEPTION"),
    ("ACL stream synchronize failed, error code:507010", 507010, "ACL_ERROR_RT_LOST_HEARTBEAT"),
    ("call aclnnMm failed, error code is 161002", 161002, "ACLNN_ERR_PARAM_INVALID"),
    ("failed, error code is 599999", 599999, "a status of CANN"),
    (QUEUED, -1, "a status that torch_npu does not tell"),
], ids=["kernel", "heartbeat", "argument", "unknown", "queue"])  # fmt: skip
def test_error_with_a_status_becomes_a_device_error(
    text: str, code: int, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cann, "recent_message", lambda: "EZ9999: more")
    with pytest.raises(DeviceError) as caught, errors.told("npu: synchronize(device 0)"):
        raise RuntimeError(text)
    assert (caught.value.code, caught.value.label) == (code, label)
    assert str(caught.value).startswith(f"npu: synchronize(device 0) failed with {label} ({code})")
    assert caught.value.detail == f"{text}\nEZ9999: more"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_recent_message_that_torch_npu_has_added_is_not_said_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cann, "recent_message", lambda: "The aicore execution is abnormal.")
    found = errors.device_error("npu: x", RuntimeError(LATE))
    assert found is not None
    assert found.detail == LATE


def test_message_of_cann_is_all_that_is_told_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cann, "recent_message", lambda: "")
    advice = "\n        Rectify the fault based on the error information in the ascend log.\n"
    found = errors.device_error("npu: x", RuntimeError(f"{LATE}{advice}aclnnMm: core 3\n  timeout"))
    assert found is not None
    assert found.detail == "aclnnMm: core 3; timeout"


@pytest.mark.parametrize("error", [
    RuntimeError("shape mismatch"),
    ValueError("error code is 507015"),
    torch.OutOfMemoryError("error code is 207001"),
    CommunicationError("world", "error code is 507015"),
], ids=["torch's own", "other type", "out of memory", "known already"])  # fmt: skip
def test_other_error_passes_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, errors.told("npu: x"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(("answers", "code", "waits"), [
    ([QUEUED, LATE], 507015, 2), ([QUEUED], -1, 2), ([LATE], 507015, 1),
], ids=["device failed too", "launch alone failed", "device failed"])  # fmt: skip
def test_device_is_waited_for_after_the_error_of_a_launch(
    answers: list[str], code: int, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []

    def synchronize(index: int | None) -> None:
        waited.append(index)
        if len(waited) <= len(answers):
            raise RuntimeError(answers[len(waited) - 1])

    monkeypatch.setattr(NpuDevice, "check_index", lambda self, index: index)
    monkeypatch.setattr(
        NpuDevice, "device_module", lambda self: SimpleNamespace(synchronize=synchronize)
    )
    with pytest.raises(DeviceError) as caught:
        NpuDevice().synchronize(3)
    assert caught.value.code == code
    assert waited == [3] * waits
