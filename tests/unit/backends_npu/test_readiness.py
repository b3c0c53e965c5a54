"""Does every state of a machine get its own reason, and advice that fits?"""

from pathlib import Path
from typing import Any

import pytest

from anychip_npu.adapter import Versions
from anychip_npu.cann import DeviceFiles
from anychip_npu.readiness import AUTOLOAD, Facts, answer, findings

FITS = Versions("2.13.0+cpu", "2.13.0", "==2.13.0.*", True)
ABSENT = Versions("2.13.0", None, "", False)
OLD_TORCH = Versions("2.12.0", "2.13.0", "==2.13.0.*", False)
NO_LIBRARY = "libhccl.so: cannot open shared object file: No such file or directory"
NO_FILES, FOUR_FILES = DeviceFiles(0, ()), DeviceFiles(4, ())
FORBIDDEN = DeviceFiles(1, ("/dev/davinci0", "/dev/davinci_manager"))
SCRIPT = Path("/opt/Ascend/set_env.sh")
READY = Facts(FITS, "", SCRIPT, "", FOUR_FILES, ("Ascend910B1",) * 4, "8.5.0")


def without(**changes: Any) -> Facts:
    """A machine that lacks something: no device is counted there."""
    return READY._replace(**{"parts": (), **changes})


@pytest.mark.parametrize(("facts", "status", "reason", "fix"), [
    (READY, "ready", "4 x Ascend910B1, torch_npu 2.13.0, CANN 8.5.0", None),
    (without(versions=ABSENT, files=NO_FILES), "unavailable", "torch_npu is not installed",
     "pip install torch-npu"),
    (without(versions=ABSENT), "unavailable", "4 device files", "pip install torch-npu"),
    (without(versions=OLD_TORCH), "incompatible",
     "torch_npu 2.13.0 is made for torch==2.13.0.*, and torch is 2.12.0",
     "pip install 'torch==2.13.0.*'"),
    (without(missing=NO_LIBRARY, obstacle=NO_LIBRARY), "unavailable",
     f"the environment of CANN is not set: {NO_LIBRARY}", "source /opt/Ascend/set_env.sh"),
    (without(missing=NO_LIBRARY, obstacle=NO_LIBRARY, script=None), "unavailable",
     f"CANN is not installed: {NO_LIBRARY}", "set_env.sh"),
    (without(obstacle="ImportError: undefined symbol: aclrtMalloc"), "broken",
     "cannot be imported: ImportError: undefined symbol: aclrtMalloc", AUTOLOAD),
    (without(files=FORBIDDEN), "unavailable", "/dev/davinci_manager", "usermod -aG"),
    (without(files=NO_FILES), "unavailable", "no device file", "install the Ascend driver"),
    (without(), "unavailable", "there are 4 device files", "ASCEND_RT_VISIBLE_DEVICES"),
], ids=[
    "ready", "no adapter", "no adapter but devices", "other torch", "environment not set",
    "no CANN", "import fails", "not in the group", "no device", "hidden devices"
])  # fmt: skip
def test_answer_names_what_is_missing_and_what_helps(
    facts: Facts, status: str, reason: str, fix: str | None
) -> None:
    found = answer(facts)
    assert found.status == status
    assert reason in found.reason
    assert (found.fix is None) if fix is None else (fix in str(found.fix))
    assert "\n" not in f"{found.reason}{found.fix}"
    assert found.device_count == len(facts.parts)


def test_findings_have_a_line_for_each_part_and_mark_what_fails() -> None:
    assert [(f.ok, f.text) for f in findings(READY, (True, "import torch works"))] == [
        (True, "torch_npu 2.13.0, made for torch==2.13.0.*; torch 2.13.0+cpu"),
        (True, "CANN 8.5.0: its libraries open"), (True, "import torch works"),
        (True, "4 device files /dev/davinci*"),
        *((True, f"device {index}: Ascend910B1") for index in range(4)),
    ]  # fmt: skip
    broken = without(versions=OLD_TORCH, missing=NO_LIBRARY, files=FORBIDDEN)
    found = findings(broken, (False, "import torch fails"))
    assert [f.ok for f in found] == [False, False, False, False]
    assert found[2].fix == AUTOLOAD
    assert found[3].text.endswith("no permission for /dev/davinci0, /dev/davinci_manager")


def test_findings_without_the_adapter_are_left_out() -> None:
    assert findings(without(versions=ABSENT), (True, "")) == []
