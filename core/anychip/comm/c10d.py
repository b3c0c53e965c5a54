"""Ranks as processes, with tensors on the host: collectives made of gloo's sends and receives.

gloo moves the messages; the algorithms are here. That buys three things which gloo's own
collectives do not have: sums in the order of the ranks, half of gloo's bytes for reduce_scatter,
and parts of uneven sizes. A group that is split off needs no connections of its own.

Algorithms (w ranks; bytes per rank in :func:`~anychip.comm.wire.wire_nbytes`):
all_gather, all_to_all: each rank to each other, directly. reduce_scatter: all_to_all of the parts,
then a sum. all_reduce: up to 64 KiB all_gather and sum, else reduce_scatter and all_gather.
broadcast: a binomial tree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from anychip.comm.job import Failure, Job, part_of
from anychip.comm.ledger import Ledger, ranks_text
from anychip.comm.messages import Post
from anychip.comm.progress import Message, Progress, Steps, StepwiseCall
from anychip.comm.reduction import host_capabilities, reduce_in_order
from anychip.comm.solo import alone
from anychip.comm.wire import SMALL_NBYTES
from anychip.contract.communicator import (
    DONE,
    Capabilities,
    Communicator,
    Reduction,
    Traffic,
    Transfer,
    Work,
)
from anychip.contract.errors import CommunicationError, UnsupportedError

# A message's tag has 31 bits: 10 for the group, 1 for what it belongs to, 20 for a collective's
# number and step, or for the caller's own tag. Messages of one tag keep their order, so that
# numbers may come round again.
_GROUPS, _TAGS = 2**10, 2**20


class ProcessGroupCommunicator(Communicator):
    """One process's end of a group of processes; tensors are on the host.

    Further than the interface promises: reductions have the same bits at any size, with any cut
    into parts, in async calls or not. A call that is not the same on all ranks is refused before
    anything is sent, at the price of one round trip to the store (16 to 60 us on one machine). A
    failure in one group ends all groups of the job, on all ranks. ``send`` returns when the other
    rank has received. A reduction needs memory for two pieces of 4 MiB from each other rank,
    beside the tensor.

    Args:
        job: this process's part in the job.
        group: number of the group, alike on its members; 0 is the world.
        ranks: the members' ranks in the world.
    """

    def __init__(self, job: Job, group: int, ranks: tuple[int, ...], name: str) -> None:
        self.job, self.name, self.ranks = job, name, ranks
        self.rank, self.world_size = ranks.index(job.rank), len(ranks)
        self.timeout_s, self.traffic = job.timeout_s, Traffic()
        self.description = "gloo messages, reduced on the host in rank order"
        self._group = group
        store = part_of(job.store, f"group/{group}")
        self._ledger = Ledger(store, self.rank, ranks, compare=job.check == "always")
        self._progress: Progress | None = None
        self._post = Post(job.connections, self.rank, ranks)

    @cached_property
    def capabilities(self) -> Capabilities:
        return host_capabilities()

    def abort(self, reason: str) -> None:
        self.job.abort(self._where("abort"), reason)

    def close(self) -> None:
        """Ends this process's part in the job when this is the world; a split-off group stays."""
        self.is_closed = True
        if self._group == 0:
            self.job.close()

    def _all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> Work:
        flat = _flat(tensor)

        def steps(tag: int) -> Steps:
            if flat.nbytes <= SMALL_NBYTES:
                parts = self._post.room(flat, [flat.numel()] * self.world_size)
                parts[self.rank] = flat
                yield self._post.gather(parts, tag)
                reduce_in_order(flat, parts, reduction)
            else:
                parts = list(flat.split(_even(flat.numel(), self.world_size)))
                yield from self._post.reduce_parts(
                    parts[self.rank], parts, reduction, tag, spread=True
                )

        return self._call("all_reduce", f"{reduction} {_shape(tensor)}", steps, [tensor])

    def _all_gather(self, output: torch.Tensor, tensor: torch.Tensor, sizes: Sequence[int]) -> Work:
        parts, mine = list(_flat(output).split(list(sizes))), _flat(tensor)

        def steps(tag: int) -> Steps:
            if parts[self.rank].data_ptr() != mine.data_ptr():
                parts[self.rank].copy_(mine)
            yield self._post.gather(parts, tag)

        return self._call("all_gather", f"{list(sizes)} {tensor.dtype}", steps, [output])

    def _reduce_scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        reduction: Reduction,
        sizes: Sequence[int],
    ) -> Work:
        mine = list(_flat(tensor).split(list(sizes)))

        def steps(tag: int) -> Steps:
            yield from self._post.reduce_parts(_flat(output), mine, reduction, tag, spread=False)

        what = f"{reduction} {list(sizes)} {tensor.dtype}"
        return self._call("reduce_scatter", what, steps, [output])

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        flat, size = _flat(tensor), self.world_size
        distance = (self.rank - source) % size

        def steps(tag: int) -> Steps:
            # Rank at distance d has its parent at d without its lowest bit.
            bit = 1
            while bit < size and not distance & bit:
                bit *= 2
            if distance:
                yield self._post.receive([(flat, (self.rank - bit) % size)], tag)
            children = []
            while bit > 1:
                bit //= 2
                if distance + bit < size:
                    children.append((flat, (self.rank + bit) % size))
            yield self._post.send(children, tag)

        what = f"from rank {self.ranks[source]} {_shape(tensor)}"
        return self._call("broadcast", what, steps, [] if source == self.rank else [tensor])

    def _all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Work:
        parts, mine = [_flat(t) for t in outputs], [_flat(t) for t in inputs]

        def steps(tag: int) -> Steps:
            # Sizes may differ from pair to pair: they are compared before anything else is sent.
            told = torch.tensor([part.numel() for part in mine])
            heard = torch.zeros_like(told)
            heard[self.rank] = told[self.rank]
            yield self._post.swap(list(heard.split(1)), list(told.split(1)), tag)
            self._compare_sizes(heard.tolist(), parts)
            if parts[self.rank].data_ptr() != mine[self.rank].data_ptr():
                parts[self.rank].copy_(mine[self.rank])
            yield self._post.swap(parts, mine, tag + 1)

        return self._call("all_to_all", str(outputs[0].dtype), steps, list(outputs))

    def _compare_sizes(self, heard: list[int], parts: list[torch.Tensor]) -> None:
        for peer, numel in enumerate(heard):
            if numel != parts[peer].numel():
                reason = (
                    f"rank {self.ranks[peer]} sends {numel} elements to rank "
                    f"{self.ranks[self.rank]}, which has room for {parts[peer].numel()}"
                )
                failure = Failure((self.ranks[peer],), reason)
                raise self.job.fail(self._where("all_to_all"), failure)

    def _exchange(self, transfers: Sequence[Transfer]) -> Work:
        if not transfers:
            return DONE
        names = ", ".join(
            f"{kind} {'to' if kind == 'send' else 'from'} rank {self.ranks[peer]}"
            for kind, _, peer, _ in transfers
        )
        where = self._where(names)
        self._refuse(where)
        for transfer in transfers:
            self._compare_message(where, transfer)

        def steps() -> Steps:
            posted: list[tuple[int, Message]] = []
            # Receives first: what arrives then has a place to go to.
            for kind, tensor, peer, tag in sorted(transfers, key=lambda t: t.kind):
                move = self._post.receive if kind == "recv" else self._post.send
                posted += move([(_flat(tensor), peer)], self._tag(1, tag))
            yield posted

        def explain(peer: int, error: Exception, late: bool) -> CommunicationError:
            world = (self.ranks[peer],)
            if not late:
                return self.job.explain(where, error, lambda: world)
            return self._late(where, (peer,))

        outputs = [t.tensor for t in transfers if t.kind == "recv"]
        return self._posted(where, lambda: StepwiseCall(steps(), outputs, self.timeout_s, explain))

    def _compare_message(self, where: str, transfer: Transfer) -> None:
        kind, tensor, peer, tag = transfer
        if not 0 <= tag < _TAGS:
            raise ValueError(f"{self}.{kind}: a tag from 0 to {_TAGS - 1} expected, got {tag}")
        pair = (self.rank, peer) if kind == "send" else (peer, self.rank)
        try:
            other = self._ledger.message(*pair, tag, _shape(tensor))
        except RuntimeError as error:
            raise self.job.explain(where, error, lambda: (0,)) from error
        if other is None:
            return
        source, destination = (self.ranks[rank] for rank in pair)
        sent, expected = (_shape(tensor), other) if kind == "send" else (other, _shape(tensor))
        reason = (
            f"the ranks disagree: rank {source} sends {sent} to rank {destination}, which expects "
            f"{expected} (tag {tag})"
        )
        raise self.job.fail(where, Failure((self.ranks[peer],), reason))

    def _barrier(self) -> None:
        here = list(torch.zeros(self.world_size, dtype=torch.uint8).split(1))
        self._call("barrier", "", lambda tag: iter([self._post.gather(here, tag)]), []).wait()

    def _split(self, groups: Sequence[tuple[int, ...]], name: str) -> Communicator:
        mine = list(next(group for group in groups if self.rank in group))
        numbers = torch.zeros(self.world_size, dtype=torch.int64)
        if mine[0] == self.rank and len(mine) > 1:
            numbers[self.rank] = self.job.store.add("groups", 1)
        parts = list(numbers.split(1))
        what = f"{name} {[list(group) for group in groups]}"
        self._call("split", what, lambda tag: iter([self._post.gather(parts, tag)]), []).wait()
        if len(mine) == 1:
            return alone(name=name, world_rank=self.job.rank, device=self.device)
        number = int(numbers[mine[0]])
        if number >= _GROUPS:
            raise UnsupportedError(f"{self}.split: a job has at most {_GROUPS - 1} groups")
        ranks = tuple(self.ranks[rank] for rank in mine)
        return self._of_group(number, ranks, name)

    def _of_group(self, number: int, ranks: tuple[int, ...], name: str) -> Communicator:
        return ProcessGroupCommunicator(self.job, number, ranks, name)

    def _proceed(self, work: Work) -> None:
        if isinstance(work, StepwiseCall):
            if self._progress is None:
                self._progress = Progress(self.name)
                self.job.at_close(self._progress.close)
            self._progress.add(work)

    def _enter(self, call: str, what: str) -> tuple[int, str]:
        """Compares a collective with the other ranks'; its number, and where we are."""
        self._refuse(self._where(call))
        try:
            number, wrong = self._ledger.enter(f"{call} {what}".rstrip())
        except RuntimeError as error:  # the store went with its host
            raise self.job.explain(self._where(call), error, lambda: (0,)) from error
        where = self._where(f"{call} #{number}")
        if wrong is not None:
            raise self.job.fail(where, Failure(*wrong))
        return number, where

    def _call(self, call: str, what: str, steps: Any, outputs: list[torch.Tensor]) -> Work:
        """A collective whose first messages are on their way."""
        number, where = self._enter(call, what)

        def missing() -> tuple[int, ...]:
            try:
                return self._ledger.missing(number)
            except RuntimeError:
                return ()

        def explain(peer: int, error: Exception, late: bool) -> CommunicationError:
            if late:
                return self._late(where, missing() or (peer,))
            return self.job.explain(
                where, error, lambda: tuple(self.ranks[rank] for rank in missing())
            )

        tag = self._tag(0, number % (_TAGS // 2) * 2)
        return self._posted(
            where, lambda: StepwiseCall(steps(tag), outputs, self.timeout_s, explain)
        )

    def _refuse(self, where: str) -> None:
        """Raises when nothing can be called any more."""
        self.job.refuse_after_failure(where)
        if self.is_closed:
            raise CommunicationError(where, "this rank has closed the communicator")

    def _posted(self, where: str, post: Any) -> Work:
        """A call with its first messages on their way; posting fails on a broken connection."""
        try:
            return post()  # type: ignore[no-any-return]
        except CommunicationError:
            raise
        except RuntimeError as error:
            everyone = tuple(rank for rank in self.ranks if rank != self.job.rank)
            raise self.job.explain(where, error, lambda: everyone) from error

    def _late(self, where: str, ranks: tuple[int, ...]) -> CommunicationError:
        world = tuple(self.ranks[rank] for rank in ranks)
        reason = f"{ranks_text(world)} did not come within {self.timeout_s:g} s"
        # Another rank may have ended the job in the meantime, and cut the store with it.
        with contextlib.suppress(RuntimeError):
            if len(ranks) == 1:
                reason += f"; {self._ledger.last_call(ranks[0])}"
        return self.job.fail(where, Failure(world, reason))

    def _where(self, call: str) -> str:
        return f"{self.name}, rank {self.rank} of {self.world_size}: {call}"

    def _tag(self, kind: int, value: int) -> int:
        return (self._group * 2 + kind) * _TAGS + value


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)


def _even(numel: int, parts: int) -> list[int]:
    """Sizes that differ by one at most."""
    return [(numel * (i + 1)) // parts - (numel * i) // parts for i in range(parts)]


def _shape(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
