"""Ascend NPUs as an anychip plugin: the hook that hands over the backend of ``backend.py``."""

from __future__ import annotations

from anychip.contract import Backend, hookimpl


@hookimpl
def anychip_backend() -> Backend:
    """The backend for Ascend devices."""
    from anychip_npu.backend import NpuBackend

    return NpuBackend()
