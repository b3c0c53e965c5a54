"""The cpu backend: always ready, with or without its native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from anychip.contract import Backend, Finding, Memory, Probe
from anychip_cpu import native
from anychip_cpu.device import CpuDevice, model_name
from anychip_cpu.memory import CpuMemory, has_statistics
from anychip_cpu.operators import table


class CpuBackend(CpuDevice, Backend):
    """The host."""

    name = "cpu"
    device_type = "cpu"
    c10d_backend = "gloo"
    api = (2, 0)
    operators = table
    capabilities = {"memory_stats": 1} if has_statistics() else {}

    def probe(self) -> Probe:
        kernels = "native kernels" if native.problem is None else "reference only"
        found = Probe.ready(1, kind="host", reason=f"{model_name()}, {kernels}")
        return found.depending_on("LD_LIBRARY_PATH", "LD_PRELOAD")

    def diagnose(self) -> Sequence[Finding]:
        """What serves the operators: the native kernels, or why there are none."""
        if native.kernels is None:
            reason = native.problem or "the native kernels are not there"
            return [Finding(False, reason, native.BUILD_COMMAND)]
        built = native.kernels.build_info()
        levels = f"{built['isa']} (built: {built['isas_compiled']})"
        _, shared = native.kernels.openmp_status()
        return [
            Finding(True, f"native kernels for {levels} by {built['compiler']}"),
            Finding(True, shared),
        ]

    @cached_property
    def memory(self) -> Memory:
        return CpuMemory(self)
