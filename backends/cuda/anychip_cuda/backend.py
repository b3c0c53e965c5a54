"""The cuda backend: NVIDIA GPUs through torch.cuda, with kernels of ours where memory is the limit.

Without the native kernels it still runs: the mapped rows and the references serve every operator.
A build of torch for ROCm gives its devices the same type; it is served in that way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from anychip.contract import Backend, Finding, Job, Memory, Probe, Transport
from anychip_cuda import driver, native, nvml, operators, readiness
from anychip_cuda.device import CudaDevice
from anychip_cuda.memory import CudaMemory
from anychip_cuda.table import make_table

DEPENDS = (
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "/etc/ld.so.cache",
    "/usr/lib*/libcuda.so*", "/usr/lib/*/libcuda.so*", "/dev/nvidia*", "/dev/kfd", "/dev/dri",
)  # fmt: skip
"""What the answer of the probe may change with, besides what is installed."""
_TORCH = readiness.TorchBuild(torch.__version__, torch.version.cuda, torch.version.hip)


def _kernels_problem() -> str | None:
    """Why the native kernels are not called, or None when they are."""
    if native.module is None:
        return native.problem or "the CUDA kernels are not there"
    if _TORCH.hip:
        return "the kernels are built for NVIDIA devices"
    version = driver.version()
    return (readiness.too_old(version, native_toolkit()) or None) if version else None


def native_toolkit() -> str:
    """The CUDA version that the kernels were built with, like "13.0.88"; "" without kernels."""
    if native.module is None:
        return ""
    return str(native.module.build_info()["compiler"]).rpartition(" ")[2]


_PROBLEM = _kernels_problem()


class CudaBackend(CudaDevice, Backend):
    """CUDA devices."""

    name = "cuda"
    device_type = "cuda"
    c10d_backend = "nccl"
    ranks_share_devices = False
    api = (2, 0)
    operators = operators.table if _PROBLEM is None else make_table(None)
    capabilities: Mapping[str, int] = {**Backend.capabilities, "graphs": 1}

    def probe(self) -> Probe:
        if _TORCH.hip:
            found = readiness.answer_of_hip(torch.cuda.device_count(), _TORCH)
        else:
            found = readiness.answer(driver.ask(), driver.files(), _TORCH, _PROBLEM)
        return found.depending_on(*DEPENDS)

    def diagnose(self) -> Sequence[Finding]:
        """Driver, devices, kernels and NCCL, each by itself."""
        found = readiness.findings(driver.ask(), _TORCH)
        if _PROBLEM is None and native.module is not None:
            built = native.module.build_info()
            text = f"native kernels for {built['architectures']} by {built['compiler']}"
            found.append(Finding(True, text))
        else:
            found.append(Finding(False, str(_PROBLEM), native.BUILD_COMMAND))
        release = nvml.driver_version()
        if release is not None:
            found.append(Finding(True, f"driver {release} by the management library"))
        if found and not torch.distributed.is_nccl_available():
            found.append(Finding(False, "torch is built without NCCL", readiness.GET_TORCH))
        return found

    @cached_property
    def memory(self) -> Memory:
        return CudaMemory(self)

    def transport(self, job: Job) -> Transport | None:
        from anychip_cuda.collectives import transport

        return transport(job)
