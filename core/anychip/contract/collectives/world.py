"""Which communicator does this process get? One rank, the host, the chip's own, or a detour."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from anychip.contract.collectives.communicator import Communicator
from anychip.contract.collectives.solo import SoloCommunicator
from anychip.contract.errors import ContractError

if TYPE_CHECKING:
    from anychip.contract.collectives.job import Rendezvous

find_job: Callable[[float], Rendezvous | None] | None = None
"""This process's place in a job, met within so many seconds, or None when it is alone. The
registry puts it here."""
_worlds: dict[tuple[str, str | None], Communicator] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """See :meth:`anychip.contract.Backend.communicator`."""

    timeout_s: float
    heartbeat_s: float
    check: Literal["always", "off"]

    def __post_init__(self) -> None:
        for name in ("timeout_s", "heartbeat_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: seconds above 0 expected, got {getattr(self, name)}")
        if self.check not in ("always", "off"):
            raise ValueError(f"check: 'always' or 'off' expected, got {self.check!r}")


def world(
    device_type: str,
    c10d_backend: str | None,
    settings: Settings,
    native: Callable[[], Callable[..., Communicator]],
) -> Communicator:
    """The communicator of all ranks of the job, for tensors of a device type.

    Args:
        c10d_backend: torch.distributed's backend for them, or None when it has none.
        native: gives the class of communicators over that backend, unless it is gloo.
    """
    key = (device_type, c10d_backend)
    known = _worlds.get(key)
    if known is not None and not known.is_closed:
        return known
    place = _place(settings.timeout_s)
    if place is None or place.world_size == 1:
        solo = SoloCommunicator()
        solo.device = device_type
        return solo
    from anychip.contract.collectives.c10d import ProcessGroupCommunicator
    from anychip.contract.collectives.job import Job

    job = Job(
        place,
        timeout_s=settings.timeout_s,
        heartbeat_s=settings.heartbeat_s,
        check=settings.check,
    )
    everyone = tuple(range(job.world_size))
    comm: Communicator = ProcessGroupCommunicator(job, 0, everyone, "world")
    if c10d_backend is not None and c10d_backend != "gloo":
        made: Any = native()
        comm = made(job, 0, everyone, "world", backend=c10d_backend, device=device_type)
    elif device_type != "cpu":
        from anychip.contract.collectives.staged import HostStagedCommunicator

        comm = HostStagedCommunicator(comm, device_type)
        if job.rank == 0:
            warnings.warn(
                f"{device_type!r} has no collectives of its own: tensors go through the host",
                RuntimeWarning,
                stacklevel=3,
            )
    _worlds[key] = comm
    return comm


def _place(timeout_s: float) -> Rendezvous | None:
    if find_job is None:
        raise ContractError(
            "nothing says whether this process is one of several: import anychip.registry before, "
            "as anychip.use(name) does"
        )
    return find_job(timeout_s)
