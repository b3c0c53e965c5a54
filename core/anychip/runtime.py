"""The choice of a backend for this process: registry and dispatch joined.

``use()`` chooses and activates; ``backend()`` says what is active. Neither runs on the step path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from anychip import registry
from anychip.contract import AnychipError, Backend, OperatorSpec, OperatorTable
from anychip.registry import environment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from anychip.dispatch.operator import Operator
    from anychip.dispatch.selection import Fallback, Policy
    from anychip.dispatch.tally import Provenance

_active: Backend | None = None


def use(name: str | None = None, *, config: str | None = None) -> Backend:
    """Chooses a backend, makes it serve its device type, and returns it.

    Args:
        name: the backend's name. None: ``ANYCHIP_BACKEND``, else ``config``, else the one
            accelerator that is ready, else the host.
        config: the name that a configuration file asks for.

    Returns:
        The backend; its ``decision`` says why.

    Raises:
        UnknownBackendError: no plugin has this name.
        AmbiguousBackendError: several accelerators are ready, or two distributions claim the name.
        BackendUnavailableError: it cannot run here. There is no fallback to another one.
        ContractError: it, or a kernel pack for it, does not keep to the contract.
        BuildError: ``ANYCHIP_HOST_MEMORY`` asks for what has to be built, and cannot be.
    """
    global _active
    import anychip.ops  # noqa: F401 - the operators that the backend is to serve
    from anychip.dispatch import selection

    if environment.keeps_host_memory():
        from anychip import host_memory

        host_memory.keep()
    chosen = registry.choose(name, config=config)
    selection.activate(chosen)
    _active = chosen
    return chosen


def backend() -> Backend:
    """The backend in use; chooses one when none was."""
    return use() if _active is None else _active


def owner(device_type: str) -> Backend:
    """The backend that serves a device type in this process."""
    if _active is not None and _active.device_type == device_type:
        return _active
    return registry.owner(device_type)


def on_host(tensor: Tensor) -> Tensor:
    """The tensor in the host's memory, for ``item`` and ``tolist``: the host waits for the device.

    Raises:
        DeviceError: the work that was waited for has failed.
    """
    with device_errors(tensor.device.type):
        return tensor.detach().cpu()


@contextmanager
def device_errors(device_type: str) -> Iterator[None]:
    """Context in which an adapter's own error becomes the contract's, where a device has failed.

    Who has failed says so at every wait: ``synchronize`` is asked for the status and its message.
    """
    try:
        yield
    except RuntimeError as error:
        # OutOfMemoryError is the one type of the contract for it, whoever raises it.
        if not isinstance(error, AnychipError) and type(error).__name__ != "OutOfMemoryError":
            _tell(device_type, error)
        raise


def _tell(device_type: str, error: RuntimeError) -> None:
    try:
        owner(device_type).synchronize()
    except AnychipError as known:
        raise known from error
    except RuntimeError:
        return


def digest() -> str:
    """The implementations that the chosen backend and its packs bring, as a short digest.

    Ranks of a job compare it: with other tables they would compute other bits.
    """
    from anychip.dispatch import selection

    lines = [
        f"{provider.name} {provider.version} {row.operator} {row.direction} {row.label}"
        for provider in selection.providers_for(backend().device_type)
        for row in provider.table
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def specifications() -> str:
    """The core's operators and what they take and give, as a short digest for ranks to compare."""
    from anychip.dispatch.operator import registered

    lines = sorted(
        f"{name}{operator.spec.signature}"
        for name, operator in registered().items()
        if operator.spec.namespace == "anychip"
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def table_faults(tables: Iterable[OperatorTable]) -> list[str]:
    """Every row of some tables that could not serve a call, and why; runs none of them."""
    import anychip.ops  # noqa: F401 - the rows are checked against its operators
    from anychip.dispatch.tables import faults

    return [fault for table in tables for fault in faults(table)]


def policy(
    *,
    fallback: Fallback | None = None,
    pin: Mapping[str, str] | None = None,
    forbid: Mapping[str, Iterable[str]] | None = None,
) -> AbstractContextManager[Policy]:
    """Context manager: decides about implementations within a block, for the whole process.

    ``with anychip.policy(fallback="strict", pin={"rms_norm": "reference"}): ...``

    Args:
        fallback: ``record``: the reference may serve what no row takes, counted with the reason.
            ``strict``: that is a FallbackError, raised before anything is written.
        pin: operator to the one implementation allowed: a backend's, pack's or distribution's
            name, a kind (native, mapped, compiled) or ``reference``.
        forbid: operator to implementations that must not be taken.

    Raises:
        ValueError: an unknown fallback, or an operator that does not exist.
    """
    import anychip.ops  # noqa: F401 - the names in pin and forbid are checked against it
    from anychip.dispatch import selection
    from anychip.dispatch.operator import check_names

    check_names([*(pin or {}), *(forbid or {})])
    return selection.policy(fallback=fallback, pin=pin, forbid=forbid)


def provenance(*, reset: bool = False) -> Provenance:
    """Which implementation served each operator, how often, and why a fallback happened."""
    from anychip.cabi.library import served
    from anychip.dispatch import tally

    rows = [tally.TorchRow(*row) for row in served(reset=reset)]
    return tally.provenance(reset=reset, torch=rows)


def register(spec: OperatorSpec) -> Operator[..., Any]:
    """Makes an operator of a third party's spec and returns it, callable like ``anychip.ops``."""
    import anychip.ops  # noqa: F401 - its names are taken, and it connects dispatch
    from anychip.dispatch import operator

    return operator.register(spec)


__all__: list[str] = [
    "backend", "device_errors", "digest", "on_host", "owner", "policy", "provenance",
    "register", "specifications", "table_faults", "use",
]  # fmt: skip
