"""Loading of the native kernels, and the reason when there are none.

The kernels must run on the OpenMP runtime that torch runs on: two runtimes in a process would
start two sets of threads. A module for which that cannot be shown is not used, and ``problem``
says so.
"""

from __future__ import annotations

from importlib import resources
from types import ModuleType

import torch

BUILD_COMMAND = "pip install . -Ccmake.define.ANYCHIP_CPU=ON"
INTERFACE = 11
"""The version of the native module's signatures that this code calls."""

_MISSING = "_native_missing.txt"


def _load() -> tuple[ModuleType | None, str | None]:
    try:
        from anychip_cpu import _native
    except ImportError as error:
        note = resources.files("anychip_cpu") / _MISSING
        if note.is_file():
            return None, note.read_text().strip()
        return None, (
            f"the native kernels cannot be loaded ({error}); this builds them: {BUILD_COMMAND}"
        )
    found = int(_native.build_info()["abi"])
    if found != INTERFACE:
        return None, (
            f"the native kernels have interface {found}, and this version calls {INTERFACE}; "
            f"this builds them again: {BUILD_COMMAND}"
        )
    same, sentence = _native.openmp_status()
    return (_native, None) if same else (None, sentence)


kernels, problem = _load()
"""The native module or None; the reason for None, with the command that helps."""

CODES: dict[torch.dtype, int] = {}
"""dtype to the kernels' number for it."""
if kernels is not None:
    CODES = {
        torch.float32: kernels.FLOAT32,
        torch.bfloat16: kernels.BFLOAT16,
        torch.float16: kernels.FLOAT16,
    }
