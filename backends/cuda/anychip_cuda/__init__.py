"""NVIDIA GPUs as an anychip plugin: the hook that hands over the backend of ``backend.py``."""

from __future__ import annotations

from anychip.contract import Backend, hookimpl


@hookimpl
def anychip_backend() -> Backend:
    """The backend for CUDA devices."""
    from anychip_cuda.backend import CudaBackend

    return CudaBackend()
