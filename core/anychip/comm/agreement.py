"""Do the ranks have the same versions, tables, settings? Asked once, before training starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anychip.comm.ledger import ranks_text
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
    import torch

    mine = torch.tensor(list(value.encode()), dtype=torch.uint8, device=comm.device)
    lengths = torch.zeros(comm.world_size, dtype=torch.int64, device=comm.device)
    comm.all_gather(lengths, lengths.new_full((1,), mine.numel()))
    sizes = lengths.tolist()
    everyone = torch.zeros(sum(sizes), dtype=torch.uint8, device=comm.device)
    comm.all_gather(everyone, mine, sizes=sizes)
    values = [bytes(part.tolist()).decode() for part in everyone.cpu().split(sizes)]
    if len(set(values)) == 1:
        return
    usual = max(values, key=lambda text: (values.count(text), -values.index(text)))
    odd = tuple(rank for rank, text in zip(comm.ranks, values, strict=True) if text != usual)
    holders = {
        text: [rank for rank, other in zip(comm.ranks, values, strict=True) if other == text]
        for text in values
    }
    told = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in holders.items())
    raise CommunicationError(
        f"{comm.name}, rank {comm.rank} of {comm.world_size}: agree",
        f"all ranks must have the same {what}; {told}",
        ranks=odd,
    )
