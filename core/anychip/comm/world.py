"""Which communicator does this process get? One rank, the host, the chip's own, or a detour."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from anychip.comm.group import Group, alone
from anychip.comm.job import Job, Rendezvous, join
from anychip.comm.ledger import CHECKS, Check
from anychip.comm.staged import Staged
from anychip.contract import Backend, Communicator, Transport

_worlds: dict[tuple[str, str | None], Communicator] = {}


def world(
    chip: Backend,
    find_job: Callable[[float], Rendezvous | None],
    *,
    timeout_s: float,
    heartbeat_s: float,
    check: Check,
) -> Communicator:
    """The communicator of all ranks of the job, see :meth:`anychip.contract.Backend.communicator`.

    Args:
        find_job: gives this process's place in a job, met within so many seconds, or None when it
            is alone.
    """
    for name, seconds in {"timeout_s": timeout_s, "heartbeat_s": heartbeat_s}.items():
        if not seconds > 0:
            raise ValueError(f"{name}: seconds above 0 expected, got {seconds}")
    if check not in CHECKS:
        raise ValueError(f"check: one of {', '.join(CHECKS)} expected, got {check!r}")
    key = (chip.device_type, chip.c10d_backend)
    known = _worlds.get(key)
    if known is not None and not known.is_closed:
        return known
    place = find_job(timeout_s)
    if place is None or place.world_size == 1:
        return alone(device=chip.device_type)
    job = join(place, timeout_s=timeout_s, heartbeat_s=heartbeat_s, check=check)
    _worlds[key] = comm = Group(job.world, transport_of(chip, job), job)
    return comm


def transport_of(chip: Backend, job: Job) -> Transport:
    """What moves the bytes between processes: the first of the table that serves the chip."""
    for way in TABLE:
        found = way(chip, job)
        if found is not None:
            return found
    raise AssertionError("the last way serves every chip")


def _of_host(chip: Backend, job: Job) -> Transport | None:
    return job.host(job.world) if chip.is_host else None


def _of_chip(chip: Backend, job: Job) -> Transport | None:
    return chip.transport(job)


def _through_host(chip: Backend, job: Job) -> Transport | None:
    if job.rank == 0:
        warnings.warn(
            f"{chip.device_type!r} has no collectives of its own: tensors go through the host",
            RuntimeWarning,
            stacklevel=6,
        )
    return Staged(job.host(job.world), chip.device_type)


TABLE: tuple[Callable[[Backend, Job], Transport | None], ...] = (
    _of_chip,
    _of_host,
    _through_host,
)
"""By device type: the chip's own, the host's, the way through the host."""
