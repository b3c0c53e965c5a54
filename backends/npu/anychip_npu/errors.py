"""What has CANN refused, in one type of error? torch_npu raises RuntimeError with a status in it.

torch_npu adds CANN's own message to most errors; where it has not, the message is asked for here.

Source: CANN 8.5, aclError and aclnn Return Codes,
https://www.hiascend.com/document/detail/en/canncommercial/850/API/appdevgapi/aclcppdevg_03_1344.html,
https://www.hiascend.com/document/detail/en/canncommercial/850/API/aolapi/atlasascendc_api_07_1205.html.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn, TypeVar

from anychip.contract import AnychipError, DeviceError
from anychip_npu import cann

F = TypeVar("F", bound=Callable[..., Any])

NAMES = {
    107000: "ACL_ERROR_RT_PARAM_INVALID",
    107001: "ACL_ERROR_RT_INVALID_DEVICEID",
    107002: "ACL_ERROR_RT_CONTEXT_NULL",
    107003: "ACL_ERROR_RT_STREAM_CONTEXT",
    107017: "ACL_ERROR_RT_INVALID_HANDLE",
    107019: "ACL_ERROR_RT_WAIT_TIMEOUT",
    107020: "ACL_ERROR_RT_TASK_TIMEOUT",
    161001: "ACLNN_ERR_PARAM_NULLPTR",
    161002: "ACLNN_ERR_PARAM_INVALID",
    207000: "ACL_ERROR_RT_FEATURE_NOT_SUPPORT",
    207001: "ACL_ERROR_RT_MEMORY_ALLOCATION",
    361001: "ACLNN_ERR_RUNTIME_ERROR",
    507010: "ACL_ERROR_RT_LOST_HEARTBEAT",
    507014: "ACL_ERROR_RT_AICORE_TIMEOUT",
    507015: "ACL_ERROR_RT_AICORE_EXCEPTION",
    507018: "ACL_ERROR_RT_AICPU_EXCEPTION",
    507034: "ACL_ERROR_RT_VECTOR_CORE_TIMEOUT",
    507035: "ACL_ERROR_RT_VECTOR_CORE_EXCEPTION",
    507046: "ACL_ERROR_RT_STREAM_SYNC_TIMEOUT",
    507053: "ACL_ERROR_RT_DEVICE_MEM_ERROR",
    507054: "ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR",
    507057: "ACL_ERROR_RT_SUSPECT_REMOTE_ERROR",
    507899: "ACL_ERROR_RT_DRV_INTERNAL_ERROR",
    561000: "ACLNN_ERR_INNER",
    561003: "ACLNN_ERR_INNER_FIND_KERNEL_ERROR",
}
"""Names of statuses that a training may meet; others are shown as their number."""

NO_MEMORY = 207001

NOT_TOLD = -1
"""The code of an error of which torch_npu does not tell the status."""

reasons: list[Callable[[str, DeviceError], AnychipError | None]] = []
"""Who may know why the device has failed: a job whose other ranks are gone, for one."""

_STATUS = re.compile(r"error code(?: is|:)\s*(\d+)")
# What torch_npu says, at whatever is called next, of a launch that failed in its queue.
_QUEUED = "The Inner error is reported as above"
# The end of what torch_npu says itself of a status; what follows is CANN's own message.
_ADVICE = "Rectify the fault based on the error information in the ascend log."


def is_of_queue(error: Exception) -> bool:
    """Does the error tell of a launch that failed in torch_npu's queue, some calls ago?"""
    return _QUEUED in str(error)


def device_error(where: str, error: Exception) -> DeviceError | None:
    """The error of the contract for one of torch_npu's; None when it tells of no failed call.

    Args:
        where: backend and call, like ``"npu: synchronize(device 0)"``.
    """
    text = str(error)
    found = _STATUS.search(text)
    if found is not None:
        code = int(found.group(1))
        label = NAMES.get(code, "a status of CANN")
    elif is_of_queue(error):
        code, label = NOT_TOLD, "a status that torch_npu does not tell"
    else:
        return None
    recent = cann.recent_message()
    own = text.rpartition(_ADVICE)[2] if _ADVICE in text else ""
    told = "; ".join(filter(None, map(str.strip, own.splitlines()))) or text
    detail = f"{told}\n{recent}" if recent and recent not in text else told
    return DeviceError(where, code, label, detail)


@contextmanager
def told(where: str) -> Iterator[None]:
    """Context in which an error of the device becomes one of the contract; others pass."""
    try:
        yield
    except RuntimeError as error:
        _tell(where, error)


def telling(function: F) -> F:
    """A row in which an error of the device becomes one of the contract that names it."""

    @wraps(function)
    def call(*arguments: Any, **attributes: Any) -> Any:
        try:
            return function(*arguments, **attributes)
        except RuntimeError as error:
            _tell(f"npu: {function.__name__}", error)

    return call  # type: ignore[return-value]


def _tell(where: str, error: RuntimeError) -> NoReturn:
    import torch

    # Of the contract already, or of the one type for memory that is out.
    if isinstance(error, (AnychipError, torch.OutOfMemoryError)):
        raise error
    known = device_error(where, error)
    if known is None:
        raise error
    for reason in reasons:
        better = reason(where, known)
        if better is not None:
            raise better from error
    raise known from error
