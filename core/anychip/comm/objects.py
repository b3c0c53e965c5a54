"""Values that are no single tensor, from every rank to every rank: states, not gradients.

What holds the tensors is sent first; then the tensors, one after the other and in pieces, so that
beside the values a rank holds one piece at a time, however large a tensor is.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from anychip.contract import HOST
from anychip.contract.communicator import Transfer

if TYPE_CHECKING:
    import torch

    from anychip.contract.communicator import Communicator

PIECE_NBYTES = 16 << 20
"""Of a message at most: large enough for full bandwidth."""


def gather_objects(comm: Communicator, value: Any, *, to_rank: int | None = None) -> list[Any]:
    """The ranks' values in their order, on every rank; tensors on the host. A collective call.

    A tensor that stands at several places of a value is sent once, and is one tensor again. What a
    rank has on the host of its own is not copied.

    Args:
        value: tensors, numbers, texts, lists, tuples and dicts: what ``torch.load`` reads without
            running code.
        to_rank: the only rank that gets the values; the others give theirs, and get an empty list.
    """
    mine: dict[int, torch.Tensor] = {}
    shells: dict[int, torch.Tensor] = {}

    def shell_of(tensor: torch.Tensor) -> torch.Tensor:
        mine.setdefault(id(tensor), tensor.detach())
        return shells.setdefault(id(tensor), tensor.new_empty(tensor.shape, device="meta"))

    parts = _gather_small(comm, _replaced(value, shell_of))
    return [
        whole
        for source, part in enumerate(parts)
        for whole in _filled(comm, part, list(mine.values()), source, to_rank)
    ]


def _replaced(value: Any, new: Callable[[torch.Tensor], Any]) -> Any:
    """The value with something else in the place of each tensor, from the first to the last."""
    import torch

    if isinstance(value, torch.Tensor):
        return new(value)
    if isinstance(value, Mapping):
        return {key: _replaced(inner, new) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(inner, new) for inner in value)
    return value


def _gather_small(comm: Communicator, value: Any) -> list[Any]:
    """The ranks' values, whose tensors have no data, in one message."""
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
        torch.load(io.BytesIO(part.numpy().tobytes()), weights_only=True)
        for part in whole.cpu().split(sizes)
    ]


def _filled(
    comm: Communicator, value: Any, mine: list[torch.Tensor], source: int, to_rank: int | None
) -> list[Any]:
    """A rank's value with data in its tensors, which that rank sends; nothing where not wanted."""
    keeps, is_source = to_rank in (None, comm.rank), source == comm.rank
    found: dict[int, torch.Tensor] = {}

    def fill(shell: torch.Tensor) -> torch.Tensor:
        if id(shell) not in found:
            room = shell.shape if keeps else (0,)
            tensor = mine[len(found)] if is_source else shell.new_empty(room, device=HOST)
            if is_source or keeps:
                _send(comm, tensor, source, to_rank)
            found[id(shell)] = tensor.cpu() if keeps else tensor
        return found[id(shell)]

    whole = _replaced(value, fill)
    return [whole] if keeps else []


def _send(comm: Communicator, tensor: torch.Tensor, source: int, to_rank: int | None) -> None:
    """Moves a tensor of one rank to all, or to one, piece by piece; the source's is not written."""
    import torch

    if comm.world_size == 1 or source == to_rank or not tensor.numel():
        return
    for here in tensor.reshape(-1).view(torch.uint8).split(PIECE_NBYTES):
        is_source = comm.rank == source
        piece = here
        if here.device.type != comm.device:
            piece = here.new_empty(len(here), device=comm.device)
            if is_source:
                piece.copy_(here)
        if to_rank is None:
            comm.broadcast(piece, source)
        elif is_source:
            comm.exchange([Transfer("send", piece, to_rank)])
        else:
            comm.exchange([Transfer("recv", piece, source)])
        if piece is not here and not is_source:
            here.copy_(piece)
