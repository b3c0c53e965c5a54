"""Collectives made of sends and receives between the ranks' hosts, whoever moves the messages.

That buys three things over gloo's own collectives: sums in one order of the ranks, half of gloo's
bytes for reduce_scatter, and parts of uneven sizes. A group that is split off needs no connections
of its own.

Algorithms (w ranks; bytes per rank in :func:`~anychip.comm.wire.wire_nbytes`): all_gather,
all_to_all: each rank to each other, directly. reduce_scatter: all_to_all of the parts, then a sum.
all_reduce: up to 64 KiB, of two ranks up to 512 KiB, all_gather and sum, else reduce_scatter and
all_gather. broadcast: a binomial tree.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from anychip.comm.progress import Driven, Message, Progress, Steps, StepwiseCall
from anychip.comm.reduction import host_capabilities, reduce_pairwise
from anychip.comm.wire import SMALL_NBYTES
from anychip.contract import (
    HOST,
    Capabilities,
    CollectiveCall,
    Membership,
    Reduction,
    Transfer,
    Transport,
    TransportError,
    UnsupportedError,
    Work,
)

# A message's tag has 31 bits: 10 for the group, 1 for what it belongs to, 20 for a collective's
# number and step, or for the caller's own tag. Messages of one tag keep their order, so that
# numbers may come round again.
GROUPS, _TAGS = 2**10, 2**20

PIECE_NBYTES = 4 * 1024 * 1024
"""A reduction goes piece by piece, so that sums and messages overlap. Smaller pieces cost more
changes of threads than they save where the cores are busy with training. A multiple of 8."""
PIECES_AHEAD = 2
"""Pieces from each rank that are on their way while one is summed: the memory beside the tensor."""
KEPT_NBYTES = 16 * 1024 * 1024
"""Of that memory, what a group keeps from one reduction to the next."""
PAIR_NBYTES = 512 * 1024
"""Up to this payload two ranks send each other the whole of it: as many bytes as halves and their
sums, in one step of two."""


_NOTHING = torch.empty(0, dtype=torch.uint8)


class Messages(Transport):
    """One rank's end of a group; tensors are on the host.

    Further than the interface promises: reductions have the same bits at any size, with any cut
    into parts, in async calls or not. ``send`` returns when the other rank has received. A
    reduction needs memory for two pieces of 4 MiB from each other rank, beside the tensor.

    Args:
        connections: of the job, what :class:`~anychip.comm.gloo.Gloo` is.
    """

    device = HOST
    reduces_on_host = True
    num_tags = _TAGS // 2

    def __init__(self, connections: Any, group: Membership, timeout_s: float) -> None:
        if group.number >= GROUPS:
            raise UnsupportedError(f"group {group.name!r}: a job has at most {GROUPS - 1} groups")
        self._connections, self._group, self._timeout_s = connections, group, timeout_s
        self._rank, self._size = group.rank, len(group.ranks)
        # Everybody begins with another one, so that nobody gets all first messages.
        self._peers = [(self._rank + i) % self._size for i in range(1, self._size)]
        self._progress: Progress | None = None
        self._kept: list[Tensor] = []
        self.description = connections.description

    @cached_property
    def _bytes(self) -> list[Tensor]:
        """What barriers send: it is never looked at."""
        return list(torch.zeros(self._size, dtype=torch.uint8).split(1))

    @cached_property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return host_capabilities()

    def part(self, group: Membership) -> Transport:
        found: Transport = self._connections.transport(group, self._timeout_s)
        return found

    def all_reduce(self, call: CollectiveCall) -> Work:
        flat = flatten(call.outputs[0])
        return self._begin(lambda tag: self.reduce_steps(flat, call.reduction, tag), call)

    def reduce_steps(self, flat: Tensor, reduction: Reduction, tag: int) -> Steps:
        """``flat`` becomes the reduction of the ranks' own."""
        rank = self._rank
        if flat.nbytes <= (PAIR_NBYTES if self._size == 2 else SMALL_NBYTES):
            kept, (parts,) = self._rooms(flat, flat.numel(), 1)
            parts[rank] = flat
            yield self.gather(parts, tag)
            reduce_pairwise(flat, parts, reduction)
            self._keep(kept)
        else:
            parts = list(flat.split(even_sizes(flat.numel(), self._size)))
            yield from self.reduce_parts(parts[rank], parts, reduction, tag, spread=True)

    def all_gather(self, call: CollectiveCall) -> Work:
        parts, mine = cut(call.outputs[0], call.sizes), flatten(call.inputs[0])

        def steps(tag: int) -> Steps:
            copy(parts[self._rank], mine)
            yield self.gather(parts, tag)

        return self._begin(steps, call)

    def reduce_scatter(self, call: CollectiveCall) -> Work:
        output, mine = flatten(call.outputs[0]), cut(call.inputs[0], call.sizes)

        def steps(tag: int) -> Steps:
            return self.reduce_parts(output, mine, call.reduction, tag, spread=False)

        return self._begin(steps, call)

    def broadcast(self, call: CollectiveCall) -> Work:
        (flat,) = map(flatten, call.inputs or call.outputs)
        return self._begin(lambda tag: self.broadcast_steps(flat, call.source, tag), call)

    def broadcast_steps(self, flat: Tensor, source: int, tag: int) -> Steps:
        """``flat`` becomes that of the source."""
        size, rank = self._size, self._rank
        distance = (rank - source) % size
        # Rank at distance d has its parent at d without its lowest bit.
        bit = 1
        while bit < size and not distance & bit:
            bit *= 2
        if distance:
            yield self._receive([(flat, (rank - bit) % size)], tag)
        children = []
        while bit > 1:
            bit //= 2
            if distance + bit < size:
                children.append((flat, (rank + bit) % size))
        yield self._send(children, tag)

    def all_to_all(self, call: CollectiveCall) -> Work:
        parts, mine = list(map(flatten, call.outputs)), list(map(flatten, call.inputs))
        rank = self._rank

        def steps(tag: int) -> Steps:
            if call.is_watched:
                # Parts whose ends differ in size have different tags. All are posted here, so that
                # those of two calls that share one keep the order of the calls.
                self._compare_sizes([(rank, mine[rank].numel())], parts)
                copy(parts[rank], mine[rank])
                posted: list[tuple[int, Message]] = []
                for move, ends in ((self._receive, parts), (self._send, mine)):
                    for peer in self._peers:
                        posted += move([(ends[peer], peer)], self._part_tag(call, ends[peer]))
                yield posted[::-1]
                return
            # Sizes may differ from pair to pair: they are compared before anything else is sent.
            told = torch.tensor([part.numel() for part in mine])
            heard = torch.zeros_like(told)
            heard[rank] = told[rank]
            yield self._swap(list(heard.split(1)), list(told.split(1)), tag)
            self._compare_sizes(enumerate(heard.tolist()), parts)
            copy(parts[rank], mine[rank])
            yield self._swap(parts, mine, tag + 1)

        return self._begin(steps, call)

    def exchange(self, transfers: Sequence[Transfer]) -> Work:
        # Receives first: what arrives then has a place to go to.
        outputs = [t for t in transfers if t.kind == "recv"]
        inputs = [t for t in transfers if t.kind == "send"]
        posted: list[tuple[int, Message]] = []
        for move, ends in ((self._receive, outputs), (self._send, inputs)):
            for _, tensor, peer, tag in ends:
                posted += move([(tensor, peer)], self._tag(1, tag))
        return StepwiseCall(iter([posted]), [t.tensor for t in outputs], self._timeout_s)

    def barrier(self, call: CollectiveCall) -> Work:
        return self._begin(lambda tag: iter([self.gather(self._bytes, tag)]), call)

    def proceed(self, work: Work, on_error: Callable[[Exception], None]) -> None:
        if isinstance(work, Driven):
            if self._progress is None:
                self._progress = Progress(self._group.name)
            self._progress.add(work, on_error)

    def drain(self) -> None:
        """Waits for this rank's asynchronous calls, for which others may wait; to the limit."""
        if self._progress is not None:
            self._progress.close()

    def abort(self) -> None:
        self._connections.abort()

    def close(self) -> None:
        self.drain()
        self._kept.clear()

    def _begin(self, steps: Callable[[int], Steps], call: CollectiveCall) -> Work:
        """A call whose first messages are on their way."""
        return StepwiseCall(steps(self._tag(0, call.tag * 2)), call.outputs, self._timeout_s)

    def _tag(self, kind: int, value: int) -> int:
        return (self._group.number * 2 + kind) * _TAGS + value

    def _part_tag(self, call: CollectiveCall, part: Tensor) -> int:
        """In the half of the messages' tags that the caller's do not use."""
        return self._tag(1, self.num_tags + (call.tag + 40503 * part.numel()) % self.num_tags)

    def _compare_sizes(self, heard: Iterable[tuple[int, int]], parts: list[Tensor]) -> None:
        ranks = self._group.ranks
        for peer, numel in heard:
            if numel != parts[peer].numel():
                text = (
                    f"rank {ranks[peer]} sends {numel} elements to rank "
                    f"{ranks[self._rank]}, which has room for {parts[peer].numel()}"
                )
                raise TransportError(text, (peer,), "wrong")

    # What posts and does not wait: it returns messages, or steps that yield them.

    def reduce_parts(
        self, output: Tensor, parts: list[Tensor], reduction: Reduction, tag: int, *, spread: bool
    ) -> Steps:
        """``output`` becomes the reduction of the ranks' ``parts[rank]``, piece by piece.

        While a piece is summed the next ones are on their way. With ``spread``, the other
        ``parts`` become the other ranks' outputs: a part that comes back is written where it came
        from, which is safe because it comes after what was sent has arrived.
        """
        own, size = parts[self._rank], PIECE_NBYTES // output.itemsize
        if max(part.numel() for part in parts) <= size:
            yield from self._reduce_at_once(output, parts, reduction, tag, spread=spread)
            return
        pieces = [list(part.split(size)) if part.numel() else [] for part in parts]
        num_own = len(pieces[self._rank])
        kept, rooms = self._rooms(own, min(size, own.numel()), min(PIECES_AHEAD, num_own))
        posted = [
            message
            for k in range(max(map(len, pieces)))
            for message in self._send(
                [(pieces[p][k], p) for p in self._peers if k < len(pieces[p])], tag
            )
        ]
        back = [(piece, peer) for peer in self._peers for piece in pieces[peer]] if spread else []
        posted += self._receive(back, tag + 1)
        coming = [
            self._receive_piece(room, pieces[self._rank][k], tag) for k, room in enumerate(rooms)
        ]
        for k, piece in enumerate(pieces[self._rank]):
            yield coming[k]
            room = [part[: piece.numel()] for part in rooms[k % len(rooms)]]
            room[self._rank] = piece
            reduce_pairwise(output[k * size : k * size + piece.numel()], room, reduction)
            if spread:
                posted += self._send([(piece, peer) for peer in self._peers], tag + 1)
            if k + len(rooms) < num_own:
                after = pieces[self._rank][k + len(rooms)]
                coming.append(self._receive_piece(rooms[k % len(rooms)], after, tag))
        self._keep(kept)
        yield posted

    def _reduce_at_once(
        self, output: Tensor, parts: list[Tensor], reduction: Reduction, tag: int, *, spread: bool
    ) -> Steps:
        """The same of parts that are one piece each."""
        own = parts[self._rank]
        kept, (room,) = self._rooms(own, own.numel(), 1)
        coming = self._swap(room, parts, tag)
        if spread:
            back = self._receive([(parts[peer], peer) for peer in self._peers], tag + 1)
        yield coming
        room[self._rank] = own
        reduce_pairwise(output, room, reduction)
        self._keep(kept)
        if spread:
            yield self._send([(output, peer) for peer in self._peers], tag + 1) + back

    def _receive_piece(
        self, room: list[Tensor], piece: Tensor, tag: int
    ) -> list[tuple[int, Message]]:
        return self._receive([(room[peer][: piece.numel()], peer) for peer in self._peers], tag)

    def _rooms(self, like: Tensor, numel: int, count: int) -> tuple[Tensor, list[list[Tensor]]]:
        """Memory for what comes from the other ranks; this rank's places are empty.

        It is the last call's where that is large enough: fresh memory costs the kernel more time
        than the sum takes. Calls that are under way at once have memory of their own.
        """
        others = self._size - 1
        nbytes = numel * like.itemsize * others * count
        try:
            whole = self._kept.pop()
        except IndexError:  # asking first would let another call take it meanwhile
            whole = _NOTHING
        if whole.numel() < nbytes:
            whole = torch.empty(nbytes, dtype=torch.uint8)
        if others == 1 == count:
            parts = [whole[:nbytes].view(like.dtype)]
        else:
            parts = list(whole[:nbytes].view(like.dtype).split([numel] * (others * count)))
        empty = like[:0]
        rooms = [parts[i * others : (i + 1) * others] for i in range(count)]
        for room in rooms:
            room.insert(self._rank, empty)
        return whole, rooms

    def _keep(self, room: Tensor) -> None:
        """Takes memory back that nothing is received into any more."""
        if room.nbytes <= KEPT_NBYTES and not self._kept:
            self._kept.append(room)

    def gather(self, parts: list[Tensor], tag: int) -> list[tuple[int, Message]]:
        """Posts: this rank's part goes to everybody, theirs come to their places."""
        return self._swap(parts, [parts[self._rank]] * self._size, tag)

    def _swap(
        self, incoming: list[Tensor], outgoing: list[Tensor], tag: int
    ) -> list[tuple[int, Message]]:
        """Posts: ``outgoing[r]`` to each other rank r, ``incoming[r]`` from it."""
        received = self._receive([(incoming[peer], peer) for peer in self._peers], tag)
        # What is sent is waited for first: by then, what is received is mostly there.
        return self._send([(outgoing[peer], peer) for peer in self._peers], tag) + received

    def _receive(
        self, messages: Iterable[tuple[Tensor, int]], tag: int
    ) -> list[tuple[int, Message]]:
        move = self._connections.recv
        return [(p, move([t], self._group.ranks[p], tag)) for t, p in messages if t.numel()]

    def _send(self, messages: Iterable[tuple[Tensor, int]], tag: int) -> list[tuple[int, Message]]:
        move = self._connections.send
        return [(p, move([t], self._group.ranks[p], tag)) for t, p in messages if t.numel()]


def flatten(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)


def cut(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return list(flatten(tensor).split_with_sizes(list(sizes)))


def copy(output: Tensor, tensor: Tensor) -> None:
    if output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor)


def even_sizes(numel: int, parts: int) -> list[int]:
    """Sizes that differ by one at most."""
    return [(numel * (i + 1)) // parts - (numel * i) // parts for i in range(parts)]
