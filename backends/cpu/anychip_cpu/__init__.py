"""The host as a chip: native C++ kernels for what is bound by memory, torch's own for matrices."""

from __future__ import annotations

from anychip.contract import Backend, hookimpl


@hookimpl
def anychip_backend() -> Backend:
    """The cpu backend."""
    from anychip_cpu.backend import CpuBackend

    return CpuBackend()
