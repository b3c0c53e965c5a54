"""The plugin: its hook. Imported only when the backend ``toy`` is chosen or probed."""

from __future__ import annotations

from anychip.contract import Backend, hookimpl


@hookimpl
def anychip_backend() -> Backend:
    """The toy backend."""
    # Imported here and not above, so that a probe that finds no chip need not load the kernels.
    from anychip_toy.backend import ToyBackend

    return ToyBackend()
