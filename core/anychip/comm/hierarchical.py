"""Calls of ranks on several hosts: through memory in each host, and between hosts once.

Of a group with equally many neighbours on each host, L on each of H: what the ranks of one host
have in common goes from one host to another once, and not L times, as it does where each rank sends
to each. A host's ranks share the work: each of them speaks for an L-th of the values with those at
its place on the other hosts.

Sums have the bits of all other ways between hosts (:mod:`anychip.comm.reduction`): a host's ranks
are neighbours, L is a power of two, and 16-bit floats go as float32, rounded once at the end: a
host's sum has then no more bytes than its ranks' values. Sums for another L go directly, as do
messages, all_to_all and barriers, and every call of other groups.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005, section 5 (clusters of multi-processor nodes).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anychip.comm.messages import Messages, copy, cut, even_sizes, flatten
from anychip.comm.progress import Steps
from anychip.comm.shared_memory import SharedCollectives, SharedMemory
from anychip.comm.wire import SMALL_NBYTES
from anychip.contract import CollectiveCall, Membership, Reduction, TransportError, Work

if TYPE_CHECKING:
    from anychip.comm.gloo import Gloo


class Hosts:
    """One rank's connections: sockets to all ranks, and the memory of those on its host.

    Args:
        memory: None: this rank is alone on its host.
        host_of: of each rank in the world, a number.

    Attributes:
        description: for reports.
        send, recv: as of :class:`~anychip.comm.gloo.Gloo`.
    """

    def __init__(self, sockets: Gloo, memory: SharedMemory | None, host_of: Sequence[int]) -> None:
        self.sockets, self.memory, self.host_of = sockets, memory, host_of
        self.send, self.recv = sockets.send, sockets.recv
        self.description = sockets.description

    def transport(self, group: Membership, timeout_s: float) -> Messages:
        """Of a group: memory on one host, host by host where they are alike, else directly."""
        hosts = [self.host_of[rank] for rank in group.ranks]
        if self.memory is not None and len(set(hosts)) == 1:
            return SharedCollectives(self.memory, group, timeout_s)
        size = hosts.count(hosts[0])
        blocks = [hosts[at : at + size] for at in range(0, len(hosts), size)]
        alike = [[block[0]] * size for block in blocks] == blocks
        if self.memory is None or size == 1 or not alike or len(set(hosts)) < len(blocks):
            return Messages(self, group, timeout_s)
        return Hierarchical(self, self.memory, size, group, timeout_s)

    def abort(self) -> None:
        """Closes this process's connections."""
        for connections in (self.memory, self.sockets):
            if connections is not None:
                connections.abort()

    def close(self) -> None:
        """Gives them back."""
        for connections in (self.memory, self.sockets):
            if connections is not None:
                connections.close()
        del self.send, self.recv


