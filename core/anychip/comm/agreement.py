"""Do the ranks have the same versions, tables, settings? Asked once, before training starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anychip.comm.ledger import compared
from anychip.comm.objects import gather_objects
from anychip.contract.errors import CommunicationError

if TYPE_CHECKING:
    from anychip.contract.communicator import Communicator


def agree(comm: Communicator, what: str, value: str, *, among: str = "") -> None:
    """Raises on every rank unless ``value`` is the same on all. A collective call.

    Args:
        what: names the value in the message, like ``"backend"`` or ``"operator table"``.
        value: any text: a name and version, or the digest of something longer.
        among: only ranks that say the same here need the same value, like those with one chip.

    Raises:
        CommunicationError: names the ranks that differ from most, and all values. The
            communicator can still be used.
    """
    groups: dict[str, dict[int, str]] = {}
    for rank, (group, said) in zip(comm.ranks, gather_objects(comm, (among, value)), strict=True):
        groups.setdefault(group, {})[rank] = said
    values = next((said for said in groups.values() if len(set(said.values())) > 1), None)
    if values is None:
        return
    odd, told = compared(values)
    raise CommunicationError(
        f"{comm.name}, rank {comm.rank} of {comm.world_size}: agree",
        f"all ranks must have the same {what}; {told}",
        ranks=odd,
    )
