"""Values that are no single tensor, from every rank to every rank: states, not gradients."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anychip.contract.collectives.communicator import Communicator


def gather_objects(comm: Communicator, value: Any) -> list[Any]:
    """The ranks' values in their order, on every rank; tensors on the host. A collective call.

    Args:
        value: tensors, numbers, texts, lists, tuples and dicts: what ``torch.load`` reads without
            running code.
    """
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    mine = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(comm.device)
    counts = torch.zeros(comm.world_size, dtype=torch.int64, device=comm.device)
    comm.all_gather(counts, counts.new_full((1,), mine.numel()))
    sizes = counts.tolist()
    whole = mine.new_empty(sum(sizes))
    comm.all_gather(whole, mine, sizes=sizes)
    return [
        torch.load(io.BytesIO(part.numpy().tobytes()), map_location="cpu", weights_only=True)
        for part in whole.cpu().split(sizes)
    ]
