"""Does the npu backend say honestly that this version has no code for it?"""

from __future__ import annotations

from pathlib import Path

import pytest

from anychip_npu import anychip_backend as npu_backend
from anychip_npu.backend import describe_devices as describe_npu_devices


def test_probe_of_an_unbuilt_backend_is_unavailable_with_reason_and_command() -> None:
    probe = npu_backend().probe()
    assert probe.status == "unavailable"
    assert probe.reason.startswith("built without the ")
    assert "not part of this version" in probe.reason
    assert probe.fix is not None
    assert "pip install ." in probe.fix
    assert "\n" not in probe.reason + probe.fix


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "no device files"),
        (["davinci_manager", "davinci7"], "1 device file "),
        (["davinci0", "davinci1", "davinci_manager", "null"], "2 device files "),
    ],
    ids=["none", "one", "two"],
)
def test_npu_device_files_are_counted_without_the_manager(
    tmp_path: Path, files: list[str], words: str
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert describe_npu_devices(tmp_path).startswith(words)
