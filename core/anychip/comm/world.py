"""Which communicator does this process get? One rank, the host, the chip's own, or a detour."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from anychip.comm.solo import alone
from anychip.contract import Backend, Communicator

if TYPE_CHECKING:
    from anychip.comm.job import Rendezvous

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
    chip: Backend, find_job: Callable[[float], Rendezvous | None], settings: Settings
) -> Communicator:
    """The communicator of all ranks of the job, for tensors of a backend's device type.

    Args:
        find_job: gives this process's place in a job, met within so many seconds, or None when it
            is alone.
    """
    key = (chip.device_type, chip.c10d_backend)
    known = _worlds.get(key)
    if known is not None and not known.is_closed:
        return known
    place = find_job(settings.timeout_s)
    if place is None or place.world_size == 1:
        return alone(device=chip.device_type)
    from anychip.comm.c10d import ProcessGroupCommunicator
    from anychip.comm.job import Job
    from anychip.comm.native import NativeCommunicator

    job = Job(
        place,
        timeout_s=settings.timeout_s,
        heartbeat_s=settings.heartbeat_s,
        check=settings.check,
    )
    everyone = tuple(range(job.world_size))
    comm: Communicator = ProcessGroupCommunicator(job, 0, everyone, "world")
    if chip.c10d_backend is not None and chip.c10d_backend != "gloo":
        made = chip.native_communicator() or NativeCommunicator
        name, device = chip.c10d_backend, chip.device_type
        comm = made(job, 0, everyone, "world", backend=name, device=device)
    elif chip.device_type != "cpu":
        from anychip.comm.staged import HostStagedCommunicator

        comm = HostStagedCommunicator(comm, chip.device_type)
        if job.rank == 0:
            warnings.warn(
                f"{chip.device_type!r} has no collectives of its own: tensors go through the host",
                RuntimeWarning,
                stacklevel=4,
            )
    _worlds[key] = comm
    return comm
