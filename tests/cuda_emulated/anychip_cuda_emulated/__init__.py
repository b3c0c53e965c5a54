"""The CUDA kernels on the host, as an anychip plugin for tests: ``--backend cuda-emulated``."""

from anychip.contract import Backend, hookimpl


@hookimpl
def anychip_backend() -> Backend:
    """The backend for emulated devices."""
    from anychip_cuda_emulated.backend import CudaEmulatedBackend

    return CudaEmulatedBackend()
