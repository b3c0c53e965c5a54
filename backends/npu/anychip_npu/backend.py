"""The npu backend: Ascend NPUs through torch_npu and CANN, without kernels of ours.

Run against torch_npu 2.13.0 on an emulated CANN; not run on Ascend silicon.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from anychip.contract import Backend, Finding, Job, Memory, OperatorTable, Probe, Transport
from anychip_npu import adapter, cann, readiness
from anychip_npu.device import NpuDevice

DEPENDS = (
    "ASCEND_HOME_PATH", "ASCEND_RT_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "/dev/davinci*",
    "/usr/local/Ascend/*", "/usr/local/Ascend/driver/version.info", "/etc/ld.so.cache",
)  # fmt: skip
"""What the answer of the probe may change with, besides what is installed."""


def _table() -> OperatorTable:
    """The rows; none where torch_npu cannot be imported, and then the probe says why."""
    if adapter.obstacle():
        return OperatorTable()
    from anychip_npu.operators import table

    return table


class NpuBackend(NpuDevice, Backend):
    """Ascend NPUs."""

    name = "npu"
    device_type = "npu"
    c10d_backend = "hccl"
    ranks_share_devices = False
    api = (2, 0)
    operators = _table()

    def probe(self) -> Probe:
        return readiness.answer(_facts()).depending_on(*DEPENDS)

    def diagnose(self) -> Sequence[Finding]:
        """torch_npu, CANN, torch's own import, devices, and rows that this release lacks."""
        found = readiness.findings(_facts(), adapter.what_import_does())
        if adapter.obstacle():
            return found
        from anychip_npu.table import declared, unknown

        lacking = sorted({name for row in declared for name in unknown(row)})
        if lacking:
            served = ", ".join(dict.fromkeys(row.operator for row in declared if unknown(row)))
            text = f"this torch_npu has no {', '.join(lacking)}: the reference serves {served}"
            found.append(Finding(True, text))
        return found

    @cached_property
    def memory(self) -> Memory:
        from anychip_npu.memory import NpuMemory

        return NpuMemory(self)

    def transport(self, job: Job) -> Transport | None:
        from anychip_npu.collectives import transport

        return transport(job)


def _facts() -> readiness.Facts:
    """What is found here; imports torch_npu only where nothing speaks against it."""
    versions, obstacle = adapter.versions(), adapter.obstacle()
    count = 0 if obstacle else int(adapter.module().npu.device_count())
    return readiness.Facts(
        versions,
        cann.missing_library() if versions.adapter is not None else "",
        cann.environment_script(),
        obstacle,
        cann.device_files(),
        (cann.part() or "Ascend device",) * count,
        cann.version(),
    )
