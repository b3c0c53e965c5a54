"""What a plugin hands over: a :class:`Backend` and its answer to "can you run here?".

A chip author subclasses :class:`Backend`, sets five attributes and writes ``probe``; all
else has a documented default. How plugins are found and chosen is the registry's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

from anychip.contract.communicator import Communicator
from anychip.contract.device import DeviceInterface
from anychip.contract.errors import ContractError
from anychip.contract.memory import Memory
from anychip.contract.operator import OperatorTable
from anychip.contract.transport import Job, Transport

API_VERSION = (2, 0)
"""Version of this contract, (major, minor). A plugin made for another major, or for a higher minor
than the core's, is incompatible; for a lower minor it works: every new method has a default."""

Status = Literal["ready", "unavailable", "incompatible", "broken"]
Kind = Literal["accelerator", "host"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """The answer to "can this backend run here?".

    Attributes:
        status: ready; unavailable (no device or driver); incompatible (versions); broken.
        reason: one line; for a ready backend what it found.
        fix: the command or step that helps, if one is known.
        kind: a ready backend is an ``accelerator`` or the ``host`` itself.
        device_count: devices found.
        device_type: torch's name for the device type; filled in by the registry.
        depends: environment variables and files, see :meth:`depending_on`; None: nobody knows.
    """

    status: Status
    reason: str
    fix: str | None = None
    kind: Kind = "accelerator"
    device_count: int = 0
    device_type: str | None = None
    depends: tuple[str, ...] | None = None

    @classmethod
    def ready(cls, device_count: int, *, kind: Kind = "accelerator", reason: str = "") -> Probe:
        """The backend can run; ``device_count`` is at least 1."""
        if device_count < 1:
            raise ValueError(f"Probe.ready needs at least one device, got {device_count}")
        found = reason or f"{device_count} device{'s' if device_count > 1 else ''}"
        return cls(status="ready", reason=found, kind=kind, device_count=device_count)

    @classmethod
    def unavailable(cls, reason: str, *, fix: str | None = None) -> Probe:
        """There is no device, driver or build; ``reason`` is one line a person understands."""
        return cls(status="unavailable", reason=reason, fix=fix)

    @classmethod
    def incompatible(cls, reason: str, *, fix: str | None = None) -> Probe:
        """Something is there, but its version does not fit."""
        return cls(status="incompatible", reason=reason, fix=fix)

    @classmethod
    def broken(cls, reason: str, *, fix: str | None = None) -> Probe:
        """The plugin itself failed; ``reason`` names the exception or signal."""
        return cls(status="broken", reason=reason, fix=fix)

    def depending_on(self, *things: str) -> Probe:
        """The same answer, which ``anychip backends`` may show again while these are as they were.

        The plugin's files and what is installed are looked at anyway; a choice always asks anew.

        Args:
            things: names of environment variables, and whole paths of files, set or not, there or
                not; ``*`` stands for anything in a name.
        """
        return replace(self, depends=things)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Probe:
        """The inverse of ``to_json``, also of what JSON makes of it."""
        depends = fields["depends"]
        return cls(**{**fields, "depends": None if depends is None else tuple(depends)})


class Finding(NamedTuple):
    """One line of a backend's diagnosis: a part that was looked at, and whether it works.

    Attributes:
        ok: the part is there and works.
        text: one line: what was looked at and what was found.
        fix: the command or step that helps, if one is known.
    """

    ok: bool
    text: str
    fix: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One line of a :class:`Decision`: a plugin that was looked at, and what became of it."""

    name: str
    accepted: bool
    why: str
    status: Status | None
    distribution: str | None
    version: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Why a backend was chosen: who asked, every candidate, and the reason for each."""

    name: str
    asked_by: Literal["argument", "environment", "config", "automatic", "device type"]
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        chosen = next(c for c in self.candidates if c.accepted)
        return f"backend {self.name} ({self.asked_by}: {chosen.why})"


class Backend(DeviceInterface, ABC):
    """A chip: devices, memory, operators, collectives.

    Attributes:
        name: the backend's name, equal to its entry point's. It and the others are of the class
            or, where one class serves several chips, of the object.
        device_type: torch's device type that it serves, like ``"cpu"``.
        c10d_backend: torch.distributed's backend for it, or None when it has none.
        ranks_share_devices: whether two ranks of a job can have one device.
        api: the :data:`API_VERSION` it was written for.
        operators: the rows it brings.
    """

    c10d_backend: str | None = None
    ranks_share_devices: bool = True
    api: tuple[int, int]
    operators: OperatorTable
    decision: Decision | None = None
    """Set by the registry when the backend is chosen."""
    join: ClassVar[Callable[..., Communicator] | None] = None
    """Makes what :meth:`communicator` gives; the registry puts it here for all backends."""

    @abstractmethod
    def probe(self) -> Probe:
        """Says whether the backend can run here. Runs in a child process unless it was named.

        Asks only: no device context, no allocation, no torch import unless nothing else can tell.
        What the answer depends on it says by ``Probe.depending_on``.
        """

    def diagnose(self) -> Sequence[Finding]:
        """Parts of the backend worth a line in ``anychip doctor``: native module, driver ...

        Under the rules of ``probe`` and after it, in a child process. Optional: by default the
        answer of ``probe`` is all there is to say.
        """
        return ()

    @cached_property
    def memory(self) -> Memory:
        """The memory part; a chip that overrides some of it returns a subclass."""
        return Memory(self)

    def communicator(
        self,
        *,
        timeout_s: float = 600.0,
        heartbeat_s: float = 30.0,
        check: Literal["always", "step", "off"] = "step",
    ) -> Communicator:
        """The communicator over all ranks of this job; the same one until it is closed.

        A job is what torchrun or another launcher has started, or the default process group that
        the caller has made; otherwise this process is alone. A collective call of several ranks.

        On the host reductions are pairwise over the ranks. A chip's :meth:`transport` does its own.
        A chip without one communicates by way of the host, which rank 0 says in a warning.

        Args:
            timeout_s: seconds that any wait for another rank may take.
            heartbeat_s: seconds without a sign of life after which a rank counts as lost.
            check: ``step``: ranks whose calls differ exchange no byte, and compare when one has
                waited for ``heartbeat_s``; ``always``, where the transport takes no tags: before
                anything is sent, by a round trip to the job's store; ``off``: never.

        Raises:
            CommunicationError: a rank did not come within the time limit.
        """
        if Backend.join is None:
            raise ContractError(
                "nothing says whether this process is one of several: import anychip.registry "
                "before, as anychip.use(name) does"
            )
        return Backend.join(self, timeout_s=timeout_s, heartbeat_s=heartbeat_s, check=check)

    def transport(self, job: Job) -> Transport | None:
        """What moves the bytes of a job's calls on the device; None: they go through the host.

        By default the backend of torch.distributed that ``c10d_backend`` names. A chip overrides
        this to say more about it, or to bring a transport of its own.
        """
        if self.c10d_backend is None or self.is_host:
            return None
        return job.library(self.c10d_backend, self.device_type)