class Hierarchical(Messages):
    """One rank's end of a group that has ``size`` neighbours on each of its hosts.

    Further than the interface promises: as Messages.
    """

    def __init__(
        self,
        connections: Hosts,
        memory: SharedMemory,
        size: int,
        group: Membership,
        timeout_s: float,
    ) -> None:
        super().__init__(connections, group, timeout_s)
        self._here_size, self._num_hosts = size, len(group.ranks) // size
        self._host, self._place = divmod(group.rank, size)
        self._first = self._host * size
        ranks = group.ranks[self._first : self._first + size]
        here = Membership(ranks, self._place, group.number, group.name)
        self._here = SharedCollectives(memory, here, timeout_s)
        alike = Membership(group.ranks[self._place :: size], self._host, group.number, group.name)
        self._between = Messages(connections, alike, timeout_s)
        self.description = (
            f"{self._num_hosts} hosts of {size} ranks: shared memory in each, sockets between"
            " them, reduced on the host pairwise in rank order"
        )

    def close(self) -> None:
        super().close()
        self._between.close()

    def all_reduce(self, call: CollectiveCall) -> Work:
        output = flatten(call.outputs[0])
        if not self._sums_in_turn:
            return super().all_reduce(call)

        def steps(tag: int) -> Steps:
            how, flat = _joined(call.reduction), _widened(output)
            if flat.nbytes <= SMALL_NBYTES:
                begin = self._here.all_reduce(_part(call, [], flat, how))
                end, mine = None, flat
            else:
                sizes = even_sizes(flat.numel(), self._here_size)
                mine = flat.split(sizes)[self._place]
                begin = self._here.reduce_scatter(_part(call, [flat], mine, how, sizes))
                end = self._here.all_gather(_part(call, [mine], flat, sizes=sizes))
            yield []  # nothing above has waited for anybody
            self._wait(begin)
            yield from self._of_alike(self._between.reduce_steps(mine, how, tag))
            self._divide(mine, call.reduction)
            if end is not None:
                self._wait(end)
            if flat is not output:
                copy(output, flat)

        return self._begin(steps, call)

    def reduce_scatter(self, call: CollectiveCall) -> Work:
        output, given = flatten(call.outputs[0]), flatten(call.inputs[0])
        if not self._sums_in_turn:
            return super().reduce_scatter(call)

        def steps(tag: int) -> Steps:
            how, flat = _joined(call.reduction), _widened(given)
            reduced = output if flat is given else flat.new_empty(output.numel())
            # What this rank has to sum of its host for those at its place on each host.
            sums = [flat.new_empty(sizes[self._place]) for _, sizes in self._of_hosts(flat, call)]
            sums[self._host] = reduced
            works = [
                self._here.reduce_scatter(_part(call, [part], mine, how, sizes))
                for mine, (part, sizes) in zip(sums, self._of_hosts(flat, call), strict=True)
            ]
            yield []
            for work in works:
                self._wait(work)
            joining = self._between.reduce_parts(reduced, sums, how, tag, spread=False)
            yield from self._of_alike(joining)
            self._divide(reduced, call.reduction)
            if reduced is not output:
                copy(output, reduced)

        return self._begin(steps, call)

    def all_gather(self, call: CollectiveCall) -> Work:
        output, mine = flatten(call.outputs[0]), flatten(call.inputs[0])

        def steps(tag: int) -> Steps:
            parts = cut(output, call.sizes)
            alike = parts[self._place :: self._here_size]
            works = [
                self._here.all_gather(_part(call, [part], whole, sizes=sizes))
                for part, (whole, sizes) in zip(alike, self._of_hosts(output, call), strict=True)
            ]
            copy(parts[self._rank], mine)
            yield from self._of_alike(iter([self._between.gather(alike, tag)]))
            for work in works:
                self._wait(work)

        return self._begin(steps, call)

    def broadcast(self, call: CollectiveCall) -> Work:
        (flat,) = map(flatten, call.inputs or call.outputs)
        host, place = divmod(call.source, self._here_size)

        def steps(tag: int) -> Steps:
            work = self._here.broadcast(_part(call, [], flat)._replace(source=place))
            if place == self._place:
                yield from self._of_alike(self._between.broadcast_steps(flat, host, tag))
            yield []
            self._wait(work)

        return self._begin(steps, call)

    @property
    def _sums_in_turn(self) -> bool:
        """Whether sums of the hosts' sums have the bits of a sum of all."""
        return not self._here_size & (self._here_size - 1)

    def _of_hosts(
        self, flat: Tensor, call: CollectiveCall
    ) -> Iterator[tuple[Tensor, Sequence[int]]]:
        """The values of the ranks of each host, and how many each of them has."""
        size, ends = self._here_size, [0, *accumulate(call.sizes)]
        for first in range(0, len(call.sizes), size):
            yield flat[ends[first] : ends[first + size]], call.sizes[first : first + size]

    def _divide(self, flat: Tensor, reduction: Reduction) -> None:
        if reduction == "avg":
            with torch.no_grad():
                flat.div_(self._size)

    def _of_alike(self, steps: Steps) -> Steps:
        """Steps between the ranks at one place, which are known by their ranks in the group."""
        for posted in steps:
            yield [(peer * self._here_size + self._place, message) for peer, message in posted]

    def _wait(self, work: Work) -> None:
        try:
            work.wait()
        except TransportError as error:
            error.peers = tuple(self._first + peer for peer in error.peers)
            raise


def _widened(flat: Tensor) -> Tensor:
    """16-bit floats in float32, in which they are summed; others as they are."""
    return flat.float() if flat.dtype.is_floating_point and flat.itemsize < 4 else flat


def _joined(reduction: Reduction) -> Reduction:
    """What sums of sums are made by; all are divided at the end."""
    return "sum" if reduction == "avg" else reduction


def _part(
    call: CollectiveCall,
    inputs: Sequence[Tensor],
    output: Tensor,
    reduction: Reduction = "sum",
    sizes: Sequence[int] = (),
) -> CollectiveCall:
    """What the ranks of a host do of a call, with its tag."""
    return CollectiveCall(call.name, inputs, [output], reduction, tuple(sizes), tag=call.tag)
