"""What can go wrong, one type per kind of answer a caller can give.

A message says what was expected, what was got, where (backend, operator, rank) and what to do.
Running out of device memory is always ``torch.OutOfMemoryError`` and has no type of ours.
"""

from typing import Literal


class AnychipError(Exception):
    """Base of every error that this package raises on purpose."""


class ContractError(AnychipError, TypeError):
    """A plugin, backend or operator row does not keep to the contract; a mistake of its author."""


class UnsupportedError(AnychipError, NotImplementedError):
    """A capability that this backend does not declare, or that this version does not have.

    Permanent for the given backend and version; never raised because a call failed.
    """


class UnknownBackendError(AnychipError, ValueError):
    """No installed plugin has the name that was asked for."""


class AmbiguousBackendError(AnychipError, ValueError):
    """More than one answer is possible, and the user has to choose."""


class BackendUnavailableError(AnychipError, RuntimeError):
    """The backend that was asked for cannot run here.

    Args:
        name: the backend's name.
        status: ``unavailable``, ``incompatible`` or ``broken``, as in :class:`anychip.Probe`.
        reason: one line.
        fix: what a person can type or do about it, or None when nothing is known.
    """

    def __init__(self, name: str, status: str, reason: str, fix: str | None = None) -> None:
        self.name, self.status, self.reason, self.fix = name, status, reason, fix
        advice = f"\n  to fix it: {fix}" if fix else ""
        super().__init__(f"backend {name!r} cannot run here ({status}): {reason}{advice}")


class DeviceError(AnychipError, RuntimeError):
    """A driver call failed.

    Args:
        where: backend and call, like ``"acme: synchronize(device 0)"``.
        code: the driver's status number.
        label: the driver's name for it.
        detail: the driver's text, if it has one.
    """

    def __init__(self, where: str, code: int, label: str, detail: str = "") -> None:
        self.code, self.label, self.detail = code, label, detail
        text = f"{where} failed with {label} ({code})"
        super().__init__(f"{text}: {detail}" if detail else text)


class FallbackError(AnychipError, RuntimeError):
    """The policy is ``strict`` and only the reference could serve the call; nothing was written."""


class OverlapError(AnychipError, ValueError):
    """Two tensors of an in-place call share memory, so its result would depend on the order."""


class TransportError(AnychipError, RuntimeError):
    """A transport could not do what it was given. A group makes a CommunicationError of it.

    Args:
        reason: one line.
        peers: at the other end of what failed, counted in the group.
        how: ``lost``: a connection broke; ``late``: the time limit is over; ``wrong``: the peers
            have called something else.
    """

    def __init__(
        self, reason: str, peers: tuple[int, ...], how: Literal["lost", "late", "wrong"] = "lost"
    ) -> None:
        self.peers, self.how = peers, how
        super().__init__(reason)


class CommunicationError(AnychipError, RuntimeError):
    """A call between ranks failed: they disagree, one did not come in time, or one is lost.

    The communicator can only be closed afterwards.

    Args:
        where: group, rank and call, like ``"world, rank 0 of 4: all_reduce #17"``.
        reason: what happened, naming the ranks at fault and what they did instead.
        ranks: the ranks at fault, counted in the world; empty when nobody can tell.
    """

    def __init__(self, where: str, reason: str, *, ranks: tuple[int, ...] = ()) -> None:
        self.where, self.reason, self.ranks = where, reason, ranks
        super().__init__(f"{where}: {reason}")
