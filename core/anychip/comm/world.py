"""Which communicator does this process get? One rank, the host, the chip's own, or a detour."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from anychip.comm import generations
from anychip.comm.generations import Meeting
from anychip.comm.group import Group, alone
from anychip.comm.job import Job, Rendezvous, join
from anychip.comm.ledger import CHECKS, Check
from anychip.comm.staged import Staged
from anychip.comm.store import part_of
from anychip.contract import Backend, Communicator, ContractError, Transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class _World(NamedTuple):
    """A communicator, and where its ranks may meet again."""

    comm: Communicator
    generation: int
    store: Store


_worlds: dict[tuple[str, str | None], _World] = {}


def world(
    chip: Backend,
    find_job: Callable[[float], Rendezvous | None],
    *,
    timeout_s: float,
    heartbeat_s: float,
    check: Check,
    meeting: Meeting | None = None,
) -> Communicator:
    """The communicator of all ranks of the job, see :meth:`anychip.contract.Backend.communicator`.

    Args:
        find_job: gives this process's place in a job, met within so many seconds, or None when it
            is alone.
        meeting: of :func:`meet_again`; None: the ranks are the launcher's.
    """
    for name, seconds in {"timeout_s": timeout_s, "heartbeat_s": heartbeat_s}.items():
        if not seconds > 0:
            raise ValueError(f"{name}: seconds above 0 expected, got {seconds}")
    if check not in CHECKS:
        raise ValueError(f"check: one of {', '.join(CHECKS)} expected, got {check!r}")
    key, generation = _key(chip), 0
    known = _worlds.get(key)
    if known is not None:
        if meeting is not None:
            known.comm.close()
        elif not known.comm.is_closed:
            return known.comm
        elif known.generation:
            raise ValueError(
                "communicator: this process has met other ranks since the launcher started it; "
                "anychip.comm.meet_again(backend, meeting) makes its next communicator"
            )
    place = find_job(timeout_s)
    if place is None:
        return alone(device=chip.device_type)
    if meeting is not None:
        former = known.comm.rank if known is not None else None
        generation, rank, size = generations.come(place.store, former, meeting, timeout_s)
        place = place._replace(rank=rank, world_size=size)
    comm = alone(device=chip.device_type)
    if place.world_size > 1:
        limits = {"timeout_s": timeout_s, "heartbeat_s": heartbeat_s}
        job = join(place, **limits, check=check, generation=generation)
        comm = Group(job.world, transport_of(chip, job), job)
    _worlds[key] = _World(comm, generation, place.store)
    return comm


def meet_again(
    chip: Backend,
    meeting: Meeting,
    *,
    timeout_s: float = 600.0,
    heartbeat_s: float = 30.0,
    check: Check = "step",
) -> Communicator:
    """The communicator of those who meet now, in place of the one that this process had.

    After a loss the ranks that are left call it, and so do processes that are to join them: started
    by the same launcher, which keeps the job's store, with variables like those of any rank. What
    this process had before ends first: connections, threads and all groups of the old communicator,
    on which nothing can be called any more; the other ranks hear of that as of any rank that
    closes. Only then it waits for the others. The new one has nothing of the old one's: numbers of
    calls, side channel, time limits and groups begin anew, and ranks may be others.

    Who is in it is decided in the store by those who were in the one before, see
    :mod:`anychip.comm.generations`. A rank that was only slow, and comes when the others have met
    without it, waits like a new one, for the meeting after that: they see it by
    :func:`num_waiting`.

    Args:
        meeting: who is waited for; the same on all.
        timeout_s, heartbeat_s, check: as of :meth:`anychip.contract.Backend.communicator`;
            ``timeout_s`` is also how long this process waits to be met.

    Raises:
        CommunicationError: not enough came in time, or one that did was lost before all were
            connected. It can be called again.
    """
    if Backend.join is None:
        raise ContractError("meet_again: import anychip.registry before, as anychip.use(name) does")
    limits = {"timeout_s": timeout_s, "heartbeat_s": heartbeat_s}
    return Backend.join(chip, **limits, check=check, meeting=meeting)


def num_waiting(chip: Backend) -> int:
    """How many processes wait to be met: new ones, and such as were too slow for the last meeting.

    One rank asks and tells the others, so that all call :func:`meet_again` at the same step.
    """
    known = _worlds.get(_key(chip))
    return 0 if known is None else generations.num_waiting(known.store, known.generation)


def _key(chip: Backend) -> tuple[str, str | None]:
    return chip.device_type, chip.c10d_backend


def transport_of(chip: Backend, job: Job) -> Transport:
    """What moves the bytes between processes: the first of the table that serves the chip.

    A chip's own moves them between devices of its kind only, so that the ranks first say what they
    have: where that differs, all go through the host, which every chip can.
    """
    kinds = part_of(job.store, "device types")
    kinds.set(str(job.rank), chip.device_type)
    if len({*kinds.multi_get([str(rank) for rank in range(job.world_size)])}) > 1:
        host = job.host(job.world)
        return host if chip.is_host else Staged(host, chip.device_type)
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
    return job.host(job.world, chip.device_type)


TABLE: tuple[Callable[[Backend, Job], Transport | None], ...] = (_of_chip, _of_host, _through_host)
"""By device type: the chip's own, the host's, the way through the host."""
