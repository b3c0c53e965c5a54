"""Messages between the ranks of a group, over gloo, and what is made of many of them.

Everything here posts and does not wait: it returns messages, or steps that yield them, for
:class:`~anychip.comm.progress.StepwiseCall` to wait for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from anychip.comm.progress import Message, Steps
from anychip.comm.reduction import reduce_in_order
from anychip.contract.communicator import Reduction

PIECE_NBYTES = 4 * 1024 * 1024
"""A reduction goes piece by piece, so that sums and messages overlap. Smaller pieces cost more
changes of threads than they save where the cores are busy with training. A multiple of 8."""
PIECES_AHEAD = 2
"""Pieces from each rank that are on their way while one is summed: the memory beside the tensor."""


class Post:
    """The messages of one rank of a group.

    Args:
        connections: gloo's process group of the world.
        rank: of this one in the group.
        ranks: the members' ranks in the world.
    """

    def __init__(self, connections: Any, rank: int, ranks: tuple[int, ...]) -> None:
        self._connections, self._rank, self._ranks = connections, rank, ranks
        # Everybody begins with another one, so that nobody gets all first messages.
        self._peers = [(rank + i) % len(ranks) for i in range(1, len(ranks))]

    def reduce_parts(
        self,
        output: torch.Tensor,
        parts: list[torch.Tensor],
        reduction: Reduction,
        tag: int,
        *,
        spread: bool,
    ) -> Steps:
        """``output`` becomes the reduction of the ranks' ``parts[rank]``, piece by piece.

        While a piece is summed the next ones are on their way. With ``spread``, the other
        ``parts`` become the other ranks' outputs: a part that comes back is written where it came
        from, which is safe because it comes after what was sent has arrived.
        """
        own, size = parts[self._rank], PIECE_NBYTES // output.itemsize
        pieces = [list(part.split(size)) if part.numel() else [] for part in parts]
        num_own = len(pieces[self._rank])
        rooms = [
            self.room(own, [min(size, own.numel())] * len(self._ranks))
            for _ in range(min(PIECES_AHEAD, num_own))
        ]
        posted = [
            message
            for k in range(max(map(len, pieces)))
            for message in self.send(
                [(pieces[p][k], p) for p in self._peers if k < len(pieces[p])], tag
            )
        ]
        back = [(piece, peer) for peer in self._peers for piece in pieces[peer]] if spread else []
        posted += self.receive(back, tag + 1)
        coming = [
            self._receive_piece(rooms[k], pieces[self._rank][k], tag) for k in range(len(rooms))
        ]
        for k, piece in enumerate(pieces[self._rank]):
            yield coming[k]
            room = [part[: piece.numel()] for part in rooms[k % len(rooms)]]
            room[self._rank] = piece
            reduce_in_order(output[k * size : k * size + piece.numel()], room, reduction)
            if spread:
                posted += self.send([(piece, peer) for peer in self._peers], tag + 1)
            if k + len(rooms) < num_own:
                after = pieces[self._rank][k + len(rooms)]
                coming.append(self._receive_piece(rooms[k % len(rooms)], after, tag))
        yield posted

    def _receive_piece(
        self, room: list[torch.Tensor], piece: torch.Tensor, tag: int
    ) -> list[tuple[int, Message]]:
        return self.receive([(room[peer][: piece.numel()], peer) for peer in self._peers], tag)

    def room(self, like: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
        """Uninitialised tensors for the other ranks' parts; this rank's place stays empty."""
        sizes[self._rank] = 0
        return list(torch.empty(sum(sizes), dtype=like.dtype).split(sizes))

    def gather(self, parts: list[torch.Tensor], tag: int) -> list[tuple[int, Message]]:
        """Posts: this rank's part goes to everybody, theirs come to their places."""
        return self.swap(parts, [parts[self._rank]] * len(self._ranks), tag)

    def swap(
        self, incoming: list[torch.Tensor], outgoing: list[torch.Tensor], tag: int
    ) -> list[tuple[int, Message]]:
        """Posts: ``outgoing[r]`` to each other rank r, ``incoming[r]`` from it."""
        received = self.receive([(incoming[peer], peer) for peer in self._peers], tag)
        return received + self.send([(outgoing[peer], peer) for peer in self._peers], tag)

    def receive(
        self, messages: Iterable[tuple[torch.Tensor, int]], tag: int
    ) -> list[tuple[int, Message]]:
        move = self._connections.recv
        return [(p, move([t], self._ranks[p], tag)) for t, p in messages if t.numel()]

    def send(
        self, messages: Iterable[tuple[torch.Tensor, int]], tag: int
    ) -> list[tuple[int, Message]]:
        move = self._connections.send
        return [(p, move([t], self._ranks[p], tag)) for t, p in messages if t.numel()]
