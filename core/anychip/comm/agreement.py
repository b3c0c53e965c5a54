"""Do the ranks have the same versions, tables, settings? Asked once, before training starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anychip.comm.ledger import compared
from anychip.comm.objects import gather_objects
from anychip.contract.errors import CommunicationError

if TYPE_CHECKING:
    from anychip.contract.communicator import Communicator


def agree(comm: Communicator, what: str, value: str) -> None:
    """Raises on every rank unless ``value`` is the same on all. A collective call.

    Args:
        what: names the value in the message, like ``"backend"`` or ``"operator table"``.
        value: any text: a name and version, or the digest of something longer.

    Raises:
        CommunicationError: names the ranks that differ from most, and all values. The
            communicator can still be used.
    """
    values = gather_objects(comm, value)
    if len(set(values)) == 1:
        return
    odd, told = compared(dict(zip(comm.ranks, values, strict=True)))
    raise CommunicationError(
        f"{comm.name}, rank {comm.rank} of {comm.world_size}: agree",
        f"all ranks must have the same {what}; {told}",
        ranks=odd,
    )
