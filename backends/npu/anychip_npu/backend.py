"""Which Ascend devices are here, and whether this build can use them. It cannot: it maps nothing.

The probe looks at device files and installed packages only; it imports neither torch nor torch_npu.
Operators, memory and collectives come with the mapping and will stand in files of those names.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from anychip.contract import Backend, OperatorTable, Probe

DEVICE_FILES = Path("/dev")
ADAPTER = "torch_npu"


class NpuBackend(Backend):
    """Ascend NPUs through CANN and torch_npu. This version maps no operators to them yet."""

    name = "npu"
    device_type = "npu"
    c10d_backend = "hccl"
    api = (1, 0)
    operators = OperatorTable()

    def probe(self) -> Probe:
        """Always unavailable in this version; the reason says which parts of a chip are here."""
        adapter = "is" if importlib.util.find_spec(ADAPTER) else "is not"
        return Probe.unavailable(
            "built without the Ascend operators: they are not part of this version "
            f"({describe_devices()}, {ADAPTER} {adapter} installed)",
            fix="pip install . in a version that has the Ascend operators; they need no compiler",
        )


def describe_devices(directory: Path = DEVICE_FILES) -> str:
    """How many Ascend device files (``davinci0``, ``davinci1`` ...) a directory holds, in words."""
    count = len([path for path in directory.glob("davinci*") if path.name[7:].isdigit()])
    return f"{count or 'no'} device file{'' if count == 1 else 's'} {directory}/davinci*"
