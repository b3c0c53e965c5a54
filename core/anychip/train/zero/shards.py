"""Where do parameters live when ranks own parts of them? In their bucket's buffer.

With stages 1 and 2 every parameter's memory becomes a view into the buffer of its bucket, whole on
every rank. A rank updates its part of the buffer; an all-gather in place brings the other parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anychip.contract import Communicator
from anychip.operators.partials import num_blocks
from anychip.runtime import on_host
from anychip.train.optim import ShardMetadata
from anychip.train.zero.partition import Layout


class Shard(NamedTuple):
    """What this rank owns of a parameter.

    Attributes:
        values: 1-dim view of the parameter's memory; of no elements when it owns none.
        span: where ``values`` lie in the flattened parameter.
        sizes: elements that each rank owns, in rank order.
    """

    values: Tensor
    span: ShardMetadata
    sizes: tuple[int, ...]


class Shards:
    """The buffers of parameters on one rank.

    Attributes:
        of: each parameter's shard.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.of: dict[Tensor, Shard] = {}
        self._buffers: list[tuple[Tensor, Layout, list[Tensor]]] = []

    def add(self, params: Sequence[Tensor], layouts: Iterable[Layout]) -> None:
        """Moves parameters into buffers. Their values become those of rank 0."""
        for layout in layouts:
            members = [params[index] for index in layout.members]
            buffer = broadcast(members, layout, self.comm)
            for position, param in enumerate(members):
                start, numel = layout.starts[position], layout.numels[position]
                param.data = buffer[start : start + numel].view(param.shape)
                self.of[param] = self._shard(buffer, layout, position)
            self._buffers.append((buffer, layout, members))

    def _shard(self, buffer: Tensor, layout: Layout, position: int) -> Shard:
        pieces = [layout.piece(position, rank) for rank in range(self.comm.world_size)]
        mine = pieces[self.comm.rank]
        return Shard(
            buffer[mine.start : mine.start + mine.numel],
            ShardMetadata(mine.offset, layout.numels[position]),
            tuple(piece.numel for piece in pieces),
        )

    def check(self) -> None:
        """Raises RuntimeError when a parameter's memory is not the buffer's any more."""
        for buffer, layout, members in self._buffers:
            first, itemsize = buffer.data_ptr(), buffer.element_size()
            for param, start, numel in zip(members, layout.starts, layout.numels, strict=True):
                if numel and param.data_ptr() != first + start * itemsize:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(param.shape)} has other memory than when the "
                        "optimizer was made, so that its update would be lost; move or convert the "
                        "model before making the optimizer"
                    )

    def gather(self, updated: set[Tensor]) -> None:
        """Brings the other ranks' parts of the buckets in which something was updated."""
        works = [
            self.comm.all_gather(
                buffer, buffer[layout.part(self.comm.rank)], sizes=layout.sizes, async_op=True
            )
            for buffer, layout, members in self._buffers
            if any(param in updated for param in members)
        ]
        for work in works:
            work.wait()
        # A backward through a forward from before the update is an error, as with any optimizer.
        torch.autograd.graph.increment_version(list(updated))

    def whole(self, param: Tensor, piece: Tensor, block: int | None = None) -> Tensor:
        """All ranks' pieces of something that is cut like a parameter, in its shape.

        A collective call.

        Args:
            block: elements of the parameter per entry; None: it has the parameter's shape.
        """
        shape = state_shape(tuple(param.shape), block)
        whole = torch.empty(shape, dtype=piece.dtype, device=piece.device)
        sizes = [num_blocks(size, block or 1) for size in self.of[param].sizes]
        self.comm.all_gather(whole, piece.contiguous(), sizes=sizes)
        return whole


def state_shape(shape: tuple[int, ...], block: int | None) -> tuple[int, ...]:
    """Of a state that has the parameter's shape (block None), or an entry per block of it."""
    return shape if block is None else (num_blocks(math.prod(shape), block),)


@torch.no_grad()
def broadcast(params: Sequence[Tensor], layout: Layout, comm: Communicator) -> Tensor:
    """Rank 0's values of parameters, in a buffer. A collective call."""
    first = params[0]
    buffer = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
    for param, start in zip(params, layout.starts, strict=True):
        buffer[start : start + param.numel()] = param.reshape(-1)
    comm.broadcast(buffer, 0)
    return buffer


def gather(partials: Tensor, comm: Communicator) -> Tensor:
    """The ranks' 1-dim tensors one after the other; each may have another length.

    A collective call, and a transfer to the host.
    """
    lengths = torch.zeros(comm.world_size, dtype=torch.int64, device=partials.device)
    comm.all_gather(lengths, torch.full((1,), len(partials), device=partials.device))
    sizes = on_host(lengths).tolist()
    joined = torch.empty(sum(sizes), dtype=partials.dtype, device=partials.device)
    comm.all_gather(joined, partials, sizes=sizes)
    return joined
