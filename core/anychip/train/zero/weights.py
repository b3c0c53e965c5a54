"""Where do parameters live when ranks own parts of them? In a flat buffer, as views.

What else than its part a rank has, says a :class:`Partition`. Where that is nothing, the buffer's
storage comes when its weights are gathered and goes when they are released. The parameters stay
views of it all the time, and so do the aliases that autograd keeps.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from anychip.contract import DONE, Work
from anychip.train.optim.rule import num_blocks
from anychip.train.zero import guard
from anychip.train.zero.exchange import Exchange
from anychip.train.zero.layout import ALIGNMENT, Chunk, Layout, Piece, ShardMetadata, chunks
from anychip.train.zero.streaming import Tiers
from anychip.train.zero.tiers import Elsewhere


class Partition(NamedTuple):
    """Of what each rank keeps its part only: weights, gradients, states."""

    weights: bool
    gradients: bool
    states: bool


STAGES = {
    0: Partition(weights=False, gradients=False, states=False),
    1: Partition(weights=False, gradients=False, states=True),
    2: Partition(weights=False, gradients=True, states=True),
    3: Partition(weights=True, gradients=True, states=True),
}
"""Rajbhandari et al. 2020, arXiv:1910.02054, section 5."""


class FlatWeights:
    """The weights of some parameters on one rank. Their values become those of rank 0.

    Weights of 16 bits that are trained have *masters* in float32, which rules update.

    Args:
        params: of one dtype, on one device; all trained, or all frozen.
        names: of the parameters, for messages.
        layout: of the parameters in the buffer.
        exchange: with the ranks among which it is cut.
        partition: what each rank keeps its part of.
        dtype: of the weights that modules see; None: as they are.
        tiers: where masters, and parts of weights, are; None: on the device.

    Attributes:
        values: of each parameter what this rank updates: its piece, 1-dim, or all of it where
            states are whole.
        chunks: of this rank's part, that are moved together.
        low: this rank's part of weights of 16 bits whose masters are elsewhere, (part_numel,).
        spans: where that lies in the flattened parameters; None: it is all of them.
        has_masters: ``values`` are not the weights that modules see.
        is_whole: the parameters can be read.
    """

    def __init__(
        self, params: Sequence[Tensor], names: Sequence[str], layout: Layout, exchange: Exchange,
        partition: Partition, dtype: torch.dtype | None = None, tiers: Tiers | None = None,
    ) -> None:  # fmt: skip
        self.params, self.names, self.layout = list(params), list(names), layout
        self.exchange, self.partition = exchange, partition
        full = self._rank_0s_values()
        self._full = full.to(dtype or full.dtype)
        self.has_masters = self.params[0].requires_grad and self._full.element_size() == 2
        self._part = layout.part(exchange.rank) if partition.states else slice(0, layout.numel)
        self._own = self._full[self._part]
        if self.has_masters:
            self._own = full[self._part].to(torch.float32, copy=True)
        elif partition.weights:
            self._own = self._own.clone()
        self.tiers = tiers
        self.low: Tensor | None = None
        self._states: dict[str, list[Tensor]] = {}
        self.chunks = [] if tiers is None else self._chunks(tiers.chunk_numel)
        if tiers is not None:
            self._move_away(tiers)
        self.is_whole = True
        self._gathering: Work | None = None
        self._kept: Tensor | None = None
        self._is_exact = True  # so are the first values, which nobody gathered
        self.spans: list[ShardMetadata] | None = None
        self.values = self._pieces()
        if partition.states or self.has_masters or dtype is not None or tiers is not None:
            for index, param in enumerate(self.params):
                param.data = self._view(self._full, index)
        else:
            for index, param in enumerate(self.params):
                param.data.copy_(self._view(self._full, index))
            self._full = self._own = self._full.new_empty(0)
        for param in self.params if self.has_masters else ():
            param.grad_dtype = torch.float32
        self._note_versions()
        self._room = guard.Room(self._full.untyped_storage(), self.params, self._sentences())
        self.release()

    def _chunks(self, max_numel: int) -> list[Chunk]:
        count = range(len(self.params))
        if self.partition.states:
            pieces = [self.layout.piece(index, self.exchange.rank) for index in count]
        else:
            starts = zip(self.layout.numels, self.layout.starts, strict=True)
            pieces = [Piece(0, numel, start) for numel, start in starts]
        return chunks(pieces, self._part.stop - self._part.start, max_numel)

    @property
    def cuts(self) -> list[int]:
        """Elements of the part at which its chunks begin, and its end."""
        return [*(chunk.start for chunk in self.chunks), self.chunks[-1].stop]

    def room_for(self, name: str, dtype: torch.dtype, block: int) -> list[Tensor]:
        """Of each parameter the state of a name, 1-dim, in the tier of states.

        Args:
            block: elements of the parameter per entry.
        """
        assert self.tiers is not None
        if name not in self._states:
            starts: dict[int, int] = {}
            cuts, end = [0], 0
            for chunk in self.chunks:
                for each in chunk.segments:
                    if each.number not in starts:  # kernels want it, as in the layout
                        starts[each.number] = end = -(-end // ALIGNMENT) * ALIGNMENT
                    end += num_blocks(each.numel, block)
                cuts.append(end)
            room = self.tiers.store("states", dtype, cuts).all()
            sizes = [num_blocks(values.numel(), block) for values in self.values]
            pairs = zip([starts.get(index, 0) for index in range(len(sizes))], sizes, strict=True)
            self._states[name] = [room[start : start + size] for start, size in pairs]
        return self._states[name]

    @torch.no_grad()
    def _move_away(self, tiers: Tiers) -> None:
        """What is updated goes to its tier; of masters there, a 16-bit copy to that of weights."""
        kind = "masters" if self.has_masters else "weights"
        if not tiers.is_away(kind) or not (self.has_masters or self.partition.weights):
            return
        self._own = tiers.keep(kind, self._own.detach(), self.cuts)
        if self.has_masters:
            self.low = low = self._full[self._part].detach()
            if self.partition.weights:
                away = tiers.is_away("weights")
                self.low = tiers.keep("weights", low, self.cuts) if away else low.clone()

    @torch.no_grad()
    def _rank_0s_values(self) -> Tensor:
        first = self.params[0]
        full = torch.zeros(self.layout.numel, dtype=first.dtype, device=first.device)
        for index, param in enumerate(self.params):
            self._view(full, index).copy_(param)
        self.exchange.broadcast(full)
        return full

    def _pieces(self) -> list[Tensor]:
        if not self.partition.states:
            if not self.has_masters:
                return self.params
            return [self._view(self._own, index) for index in range(len(self.params))]
        rank, numels = self.exchange.rank, self.layout.numels
        pieces = [self.layout.piece(index, rank) for index in range(len(numels))]
        sized = zip(pieces, numels, strict=True)
        self.spans = [ShardMetadata(piece.offset, numel) for piece, numel in sized]
        return [self._own[piece.start : piece.start + piece.numel] for piece in pieces]

    def _view(self, buffer: Tensor, index: int) -> Tensor:
        return buffer[self.layout.place(index)].view(self.params[index].shape)

    @property
    def nbytes(self) -> int:
        """Of the buffer, when it is whole."""
        return self.layout.numel * self._full.element_size()

    def gather(self, *, exact: bool = False) -> None:
        """Begins to bring the other ranks' parts, where this rank has only its own."""
        if self.is_whole or self._gathering is not None:
            return
        self._room.restore()
        self._is_exact = exact
        if self._kept is None or exact:
            self._gathering = self._gather(exact=exact)
            return
        with torch.no_grad():
            self._gathering = self.exchange.gather_kept(self._full, self._kept)

    @torch.no_grad()
    def _gather(self, *, exact: bool = False) -> Work:
        if self.partition.states:
            with self.exchange.beside():
                part = self._to_gather()
            return self.exchange.gather(self._full, part, exact=exact)
        if self.low is None:
            self._full.copy_(self._own)
        return DONE

    def _to_gather(self) -> Tensor:
        """This rank's part, on the device: in its place in the buffer, if it was elsewhere."""
        found = self._own if self.low is None else self.low
        if isinstance(found, Elsewhere):
            assert self.tiers is not None
            mine = self._full[self._part]
            self.tiers.bring(found.stored, mine)
            return mine
        return found

    def wait(self) -> None:
        """Returns when work queued on the current stream may read the weights."""
        if self._gathering is not None:
            self._gathering.wait()
            self._room.open()
            self._gathering, self.is_whole = None, True

    def release(self) -> None:
        """Gives the memory of the other ranks' parts back, whether it is needed or not."""
        self.wait()
        if self.partition.weights and self.is_whole:
            if self._kept is None and not self._is_exact:
                self._kept = self.exchange.keep(self._full.detach())
            self.is_whole = False
            self._room.release()

    def _sentences(self) -> list[str]:
        return [
            f"{name}, of shape {tuple(param.shape)}, is not whole here: ZeRO stage 3 keeps a part "
            "of it on each rank, and gathers it while the module runs that it belongs to. To read "
            f"or write it elsewhere, on all ranks: with opt.whole([{name!r}]): ..."
            for name, param in zip(self.names, self.params, strict=True)
        ]

    def updated(self, *, by_step: bool = False) -> Work | None:
        """Says that the ranks have changed their values; weights that stay whole are gathered.

        A backward through a forward from before is an error then, as with any optimizer.

        Args:
            by_step: which has made 16-bit weights of masters that are elsewhere.
        """
        if not by_step:
            self._refresh_low()
        torch.autograd.graph.increment_version(self.params)
        self._note_versions()
        if self.partition.weights:
            self.release()
            self._kept = None
            return None
        return self._gather() if self.partition.states or self.has_masters else None

    @torch.no_grad()
    def _refresh_low(self) -> None:
        if self.low is None:
            return
        for start, stop in pairwise(self.cuts):
            self.low[start:stop].copy_(self._own[start:stop].to(self._full.dtype))

    @torch.no_grad()
    def keep_written(self) -> None:
        """Takes over what was written into the parameters while they were whole."""
        assert self.is_whole
        if self.partition.weights or self.has_masters:
            self._own.copy_(self._full[self._part])
            if self.partition.weights:
                self._refresh_low()
        self._kept = None
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = [param._version for param in self.params] if self.has_masters else []

    @torch.no_grad()
    def load(self, index: int, whole: Tensor) -> None:
        """Takes this rank's piece of a parameter's values; the others are not gathered."""
        values = self.values[index]
        if self.spans is not None:
            offset = self.spans[index].offset
            whole = whole.reshape(-1)[offset : offset + values.numel()]
        values.copy_(whole)
        self._kept = None
        self._note_versions()

    def check(self) -> None:
        """Raises RuntimeError when a parameter's memory is not the buffer's any more, or its value
        not that of its master.
        """
        for name, param, version in zip(self.names, self.params, self._versions, strict=False):
            if param._version != version:
                raise RuntimeError(
                    f"{name} has been written since the last step, and its master in float32 has "
                    "not, so that the next step would undo it: with opt.whole(writes=True): ..., "
                    "or load the optimizer's state after the model's"
                )
        if not len(self._full):
            return
        mine = self._full.untyped_storage()._cdata
        for name, param, start in zip(self.names, self.params, self.layout.starts, strict=True):
            theirs = param.untyped_storage()._cdata, param.storage_offset()
            if param.numel() and theirs != (mine, start):
                raise RuntimeError(
                    f"{name}, of shape {tuple(param.shape)}, has other memory than when the "
                    "optimizer was made, so that its update would be lost; move or convert the "
                    "model before making the optimizer"
                )

    def whole(self, index: int, piece: Tensor, block: int | None = None) -> Tensor:
        """All ranks' pieces of something that is cut like a parameter, in its shape.

        A collective call.

        Args:
            block: elements of the parameter per entry; None: it has the parameter's shape.
        """
        shape = state_shape(tuple(self.params[index].shape), block)
        piece = piece.to(self.params[index].device)
        whole = torch.empty(shape, dtype=piece.dtype, device=piece.device)
        pieces = [self.layout.piece(index, rank) for rank in range(self.layout.world_size)]
        sizes = [num_blocks(piece.numel, block or 1) for piece in pieces]
        self.exchange.join(whole, piece.contiguous(), sizes)
        return whole


def state_shape(shape: tuple[int, ...], block: int | None) -> tuple[int, ...]:
    """Of a state that has the parameter's shape (block None), or an entry per block of it."""
    return shape if block is None else (num_blocks(math.prod(shape), block),)
