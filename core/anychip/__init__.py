"""anychip: write the training once, run it on any chip, prove it.

The names below load on first use (PEP 562), so that ``import anychip`` costs nothing and a plugin's
probe does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anychip.contract import (
        API_VERSION,
        AmbiguousBackendError,
        AnychipError,
        Backend,
        BackendUnavailableError,
        CommunicationError,
        ContractError,
        DeviceError,
        FallbackError,
        OperatorSpec,
        OperatorTable,
        OverlapError,
        Probe,
        UnknownBackendError,
        UnsupportedError,
        hookimpl,
    )
    from anychip.dispatch.operator import operator
    from anychip.fusion import fuse, unfuse
    from anychip.registry import backends
    from anychip.runtime import backend, policy, provenance, register, use

__version__ = "0.1.0"

_HOME = {
    "backends": "anychip.registry",
    "fuse": "anychip.fusion",
    "unfuse": "anychip.fusion",
    "operator": "anychip.ops",  # where dispatch is connected to the registry as well
    **dict.fromkeys(("backend", "policy", "provenance", "register", "use"), "anychip.runtime"),
}
"""Of the names in ``__all__``; that of all others is ``anychip.contract``."""
_MODULES = ("ops", "train", "conformance")

__all__ = [
    "API_VERSION", "AmbiguousBackendError", "AnychipError", "Backend", "BackendUnavailableError",
    "CommunicationError", "ContractError", "DeviceError", "FallbackError", "OperatorSpec",
    "OperatorTable", "OverlapError", "Probe", "UnknownBackendError", "UnsupportedError",
    "__version__", "backend", "backends", "fuse", "hookimpl", "operator", "policy", "provenance",
    "register", "unfuse", "use",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"anychip.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'anychip' has no attribute {name!r}")
    value = getattr(import_module(_HOME.get(name, "anychip.contract")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
